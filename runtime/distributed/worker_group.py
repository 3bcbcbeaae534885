"""Worker processes: starts, watches and ends them, and sends messages to them. Does not import torch.

This module does not depend on what the messages contain.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

import runtime
from ops.machine import Machine
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import ParallelPlan, Plan
from runtime.distributed.link import Frame, Link, LinkClosed, encode
from runtime.distributed.numa import rank_environment
from runtime.distributed.rendezvous import (
    TOKEN_VARIABLE,
    MasterListener,
    fingerprint,
    join_master,
    listen,
)
from runtime.distributed.rendezvous_folder import RendezvousFolder
from runtime.errors import ConfigurationError, WorkerFailed, first_error
from runtime.mesh.rendezvous import Rendezvous

logger = logging.getLogger("penstock.core")

LOOPBACK = "127.0.0.1"
EXIT_TIMEOUT_S = 5.0
POLL_S = 0.1
MODULE = "runtime.distributed.worker_process"


class RemoteError(Exception):
    """An exception in a worker, with its traceback as text."""


class WorkerGroup:
    """The processes that compute one replica together with this process, which is rank 0.

    Belongs to the event loop on which it was created. When `close` (or `close_links` followed by `reap`) has returned,
    all processes have ended.
    """

    def __init__(self) -> None:
        self.workers: list[WorkerProcess] = []  # by rank, beginning with rank 1
        # Gets the first failure, which `watch` raises.
        self.failure: asyncio.Future[WorkerFailed] = asyncio.get_running_loop().create_future()
        self._folder: RendezvousFolder | None = None  # None if ranks connect without a file
        # One thread starts all workers, and must stay alive: the kernel kills a process when the thread that started it
        # ends (PR_SET_PDEATHSIG).
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="penstock-workers")

    async def start(self, parallel: ParallelPlan, facts: ModelFacts, environment: Mapping[str, str]) -> None:
        """Start this machine's ranks, and wait for the ranks of other machines.

        If the call is cancelled, the caller must close the group.
        """
        loop = asyncio.get_running_loop()
        for rank in parallel.ranks_here[1:]:
            ours, theirs = socket.socketpair()
            worker = WorkerProcess(rank, ours)
            self.workers.append(worker)
            mine = rank_environment(parallel.numa_nodes, rank - parallel.ranks_here.start, environment)
            await loop.run_in_executor(self._starter, worker.start, theirs, mine)
        if parallel.master_address is None:
            return
        listener = MasterListener(parallel.master_address, _cluster_token(parallel.master_address), fingerprint(facts))
        joined = await listener.accept(range(len(parallel.ranks_here), parallel.ranks))
        for rank, (end, host) in sorted(joined.items()):
            self.workers.append(WorkerProcess(rank, end, host))

    def open_rendezvous(self, parallel: ParallelPlan, timeout_s: float) -> tuple[Rendezvous, int]:
        """Return the rendezvous, and the file descriptor of rank 0's listening socket (-1 on a single machine)."""
        if parallel.master_address is None:
            self._folder = RendezvousFolder()
            return Rendezvous(host=LOOPBACK, timeout_s=timeout_s, path=self._folder.store), -1
        listening = listen(parallel.master_address[0], parallel.store_port or 0)
        host, port = listening.getsockname()[:2]
        key_prefix = secrets.token_hex(16)
        rendezvous = Rendezvous(host=host, timeout_s=timeout_s, port=port, key_prefix=key_prefix)
        return rendezvous, listening.detach()

    def send(self, body: Mapping[str, Any]) -> None:
        """Send a message to every worker, and return immediately."""
        self.send_frame(encode(body))

    def send_frame(self, frame: bytes) -> None:
        """Send an encoded frame to every worker."""
        for worker in self.workers:
            worker.send(frame)

    async def receive(self) -> list[dict[str, Any]]:
        """Return the next message of each worker, by rank. Raises `WorkerFailed`, which names the rank."""
        bodies: list[dict[str, Any]] = [{} for _ in self.workers]

        async def one(index: int) -> None:
            bodies[index] = (await self.workers[index].receive()).body

        try:
            async with anyio.create_task_group() as receiving:
                for index in range(len(self.workers)):
                    receiving.start_soon(one, index)
        except ExceptionGroup as group:
            error = first_error(group)
            raise error from error.__cause__
        return bodies

    async def watch(self, take: Callable[[int, Frame], None]) -> None:
        """Call `take` with each message and its rank, until a worker fails. Never returns.

        When a worker fails or ends, or `failure` is set, kills all workers and raises `WorkerFailed`.
        """
        try:
            async with anyio.create_task_group() as watching:
                watching.start_soon(self._raise_failure)
                for worker in self.workers:
                    watching.start_soon(worker.watch, take)
        except ExceptionGroup as group:
            self.kill()
            error = first_error(group)
            if isinstance(error, WorkerFailed) and not self.failure.done():
                self.failure.set_result(error)
            raise error from error.__cause__

    async def _raise_failure(self) -> None:
        raise await asyncio.shield(self.failure)

    def kill(self) -> None:
        """Kill the workers. May be called from any thread."""
        for worker in self.workers:
            worker.kill()

    def close_links(self) -> None:
        """Close the links, so that the workers end by themselves. Must be called on the event loop."""
        for worker in self.workers:
            worker.close_link()

    def reap(self) -> None:
        """Wait until all workers have ended. Kills those that take too long. Blocks. May be called from any thread."""
        self._starter.submit(lambda: None).result()  # waits until processes that are being started exist
        for worker in self.workers:
            worker.reap()
        self._starter.shutdown()
        if self._folder is not None:
            self._folder.remove()

    async def close(self) -> None:
        """Kill the workers and wait until they have ended."""
        self.close_links()
        self.kill()
        await anyio.to_thread.run_sync(self.reap)


class WorkerProcess:
    """The process of one rank, on this machine or another one, with the engine's end of its link.

    The process ends when its engine ends: it watches the link and, on this machine, also its parent process.
    """

    def __init__(self, rank: int, end: socket.socket, host: str | None = None) -> None:
        """Create the object. `end` is the engine's end of the link.

        `host` is the process's machine, or None for this one.
        """
        self.rank = rank
        self._host = host
        # None before the start, and always for a process on another machine.
        self._process: subprocess.Popen[bytes] | None = None
        self._socket = end
        self._link = Link(end)
        self._remote: RemoteError | None = None

    def start(self, end: socket.socket, environment: Mapping[str, str] | None = None) -> None:
        """Start the process on this machine. It inherits only `end`, which this method closes. Blocks."""
        with end:
            self._process = start_process(end, environment)

    @property
    def process_id(self) -> int | None:
        return None if self._process is None else self._process.pid

    def send(self, frame: bytes) -> None:
        """Send a frame and return immediately. Frames arrive in order."""
        self._link.send(frame)

    async def receive(self) -> Frame:
        """Return the worker's next message. Raises `WorkerFailed` if the worker has failed or ended."""
        try:
            frame = await self._link.receive()
        except LinkClosed as closed:
            raise await self._ended(closed.__cause__) from self._remote or closed.__cause__
        if "failed" in frame.body:
            self._remote = RemoteError(frame.body["failed"])
            raise await self._ended() from self._remote
        return frame

    async def watch(self, take: Callable[[int, Frame], None]) -> None:
        """Call `take` with each message until the worker fails or ends, then raise `WorkerFailed`. Never returns."""
        while True:
            take(self.rank, await self.receive())

    async def _ended(self, unreadable: BaseException | None = None) -> WorkerFailed:
        """Wait until the process has ended. Return an error that tells how it ended."""
        await anyio.to_thread.run_sync(self.reap, abandon_on_cancel=True)
        how = "sent an invalid message" if unreadable is not None and self._remote is None else self._how()
        who = f"process {self.process_id}" if self._host is None else f"on {self._host}"
        return WorkerFailed(f"Rank {self.rank} ({who}) {how}.")

    def _how(self) -> str:
        if self._remote is not None:
            return "failed"
        if self._process is None:
            return "has disconnected"
        status = self._process.returncode
        if status is not None and status < 0:
            names = {each.value: each.name for each in signal.Signals}
            return f"was killed by {names.get(-status, f'signal {-status}')}"
        return f"ended with status {status}"

    def close_link(self) -> None:
        """Close the link, so that the worker ends. Must run on the event loop."""
        self._link.close()

    def kill(self) -> None:
        """Kill the process, if it is running. May be called from any thread."""
        if self._process is not None:
            self._process.kill()
            return
        with suppress(OSError):  # raised if the link is closed already
            self._socket.shutdown(socket.SHUT_RDWR)

    def reap(self) -> None:
        """Wait until the process has ended. Kills it after a timeout. Blocks. May be called from any thread.

        Does nothing for a process on another machine, of which only the link is known.
        """
        if self._process is None:
            return
        try:
            self._process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def start_process(
    end: socket.socket, environment: Mapping[str, str] | None = None, *words: str
) -> subprocess.Popen[bytes]:
    """Start a worker process that inherits only this end of a link.

    The kernel kills the process when the thread that started it ends.
    """
    if not sys.executable:
        raise ConfigurationError("Workers cannot be started: sys.executable names no Python interpreter.")
    return subprocess.Popen(
        [sys.executable, "-P", "-m", MODULE, str(end.fileno()), str(os.getpid()), *words],
        stdin=subprocess.DEVNULL,
        pass_fds=(end.fileno(),),
        start_new_session=True,  # so that Ctrl-C reaches only the engine, which then ends the workers
        env=_environment(environment or {}),
    )


def thread_environment(plan: Plan) -> dict[str, str]:
    """Return the environment variable that limits each rank's threads; {} if a rank may use all cores of the CPU.

    With more threads than cores, a step would take many times longer. A value that the user has set is kept.
    """
    parallel = plan.parallel
    limited = plan.model.device == "cpu" and (parallel.ranks * parallel.copies > 1 or parallel.numa_nodes is not None)
    if not limited or "OMP_NUM_THREADS" in os.environ:
        return {}
    nodes = parallel.numa_nodes
    num_here = len(parallel.ranks_here) * parallel.copies if nodes is None else nodes.count(nodes[0])
    return {"OMP_NUM_THREADS": str(max(1, Machine.probe().num_cpus // num_here))}


def run_node(plan: Plan, facts: ModelFacts) -> int:
    """Run this machine's ranks for an engine on another machine. Return the worst exit status of its ranks.

    Blocks until the ranks end. Raises `ConfigurationError` if the first machine does not accept them.
    """
    parallel = plan.parallel
    if parallel.master_address is None:
        raise RuntimeError("A model on several machines needs a master address (--dist-init-addr).")
    token, model = os.environ.get(TOKEN_VARIABLE, ""), fingerprint(facts)
    environment = thread_environment(plan)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in parallel.ranks_here:
            with join_master(parallel.master_address, token, rank, model, parallel.join_timeout_s) as end:
                end.set_inheritable(True)
                mine = rank_environment(parallel.numa_nodes, rank - parallel.ranks_here.start, environment)
                processes.append(start_process(end, mine, facts.path))
        logger.info("Ranks %s run on this machine.", ", ".join(map(str, parallel.ranks_here)))
        while all(process.poll() is None for process in processes):
            time.sleep(POLL_S)
    finally:
        for process in processes:
            try:
                process.wait(1.0)
            except subprocess.TimeoutExpired:
                process.kill()
    return max((abs(process.wait()) for process in processes), default=0)


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with this process's import path, so that workers import the same modules."""
    root = str(Path(next(iter(runtime.__path__))).parent)
    path = dict.fromkeys([root, *(entry for entry in sys.path if entry)])
    return {**os.environ, **more, "PYTHONPATH": os.pathsep.join(path)}


def _cluster_token(address: tuple[str, int]) -> str:
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        logger.warning(
            "Every machine that reaches %s:%d can join as a rank and read prompts. Set the same %s everywhere.",
            *address,
            TOKEN_VARIABLE,
        )
    return token
