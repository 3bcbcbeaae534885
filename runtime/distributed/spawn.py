"""Worker processes: started from a clean module, watched, reaped. Torch-free."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import anyio
import anyio.to_thread

import runtime
from runtime.distributed.link import Link, LinkClosed
from runtime.distributed.message import Frame, encode
from runtime.errors import ConfigurationError, WorkerFailed

EXIT_TIMEOUT_S = 5.0
MODULE = "runtime.distributed.worker_process"


class RemoteError(Exception):
    """What a worker raised, with its traceback as text."""


class Worker:
    """One rank's process, here or on another machine, at the other end of a link.

    Belongs to the loop that it was made on. It ends with its owner, in any case: it watches the link, and a
    process of this machine its parent.
    """

    def __init__(
        self, rank: int, end: socket.socket, process: subprocess.Popen[bytes] | None, who: str
    ) -> None:
        self.rank = rank
        self._who = who
        self._process = process  # None: on another machine
        self._socket = end
        self._link = Link(end)
        self._failure: asyncio.Future[WorkerFailed] = asyncio.get_running_loop().create_future()
        self._remote: RemoteError | None = None

    @classmethod
    def start(cls, rank: int, environment: Mapping[str, str] | None = None) -> Self:
        """A new process on this machine, which inherits nothing but its end of the link."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = start_process(theirs, environment)
            except BaseException:
                ours.close()
                raise
        return cls(rank, ours, process, f"process {process.pid}")

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
        except LinkClosed:
            raise await self._ended() from self._remote
        if "failed" in frame.body:
            self._remote = RemoteError(frame.body["failed"])
            raise await self._ended() from self._remote
        return frame

    async def watch(self) -> None:
        """Never returns; raises `WorkerFailed` as soon as the worker failed or is gone."""
        while True:
            await self.receive()

    async def failure(self, timeout_s: float) -> WorkerFailed | None:
        """How the worker ended, if it does within this time. Somebody else must be in `watch`."""
        done, _ = await asyncio.wait([self._failure], timeout=timeout_s)
        return self._failure.result() if done else None

    async def _ended(self) -> WorkerFailed:
        """Wait for the process's end, which is near, and say how it ended."""
        await anyio.to_thread.run_sync(self.reap, abandon_on_cancel=True)
        error = WorkerFailed(f"Rank {self.rank} ({self._who}) {self._how()}.")
        error.__cause__ = self._remote
        if not self._failure.done():
            self._failure.set_result(error)
        return error

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

    def detach(self) -> None:
        """Close the link, upon which the worker ends. On the loop."""
        self._link.close()

    def kill(self) -> None:
        """End the process now. From any thread; does nothing when it is gone."""
        if self._process is not None:
            self._process.kill()
            return
        with suppress(OSError):  # closed already
            self._socket.shutdown(socket.SHUT_RDWR)

    def reap(self, timeout_s: float = EXIT_TIMEOUT_S) -> None:
        """Wait until the process is gone; kill it when that takes too long. Blocks, from any thread.

        Of a process on another machine nothing more is known than that its link closed.
        """
        if self._process is None:
            return
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def start_process(
    end: socket.socket, environment: Mapping[str, str] | None = None, *words: str
) -> subprocess.Popen[bytes]:
    """A worker process that reads its work from this end of a link and inherits nothing else."""
    if not sys.executable:
        raise ConfigurationError("There is no Python interpreter to start workers with (sys.executable).")
    return subprocess.Popen(
        [sys.executable, "-P", "-m", MODULE, str(end.fileno()), str(os.getpid()), *words],
        stdin=subprocess.DEVNULL,
        pass_fds=(end.fileno(),),
        start_new_session=True,  # Ctrl-C is for the engine, which then ends us
        env=_environment(environment or {}),
    )


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    """Ours, with our import path: what we can import, the worker can, wherever it was started."""
    root = str(Path(next(iter(runtime.__path__))).parent)
    path = dict.fromkeys([root, *(entry for entry in sys.path if entry)])
    return {**os.environ, **more, "PYTHONPATH": os.pathsep.join(path)}


async def gather_all(workers: list[Worker]) -> list[dict[str, Any]]:
    """The next message of each worker, in their order."""
    bodies: list[dict[str, Any]] = [{} for _ in workers]

    async def one(place: int) -> None:
        bodies[place] = (await workers[place].receive()).body

    async with anyio.create_task_group() as receiving:
        for place in range(len(workers)):
            receiving.start_soon(one, place)
    return bodies


def tell_all(workers: list[Worker], body: Mapping[str, Any]) -> None:
    """The same message to each of them."""
    frame = encode(body)
    for worker in workers:
        worker.send(frame)
