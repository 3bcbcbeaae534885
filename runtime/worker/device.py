"""The device of a rank: its streams, copies, events, graphs and thread. (Tensors are torch's own.)

All asynchronous work goes through a `Device`, so that tests can delay the work in every order that streams allow. Only
`DeviceThread` connects the device with asyncio.
"""

from __future__ import annotations

import asyncio
import gc
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, NamedTuple, Protocol, TypeVar
from weakref import finalize

import torch
from torch import Tensor

from ops.machine import Machine
from runtime.errors import EngineClosed

Result = TypeVar("Result")

Read = Callable[[], Result]  # waits until the result is on the host, and returns it
Enqueue = Callable[[], Read[Result]]  # enqueues work on the device
Divide = Callable[[], None]  # ends the graph that is being captured, and begins the next one
Stream = Literal["forward", "copy"]

# GPU buffers for uploads, used in turn. A step has up to two uploads, so a buffer is used again after three steps, when
# nothing reads it any more. Uploads larger than `STAGED_BYTES` (many media embeddings) are copied on the forward
# stream, without a buffer.
NUM_STAGED = 6
STAGED_BYTES = 4 << 20


class Event(Protocol):
    """A point in the device's work."""

    def wait(self) -> None:
        """Block until all work before the event is done."""
        ...

    def is_reached(self) -> bool:
        """Return whether all work before the event is done, without blocking."""
        ...


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Enqueue the captured operations. They use the same addresses with their current contents."""
        ...


class Mark(Protocol):
    """A point in the work of one stream, for which another stream can wait (see `Device.wait_for`)."""


class MemoryUse(NamedTuple):
    """The device memory that some work needed, in bytes."""

    peak_bytes: int  # peak memory during the work, minus the memory before it
    kept_bytes: int  # memory that remains allocated after the work


class Device(Protocol):
    """A device with two streams of a rank: one for copies, and one for forward passes."""

    torch_device: torch.device
    is_host: bool  # whether the device is the host, so that calls are synchronous and results need no copy

    def forward(self) -> AbstractContextManager[None]:
        """Return a context whose calls are enqueued on the forward stream, in order."""
        ...

    def copies(self) -> AbstractContextManager[None]:
        """Return a context whose calls are enqueued on the copy stream, in order. May be nested in `forward`."""
        ...

    def order(self, first: Stream, then: Stream) -> None:
        """Make later work on stream `then` wait for all earlier work on stream `first`."""
        ...

    def mark(self, stream: Stream) -> Mark:
        """Return a mark at the end of the work enqueued on the stream so far."""
        ...

    def wait_for(self, mark: Mark, then: Stream) -> None:
        """Make later work on stream `then` wait for the work before the mark.

        A capture must contain either both `mark` and `wait_for`, or neither.
        """
        ...

    def pinned(self, num_bytes: int) -> Tensor:
        """Return host memory, uint8, for asynchronous copies."""
        ...

    def upload(self, host: Tensor) -> tuple[Tensor, Event]:
        """Copy pinned memory to the device. Return the copy for later work on the forward stream, and an event.

        `host` is uint8 [n]. It must not change before the event is reached. The copy overlaps with the forward passes
        of earlier steps, unless it is large.
        """
        ...

    def record(self) -> Event:
        """Return an event at the end of the work enqueued on the forward stream so far."""
        ...

    def download(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Event]:
        """Copy to the host, after all earlier work on the forward stream.

        The copies are complete when the event is reached.
        """
        ...

    def capture(self, run: Callable[[], Result]) -> tuple[Graph, Result]:
        """Capture the work that `run` enqueues, without running it. Return the graph and the result of `run`.

        Replays write to the tensors in the result. All graphs of a device share one memory pool, so only the results of
        the last replay are valid. Raises the exception of `run` or of the capture; the device then stays usable.
        """
        ...

    def capture_parts(self, run: Callable[[Divide], Result]) -> tuple[Sequence[Graph], Result]:
        """Capture the work as several graphs. `run` gets a function that ends a graph and begins the next one.

        All graphs must be replayed in order, without replays of other graphs between them.
        """
        ...

    def measure(self, run: Callable[[], object]) -> MemoryUse:
        """Run a function, wait for its work and return its memory use. Meanwhile no other work may run."""
        ...

    def free_bytes(self) -> tuple[int, int]:
        """Return the device's free and total memory in bytes."""
        ...

    def release_unused(self) -> None:
        """Release the allocator's unused memory."""
        ...


class _Reached:
    """The event of work that is already done, because it was synchronous."""

    def wait(self) -> None:
        return

    def is_reached(self) -> bool:
        return True


class CpuDevice:
    """The host as a device: all calls are synchronous."""

    is_host = True

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    def forward(self) -> AbstractContextManager[None]:
        return nullcontext()

    def copies(self) -> AbstractContextManager[None]:
        return nullcontext()

    def order(self, first: Stream, then: Stream) -> None:
        return

    def mark(self, stream: Stream) -> Mark:
        return _Reached()

    def wait_for(self, mark: Mark, then: Stream) -> None:
        return

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

    def capture_parts(self, run: Callable[[Divide], Result]) -> tuple[Sequence[Graph], Result]:
        raise RuntimeError("A CPU has no graphs.")

    def measure(self, run: Callable[[], object]) -> MemoryUse:
        raise RuntimeError("The memory of a step cannot be measured on a CPU.")

    def free_bytes(self) -> tuple[int, int]:
        machine = Machine.probe()
        return machine.available_bytes, machine.total_bytes

    def release_unused(self) -> None:
        return


class CudaDevice:
    """An NVIDIA GPU. All methods must be called on the thread that enqueues, but any thread may wait for events.

    Each object that exists has its own two streams.
    """

    is_host = False

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        idle = _idle_streams(device)
        streams = idle.pop() if idle else _Streams(torch.cuda.Stream(device), torch.cuda.Stream(device))
        self._forward, self._copies, self._staged = streams.forward, streams.copies, streams.staged
        finalize(self, idle.append, streams)
        self._graph_pool = None
        torch.cuda.synchronize(device)  # weights and pools were written on another stream

    def forward(self) -> AbstractContextManager[None]:
        return torch.cuda.stream(self._forward)

    def copies(self) -> AbstractContextManager[None]:
        return torch.cuda.stream(self._copies)

    def order(self, first: Stream, then: Stream) -> None:
        self._stream(then).wait_stream(self._stream(first))

    def mark(self, stream: Stream) -> Mark:
        return self._stream(stream).record_event()

    def wait_for(self, mark: Mark, then: Stream) -> None:
        self._stream(then).wait_event(mark)  # type: ignore[arg-type]

    def _stream(self, name: Stream) -> torch.cuda.Stream:
        return self._forward if name == "forward" else self._copies

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def upload(self, host: Tensor) -> tuple[Tensor, Event]:
        # Allocated on the forward stream, the tensor can be freed without events (`record_stream`). After a failed
        # capture, the allocator might wait for such events forever and never use the memory again.
        if len(host) > STAGED_BYTES:
            with torch.cuda.stream(self._forward):
                return host.to(self.torch_device, non_blocking=True), self.record()
        if not self._staged:
            # Tensors made in inference mode could not be written outside it.
            with torch.inference_mode(False), torch.cuda.stream(self._forward):
                self._staged += [
                    (torch.empty(STAGED_BYTES, dtype=torch.uint8, device=self.torch_device), torch.cuda.Event())
                    for _ in range(NUM_STAGED)
                ]
            self._copies.wait_stream(self._forward)  # earlier work may still use tensors at these addresses
        buffer, is_read = self._staged[0]
        self._staged.append(self._staged.pop(0))
        staged = buffer[: len(host)]
        self._copies.wait_event(is_read)
        with torch.cuda.stream(self._copies):
            staged.copy_(host, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._copies)
        self._forward.wait_event(done)
        with torch.cuda.stream(self._forward):
            on_device = staged.clone()
            is_read.record(self._forward)
        return on_device, _CudaEvent(done)

    def record(self) -> Event:
        done = torch.cuda.Event()
        done.record(self._forward)
        return _CudaEvent(done)

    def download(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Event]:
        with torch.cuda.stream(self._forward):
            host = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]
            for copy, tensor in zip(host, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
            done = torch.cuda.Event(blocking=True)  # a waiting thread then sleeps instead of spinning
            done.record(self._forward)
        return host, _CudaEvent(done)

    def capture(self, run: Callable[[], Result]) -> tuple[Graph, Result]:
        [graph], result = self.capture_parts(lambda divide: run())
        return graph, result

    def capture_parts(self, run: Callable[[Divide], Result]) -> tuple[Sequence[Graph], Result]:
        if self._graph_pool is None:
            self._graph_pool = torch.cuda.graph_pool_handle()
        graphs: list[torch.cuda.CUDAGraph] = []

        def begin() -> None:
            graph = torch.cuda.CUDAGraph()
            # During the capture, other threads may wait for events and pin memory. In this mode their calls do not
            # break it.
            graph.capture_begin(pool=self._graph_pool, capture_error_mode="thread_local")
            graphs.append(graph)

        def divide() -> None:
            graphs[-1].capture_end()
            begin()

        with torch.cuda.stream(self._forward):
            self._forward.synchronize()
            begin()
            try:
                result = run(divide)
                graphs[-1].capture_end()
            except BaseException:
                abandon_capture(graphs[-1], self.torch_device, self._graph_pool)
                raise
        return graphs, result

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


def abandon_capture(graph: torch.cuda.CUDAGraph, device: torch.device, pool: tuple[int, int]) -> None:
    """End a failed capture, so that the allocator stops using the graphs' memory pool.

    For a broken capture, torch's `capture_end` raises an error before it tells the allocator that the capture has
    ended. The allocator would then allocate the tensors of later steps in the graphs' pool.
    """
    with suppress(RuntimeError):
        graph.capture_end()
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    with suppress(RuntimeError):  # raised if the allocator has already left this pool
        torch._C._cuda_endAllocateToPool(index, pool)


@dataclass(frozen=True, slots=True, eq=False)
class _Streams:
    """The streams of a `CudaDevice`, and its upload buffers with the events after their last reads."""

    forward: torch.cuda.Stream
    copies: torch.cuda.Stream
    staged: list[tuple[Tensor, torch.cuda.Event]] = field(default_factory=list)  # empty before the first upload


@cache
def _idle_streams(device: torch.device) -> list[_Streams]:
    """Return the list of stream pairs that no device uses, for reuse.

    cuBLAS keeps a workspace (32 MiB on Hopper) for every stream that it has used, and never frees it.
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
    """Return a `Device` with its own streams for the torch device."""
    return CudaDevice(device) if device.type == "cuda" else CpuDevice()


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector, because it could free device memory, which breaks a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class DeviceThread:
    """Enqueues work on a device and reads its results, in order, outside the event loop.

    One thread enqueues. On a CPU, enqueuing computes the forward pass itself. With CUDA it launches kernels, which
    takes milliseconds without a graph. The same thread then waits for the results. With `separate_reads` (CUDA), a
    second thread waits for them, while the first one enqueues further work. The event loop waits only for futures.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, *, separate_reads: bool, device: torch.device | None = None
    ) -> None:
        self._loop = loop
        self._device = device  # device that the threads make current; None: torch's default
        self._work: queue.SimpleQueue[tuple[Enqueue, asyncio.Future] | None] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[tuple[Read, asyncio.Future] | None] = queue.SimpleQueue()
        self._separate = separate_reads
        self._closed = False
        # If not None, wraps all submitted work, for example to measure its time.
        self.around: Callable[[Enqueue], Enqueue] | None = None
        targets = {"penstock-device": self._run_work}
        if separate_reads:
            targets["penstock-results"] = self._run_reads
        self._threads = [threading.Thread(target=target, name=name, daemon=True) for name, target in targets.items()]
        for thread in self._threads:
            thread.start()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def submit(self, enqueue: Enqueue[Result], future: asyncio.Future[Result] | None = None) -> asyncio.Future[Result]:
        """Queue work and return a future immediately. Raises `EngineClosed` after `close`.

        `future` (by default, a new one) gets the result or the exception. Callers must shield it: if the future is
        cancelled, the work still runs.
        """
        if self._closed:
            raise EngineClosed("The engine is closed.")
        if future is None:
            future = self.new_future()
        self._work.put((enqueue, future))
        return future

    def new_future(self) -> asyncio.Future:
        """Return a new future of the event loop. Asyncio does not log an exception that is never retrieved."""
        future = self._loop.create_future()
        future.add_done_callback(retrieve)
        return future

    def close(self) -> None:
        """Finish the queued work and end the threads. Blocks, so it must not be called on the event loop."""
        if not self._closed:
            self._closed = True
            self._work.put(None)
        for thread in self._threads:
            thread.join()

    def _enter_device(self) -> None:
        # In a new thread, device 0 is current, and calls would create a CUDA context on device 0.
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def _run_work(self) -> None:
        self._enter_device()
        while (item := self._work.get()) is not None:
            enqueue, future = item
            try:
                read = enqueue() if self.around is None else self.around(enqueue)()
            except BaseException as error:
                # The future gets the error.
                self._post(future, None, error)
            else:
                if self._separate:
                    self._reads.put((read, future))
                else:
                    self._read(read, future)
                del read
            del item, enqueue, future  # an idle thread must not keep tensors alive
        self._reads.put(None)

    def _run_reads(self) -> None:
        self._enter_device()
        while (item := self._reads.get()) is not None:
            self._read(*item)
            del item

    def _read(self, read: Read[Result], future: asyncio.Future[Result]) -> None:
        try:
            result = read()
        except BaseException as error:  # the future gets the error
            self._post(future, None, error)
        else:
            self._post(future, result, None)

    def _post(self, future: asyncio.Future, result: object, error: BaseException | None) -> None:
        try:
            self._loop.call_soon_threadsafe(_settle, future, result, error)
        except RuntimeError:  # raised if the loop is closed
            return


def _settle(future: asyncio.Future, result: object, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def retrieve(future: asyncio.Future) -> None:
    """Mark a future's exception as retrieved, so that asyncio does not log it if no caller waits for the future."""
    if not future.cancelled():
        future.exception()
