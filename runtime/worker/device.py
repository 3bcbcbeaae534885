"""What a step needs of the device that it runs on, beyond tensors: order, copies, events, graphs, a thread.

Everything that may run later than it is called goes through a `Device`, so that a test can let it run later in any
order that streams allow. `DeviceThread` is the one bridge between the device and asyncio.
"""

from __future__ import annotations

import asyncio
import gc
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from typing import NamedTuple, Protocol, TypeVar
from weakref import finalize

import torch
from torch import Tensor

from ops.machine import Machine
from runtime.errors import EngineClosed

Result = TypeVar("Result")

Read = Callable[[], Result]  # waits until the result is on the host, and reads it there
Enqueue = Callable[[], Read[Result]]  # enqueues work on the device


class Event(Protocol):
    """A point in the device's work."""

    def wait(self) -> None:
        """Block until the work before it is done."""
        ...

    def is_reached(self) -> bool:
        """Whether the work before it is done; returns at once."""
        ...


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Enqueue it again: the same operations on the same addresses, whatever is there by then."""
        ...


class MemoryUse(NamedTuple):
    """What some work took, in bytes."""

    peak_bytes: int  # at its height, beyond what was there before
    kept_bytes: int  # of it, what stays


class Device(Protocol):
    """One device and the two streams of it that a rank uses: one for copies, one for the forward."""

    torch_device: torch.device
    is_host: bool  # what is called is done at once, and the host can read the result

    def forward(self) -> AbstractContextManager[None]:
        """Enqueue what is called inside on the forward stream, in order."""
        ...

    def pinned(self, num_bytes: int) -> Tensor:
        """Host memory, uint8, that copies may read and write while the host goes on."""
        ...

    def upload(self, host: Tensor) -> tuple[Tensor, Event]:
        """A copy of pinned memory on the device, for what is enqueued on the forward stream from now on.

        `host` must not change before the event is reached. The copy overlaps with the forward of earlier steps.
        """
        ...

    def record(self) -> Event:
        """The end of what the forward stream has to do so far."""
        ...

    def download(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Event]:
        """Copies on the host, behind what the forward stream has to do; to be read after the event."""
        ...

    def capture(self, run: Callable[[], Result]) -> tuple[Graph, Result]:
        """Record what `run` enqueues without running it; its tensors hold what each replay returns.

        All graphs of a device share one memory pool: only the results of the last replay are to be read.
        Raises what `run` or the capture raised; the device goes on.
        """
        ...

    def measure(self, run: Callable[[], object]) -> MemoryUse:
        """Run it, wait for it and tell what it took. Nothing else may use the device meanwhile."""
        ...

    def free_bytes(self) -> tuple[int, int]:
        """(free, total) memory now, for all processes."""
        ...

    def release_unused(self) -> None:
        """Give back what the allocator holds and nobody uses."""
        ...


class _Reached:
    """The event of work that was done when it was called."""

    def wait(self) -> None:
        return

    def is_reached(self) -> bool:
        return True


class CpuDevice:
    """The host itself."""

    is_host = True

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    def forward(self) -> AbstractContextManager[None]:
        return nullcontext()

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def upload(self, host: Tensor) -> tuple[Tensor, Event]:
        return host.clone(), _Reached()

    def record(self) -> Event:
        return _Reached()

    def download(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Event]:
        return list(tensors), _Reached()

    def capture(self, run: Callable[[], Result]) -> tuple[Graph, Result]:
        raise RuntimeError("A CPU has no graphs.")

    def measure(self, run: Callable[[], object]) -> MemoryUse:
        raise RuntimeError("What a step takes on a CPU cannot be told from what else the process takes.")

    def free_bytes(self) -> tuple[int, int]:
        machine = Machine.probe()
        return machine.available_bytes, machine.total_bytes

    def release_unused(self) -> None:
        return


class CudaDevice:
    """An NVIDIA GPU. Belongs to the thread that enqueues; events may be waited for on any.

    No two that live at the same time have a stream in common.
    """

    is_host = False

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        idle = _idle_streams(device)
        streams = idle.pop() if idle else (torch.cuda.Stream(device), torch.cuda.Stream(device))
        self._forward, self._copies = streams
        finalize(self, idle.append, streams)
        self._graph_pool = None
        torch.cuda.synchronize(device)  # weights and pools were written on another stream

    def forward(self) -> AbstractContextManager[None]:
        return torch.cuda.stream(self._forward)

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def upload(self, host: Tensor) -> tuple[Tensor, Event]:
        # Memory of the copy stream's own: that of the forward stream may still be read by earlier steps.
        with torch.cuda.stream(self._copies):
            there = host.to(self.torch_device, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._copies)
        self._forward.wait_event(done)
        there.record_stream(self._forward)
        return there, _CudaEvent(done)

    def record(self) -> Event:
        done = torch.cuda.Event()
        done.record(self._forward)
        return _CudaEvent(done)

    def download(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Event]:
        with torch.cuda.stream(self._forward):
            host = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]
            for copy, tensor in zip(host, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
            done = torch.cuda.Event(blocking=True)  # whoever waits for it sleeps, and burns no processor
            done.record(self._forward)
        return host, _CudaEvent(done)

    def capture(self, run: Callable[[], Result]) -> tuple[Graph, Result]:
        if self._graph_pool is None:
            self._graph_pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._forward):
            self._forward.synchronize()
            # Other threads go on waiting for events and pinning memory, which does not concern this capture.
            graph.capture_begin(pool=self._graph_pool, capture_error_mode="thread_local")
            try:
                result = run()
            except BaseException:
                with suppress(RuntimeError):  # that the capture is incomplete is known
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph, result

    def measure(self, run: Callable[[], object]) -> MemoryUse:
        device = self.torch_device
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        with self.forward():
            run()
        torch.cuda.synchronize(device)
        peak, after = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        torch.cuda.empty_cache()
        return MemoryUse(peak - before, max(0, after - before))

    def free_bytes(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self.torch_device)

    def release_unused(self) -> None:
        torch.cuda.empty_cache()


@cache
def _idle_streams(device: torch.device) -> list[tuple[torch.cuda.Stream, torch.cuda.Stream]]:
    """Those that nothing uses any more, to be used again.

    For every stream that it ever computed on cuBLAS keeps a workspace (32 MiB on Hopper), which nobody frees.
    """
    return []


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()

    def is_reached(self) -> bool:
        return self._event.query()


def open_device(device: torch.device) -> Device:
    """The streams of this device, new ones."""
    return CudaDevice(device) if device.type == "cuda" else CpuDevice()


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep Python's garbage collector from running: what it frees may not be freed during a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class DeviceThread:
    """Enqueues work on a device and reads its results, off the event loop, in order.

    Work is enqueued by one thread: on a CPU the work is the forward itself, on CUDA it is the launching of kernels,
    which takes milliseconds where it is not a graph. Results are read by the same thread at once or, with
    `separate_reads` (CUDA), by a second one that waits for the work's event while the first enqueues what comes next.
    Either way the loop only ever waits for a future.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, separate_reads: bool) -> None:
        self._loop = loop
        self._work: queue.SimpleQueue[tuple[Enqueue, asyncio.Future] | None] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[tuple[Read, asyncio.Future] | None] = queue.SimpleQueue()
        self._separate = separate_reads
        self._closed = False
        self.around: Callable[[Enqueue], Enqueue] | None = None  # wraps all work, to time it
        targets = {"penstock-device": self._run_work}
        if separate_reads:
            targets["penstock-results"] = self._run_reads
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True) for name, target in targets.items()
        ]
        for thread in self._threads:
            thread.start()

    @property
    def closed(self) -> bool:
        """Whether nothing more is taken."""
        return self._closed

    def submit(
        self, enqueue: Enqueue[Result], future: asyncio.Future[Result] | None = None
    ) -> asyncio.Future[Result]:
        """Take work; returns at once. Raises `EngineClosed` after `close`.

        The future, a new one unless it is given, gets the result, or what was raised. Whoever waits shields it:
        a cancelled future does not cancel the work.
        """
        if self._closed:
            raise EngineClosed("The engine is closed.")
        if future is None:
            future = self.new_future()
        self._work.put((enqueue, future))
        return future

    def new_future(self) -> asyncio.Future:
        """A future of the loop. An exception that nobody retrieves is not logged: whoever waited may be gone."""
        future = self._loop.create_future()
        future.add_done_callback(_retrieve)
        return future

    def close(self) -> None:
        """Finish what was taken, then end the threads. Blocks; call it off the loop."""
        if not self._closed:
            self._closed = True
            self._work.put(None)
        for thread in self._threads:
            thread.join()

    def _run_work(self) -> None:
        while (item := self._work.get()) is not None:
            enqueue, future = item
            try:
                read = enqueue() if self.around is None else self.around(enqueue)()
            except BaseException as error:
                # It crosses the thread border as it is, and is raised where it is awaited.
                self._post(future, None, error)
            else:
                if self._separate:
                    self._reads.put((read, future))
                else:
                    self._read(read, future)
                del read
            del item, enqueue, future  # an idle thread keeps nothing alive
        self._reads.put(None)

    def _run_reads(self) -> None:
        while (item := self._reads.get()) is not None:
            self._read(*item)
            del item

    def _read(self, read: Read[Result], future: asyncio.Future[Result]) -> None:
        try:
            result = read()
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
    if not future.cancelled():
        future.exception()
