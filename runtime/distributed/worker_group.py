"""Worker processes: started from a clean module, sent to, watched, killed, reaped. Torch-free.

What they compute is no matter here: their owner says what is sent, and what an answer means.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
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
from runtime.distributed.rendezvous import (
    TOKEN_VARIABLE,
    MasterListener,
    Rendezvous,
    fingerprint,
    join_master,
    listen,
)
from runtime.errors import ConfigurationError, WorkerFailed, first_error

logger = logging.getLogger("penstock.core")

LOOPBACK = "127.0.0.1"
EXIT_TIMEOUT_S = 5.0
POLL_S = 0.1
MODULE = "runtime.distributed.worker_process"


class RemoteError(Exception):
    """What a worker raised, with its traceback as text."""


class WorkerGroup:
    """The processes that compute one copy of the model together with this one, which is rank 0.

    Belongs to the loop it was made on. After `close`, or `close_links` and `reap`, no process is left.
    """

    def __init__(self) -> None:
        self.workers: list[WorkerProcess] = []  # by rank, from 1 on
        # The first failure that `watch` learns of.
        self.failure: asyncio.Future[WorkerFailed] = asyncio.get_running_loop().create_future()
        self._directory: Path | None = None  # where the ranks find each other
        # A thread of its own: when the thread that started a process ends, the kernel takes it for a dead parent.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="penstock-workers")

    async def start(self, parallel: ParallelPlan, facts: ModelFacts, environment: Mapping[str, str]) -> None:
        """Start the ranks of this machine and wait for those of others to join. Cancelled, close the group."""
        loop = asyncio.get_running_loop()
        for rank in parallel.ranks_here[1:]:
            ours, theirs = socket.socketpair()
            worker = WorkerProcess(rank, ours)
            self.workers.append(worker)
            await loop.run_in_executor(self._starter, worker.start, theirs, environment)
        if parallel.master_address is None:
            return
        listener = MasterListener(
            parallel.master_address, _cluster_token(parallel.master_address), fingerprint(facts)
        )
        joined = await listener.accept(range(len(parallel.ranks_here), parallel.ranks))
        for rank, (end, host) in sorted(joined.items()):
            self.workers.append(WorkerProcess(rank, end, host))

    def open_rendezvous(self, parallel: ParallelPlan, timeout_s: float) -> tuple[Rendezvous, int]:
        """Where all ranks are to meet; and over the network a socket that listens there, for rank 0, else -1."""
        if parallel.master_address is None:
            self._directory = Path(tempfile.mkdtemp(prefix="penstock-"))  # for our eyes only (0700)
            path = str(self._directory / "store")
            return Rendezvous(host=LOOPBACK, timeout_s=timeout_s, path=path), -1
        listening = listen(parallel.master_address[0], parallel.store_port or 0)
        host, port = listening.getsockname()[:2]
        key_prefix = secrets.token_hex(16)
        rendezvous = Rendezvous(host=host, timeout_s=timeout_s, port=port, key_prefix=key_prefix)
        return rendezvous, listening.detach()

    def send(self, body: Mapping[str, Any]) -> None:
        """The same message to every worker; returns at once."""
        self.send_frame(encode(body))

    def send_frame(self, frame: bytes) -> None:
        """As `send`, of what is encoded already."""
        for worker in self.workers:
            worker.send(frame)

    async def receive(self) -> list[dict[str, Any]]:
        """The next message of each worker, in their order. Raises `WorkerFailed` naming the rank."""
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

    async def watch(self) -> None:
        """Never returns; raises `WorkerFailed` when a worker failed or is gone, and kills the others."""
        try:
            async with anyio.create_task_group() as watching:
                for worker in self.workers:
                    watching.start_soon(worker.watch)
        except ExceptionGroup as group:
            self.kill()
            error = first_error(group)
            if isinstance(error, WorkerFailed) and not self.failure.done():
                self.failure.set_result(error)
            raise error from error.__cause__

    def kill(self) -> None:
        """End the workers now. From any thread."""
        for worker in self.workers:
            worker.kill()

    def close_links(self) -> None:
        """Close the links, upon which the workers end in order. On the loop."""
        for worker in self.workers:
            worker.close_link()

    def reap(self) -> None:
        """Wait until no worker is left, and kill those that take too long. Blocks, from any thread."""
        self._starter.submit(lambda: None).result()  # what was about to start has started
        for worker in self.workers:
            worker.reap()
        self._starter.shutdown()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    async def close(self) -> None:
        """End the workers now and wait for that."""
        self.close_links()
        self.kill()
        await anyio.to_thread.run_sync(self.reap)


class WorkerProcess:
    """One rank's process, here or on another machine, at the other end of a link.

    It ends with its owner in any case: it watches the link, and a process of this machine its parent.
    """

    def __init__(self, rank: int, end: socket.socket, host: str | None = None) -> None:
        """`end` is our end of the link; `host` the other machine that the process runs on, if it does."""
        self.rank = rank
        self._host = host
        self._process: subprocess.Popen[bytes] | None = None  # on this machine, once it is started
        self._socket = end
        self._link = Link(end)
        self._remote: RemoteError | None = None

    def start(self, end: socket.socket, environment: Mapping[str, str] | None = None) -> None:
        """Start the process on this machine; it inherits nothing but `end`, which this closes. Blocks."""
        with end:
            self._process = start_process(end, environment)

    @property
    def process_id(self) -> int | None:
        return None if self._process is None else self._process.pid

    def send(self, frame: bytes) -> None:
        """Returns at once. Frames arrive in order."""
        self._link.send(frame)

    async def receive(self) -> Frame:
        """The worker's next message. Raises `WorkerFailed` when it failed or ended instead."""
        try:
            frame = await self._link.receive()
        except LinkClosed as closed:
            raise await self._ended(closed.__cause__) from self._remote or closed.__cause__
        if "failed" in frame.body:
            self._remote = RemoteError(frame.body["failed"])
            raise await self._ended() from self._remote
        return frame

    async def watch(self) -> None:
        """Never returns; raises `WorkerFailed` as soon as the worker failed or is gone."""
        while True:
            await self.receive()

    async def _ended(self, unreadable: BaseException | None = None) -> WorkerFailed:
        """Wait for the process's end, which is near, and say how it ended."""
        await anyio.to_thread.run_sync(self.reap, abandon_on_cancel=True)
        how = "sent what is no message" if unreadable is not None and self._remote is None else self._how()
        who = f"process {self.process_id}" if self._host is None else f"on {self._host}"
        return WorkerFailed(f"Rank {self.rank} ({who}) {how}.")

    def _how(self) -> str:
        if self._remote is not None:
            return "failed"
        if self._process is None:
            return "is gone"
        status = self._process.returncode
        if status is not None and status < 0:
            known = {each.value: each.name for each in signal.Signals}
            return f"was killed by {known.get(-status, f'signal {-status}')}"
        return f"ended with status {status}"

    def close_link(self) -> None:
        """Close the link, upon which the worker ends. On the loop."""
        self._link.close()

    def kill(self) -> None:
        """End the process now. From any thread; does nothing when it is gone."""
        if self._process is not None:
            self._process.kill()
            return
        with suppress(OSError):  # closed already
            self._socket.shutdown(socket.SHUT_RDWR)

    def reap(self) -> None:
        """Wait until the process is gone; kill it when that takes too long. Blocks, from any thread.

        Of a process on another machine nothing more is known than that its link closed.
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
    """A worker process that reads its work from this end of a link and inherits nothing else.

    It dies with the thread that starts it.
    """
    if not sys.executable:
        raise ConfigurationError("There is no Python interpreter to start workers with (sys.executable).")
    return subprocess.Popen(
        [sys.executable, "-P", "-m", MODULE, str(end.fileno()), str(os.getpid()), *words],
        stdin=subprocess.DEVNULL,
        pass_fds=(end.fileno(),),
        start_new_session=True,  # Ctrl-C is for the engine, which then ends us
        env=_environment(environment or {}),
    )


def thread_environment(plan: Plan) -> dict[str, str]:
    """The number of threads of each rank where several share a processor, unless the user chose one.

    With more threads than processors, a step takes many times longer.
    """
    parallel = plan.parallel
    several = plan.model.device == "cpu" and parallel.ranks * parallel.dp_size > 1
    if not several or "OMP_NUM_THREADS" in os.environ:
        return {}
    num_here = len(parallel.ranks_here) * parallel.dp_size
    return {"OMP_NUM_THREADS": str(max(1, Machine.probe().num_cpus // num_here))}


def run_node(plan: Plan, facts: ModelFacts) -> int:
    """Run this machine's ranks for an engine on another machine; returns the worst exit status.

    Blocks until they end. Raises `ConfigurationError` when the master address does not take them.
    """
    parallel = plan.parallel
    if parallel.master_address is None:
        raise RuntimeError("Several machines need a master address.")
    token, model = os.environ.get(TOKEN_VARIABLE, ""), fingerprint(facts)
    environment = thread_environment(plan)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in parallel.ranks_here:
            with join_master(parallel.master_address, token, rank, model, parallel.join_timeout_s) as end:
                end.set_inheritable(True)
                processes.append(start_process(end, environment, facts.path))
        logger.info("Ranks %s run here.", ", ".join(map(str, parallel.ranks_here)))
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
    """Ours, with our import path: what we can import, the worker can, wherever it was started."""
    root = str(Path(next(iter(runtime.__path__))).parent)
    path = dict.fromkeys([root, *(entry for entry in sys.path if entry)])
    return {**os.environ, **more, "PYTHONPATH": os.pathsep.join(path)}


def _cluster_token(address: tuple[str, int]) -> str:
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        logger.warning(
            "Anybody who reaches %s:%d can join as a rank and read prompts: set %s, everywhere the same.",
            *address,
            TOKEN_VARIABLE,
        )
    return token
