"""The one bridge between the device and asyncio.

Work is enqueued by a device thread, never by the loop: on CPU the work is the forward itself, on CUDA it is
the launching of kernels, which takes milliseconds when it is not a graph. Results are collected in order: on
CPU at once by the same thread, on CUDA by a second thread that waits for the step's event, so that the device
thread can already enqueue the next step. Either way the loop only ever awaits a future.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from runtime.errors import EngineClosed

Result = TypeVar("Result")

Collect = Callable[[], Result]  # blocks until the result is on the host
Launch = Callable[[], Collect[Result]]  # enqueues the work


class Ticket(Generic[Result]):
    """A piece of launched work."""

    __slots__ = ("_future",)

    def __init__(self, future: asyncio.Future[Result]) -> None:
        self._future = future

    async def result(self) -> Result:
        """What the work returned, or raised. Always gives the loop a turn; cancelled, the work goes on."""
        if self._future.done():
            await asyncio.sleep(0)
            return self._future.result()
        return await asyncio.shield(self._future)

    def when_done(self, call: Callable[[BaseException | None], None]) -> None:
        """Have the loop call this once the work is over, with what it raised. It is never cancelled."""
        self._future.add_done_callback(lambda future: call(future.exception()))


class DeviceStream:
    """Runs launches one after the other; `close` joins its threads.

    `separate_collect` gives the collecting its own thread (CUDA).
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, separate_collect: bool) -> None:
        self._loop = loop
        self._launches: queue.SimpleQueue[tuple[Launch, asyncio.Future] | None] = queue.SimpleQueue()
        self._collects: queue.SimpleQueue[tuple[Collect, asyncio.Future] | None] = queue.SimpleQueue()
        self._separate = separate_collect
        self._closed = False
        self.around: Callable[[Launch], Launch] | None = None  # wraps every launch, to time it
        names = {"penstock-device": self._run_launches}
        if separate_collect:
            names["penstock-collect"] = self._run_collects
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True) for name, target in names.items()
        ]
        for thread in self._threads:
            thread.start()

    @property
    def closed(self) -> bool:
        """Whether nothing more is taken."""
        return self._closed

    def submit(self, launch: Launch[Result]) -> Ticket[Result]:
        """Enqueue; returns at once. Raises `EngineClosed` after `close`."""
        if self._closed:
            raise EngineClosed("The engine is closed.")
        future: asyncio.Future[Result] = self._loop.create_future()
        future.add_done_callback(_retrieve)
        self._launches.put((launch, future))
        return Ticket(future)

    def close(self) -> None:
        """Finish what was launched, then end the threads. Blocks; call it off the loop."""
        if not self._closed:
            self._closed = True
            self._launches.put(None)
        for thread in self._threads:
            thread.join()

    def _run_launches(self) -> None:
        while (item := self._launches.get()) is not None:
            launch, future = item
            try:
                collect = launch() if self.around is None else self.around(launch)()
            except BaseException as error:  # crosses the thread border as it is, and is raised where awaited
                self._post(future, None, error)
            else:
                if self._separate:
                    self._collects.put((collect, future))
                else:
                    self._collect(collect, future)
                del collect
            del item, launch, future  # an idle thread keeps nothing alive
        self._collects.put(None)

    def _run_collects(self) -> None:
        while (item := self._collects.get()) is not None:
            self._collect(*item)
            del item

    def _collect(self, collect: Collect[Result], future: asyncio.Future[Result]) -> None:
        try:
            result = collect()
        except BaseException as error:  # as above
            self._post(future, None, error)
        else:
            self._post(future, result, None)

    def _post(self, future: asyncio.Future, result: object, error: BaseException | None) -> None:
        try:
            self._loop.call_soon_threadsafe(_settle, future, result, error)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return


def _settle(future: asyncio.Future, result: object, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def _retrieve(future: asyncio.Future) -> None:
    """Mark an exception as seen: whoever waited may be gone, and the log must not be littered."""
    if not future.cancelled():
        future.exception()
