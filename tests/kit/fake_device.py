"""A device that executes operations late, in any order that its two streams allow.

Its tensors are ordinary tensors. Inside `forward()` every operation on them is recorded, and returns memory that is
zero until a test lets the device proceed. So code that reads too early reads zeros, and code that waits for the device
without declaring it is detected. When a copy from host memory runs, the memory is compared with its content at the time
of the call. A captured graph is a list of operations on fixed tensors, which every replay executes again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runtime.worker.device import CpuDevice, Divide, Graph, Mark, MemoryUse, Result, Stream

POISON = 0x5A  # byte that fills memory that is read before its content has arrived
# operations that make the host wait for a GPU
WAITING_OPERATIONS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select"}
WAITING_METHODS = {Tensor.tolist, Tensor.numpy, Tensor.item, Tensor.cpu}

Work = Callable[[], None]


class Overwritten(AssertionError):
    """Raised if host memory changed before the copy that reads it was complete."""


class Waited(AssertionError):
    """Raised if the host waited for the device at a place where it must not wait."""


class LateEvent:
    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self.reached = False

    def is_reached(self) -> bool:
        """Whether the event has been reached. Each call lets some time pass."""
        self._device.move()
        return self.reached

    def wait(self) -> None:
        """Let the device proceed until this event is reached."""
        while not self.reached:
            self._device.move()


class Reach:
    """The work that reaches an event."""

    def __init__(self, event: LateEvent) -> None:
        self.event = event

    def __call__(self) -> None:
        self.event.reached = True


Captured = tuple[str, Work | LateEvent]  # stream, work


class LateGraph:
    """Captured work of both streams. Raises `AssertionError` if its copies would break a capture on a GPU."""

    def __init__(self, device: LateDevice, works: Sequence[Captured]) -> None:
        self._device = device
        self._works = works
        reached = {work.event: place for place, (_, work) in enumerate(works) if isinstance(work, Reach)}
        waits = [(stream, work, place) for place, (stream, work) in enumerate(works) if isinstance(work, LateEvent)]
        if any(reached.get(event, place) >= place for _, event, place in waits):
            raise AssertionError("a captured stream waits for an event outside of the capture")
        copies = [place for place, (stream, work) in enumerate(works) if stream == "copy" and _is_work(work)]
        if not copies:
            return
        if not any(stream == "copy" and place < copies[0] for stream, _, place in waits):
            raise AssertionError("captured copies must wait for the forward stream first")
        joins = [reached[event] for stream, event, _ in waits if stream == "forward"]
        if not any(works[place][0] == "copy" and place > copies[-1] for place in joins):
            raise AssertionError("the forward stream does not wait for the last captured copy")

    def replay(self) -> None:
        events: dict[LateEvent, LateEvent] = {}

        def again(event: LateEvent) -> LateEvent:
            return events.setdefault(event, LateEvent(self._device))

        for stream, work in self._works:
            if isinstance(work, Reach):
                self._device.enqueue(stream, Reach(again(work.event)))
            else:
                self._device.enqueue(stream, again(work) if isinstance(work, LateEvent) else work)
        self._device.linger()


def _is_work(work: Work | LateEvent) -> bool:
    return not isinstance(work, Reach | LateEvent)


class LateDevice:
    """A device with two streams. `random` decides which stream proceeds; `haste` is the probability that it proceeds
    by itself.

    With haste 0 the device proceeds only when a caller waits for it. With haste 1 it executes everything immediately.
    One thread may enqueue while others wait.
    """

    is_host = False

    def __init__(self, random: Random, haste: float = 0.5) -> None:
        self.torch_device = torch.device("cpu")
        self.num_copies = 0
        self._random = random
        self._haste = haste
        self._streams: dict[str, deque[Work | LateEvent]] = {"copy": deque(), "forward": deque()}
        self._recording: list[Captured] | None = None
        self._own: dict[int, StorageWeakRef] = {}  # the device's storages
        self._lock = threading.RLock()
        self._thread = threading.local()

    # --- interface of runtime.worker.device.Device ---

    @contextmanager
    def forward(self) -> Iterator[None]:
        with _Calls(self), _Noting(self, "forward"):
            yield

    @contextmanager
    def copies(self) -> Iterator[None]:
        with _Calls(self), _Noting(self, "copy"):
            yield
        self.linger()

    def order(self, first: Stream, then: Stream) -> None:
        self.wait_for(self.mark(first), then)

    def mark(self, stream: Stream) -> LateEvent:
        event = LateEvent(self)
        self.enqueue(stream, Reach(event))
        return event

    def wait_for(self, mark: Mark, then: Stream) -> None:
        self.enqueue(then, cast("LateEvent", mark))

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), POISON, dtype=torch.uint8)

    def upload(self, host: Tensor) -> tuple[Tensor, LateEvent]:
        self._refuse_capture()
        with self._plainly():
            staged, there, seen = torch.zeros_like(host), torch.zeros_like(host), host.clone()
        self.adopt(there)

        def copy() -> None:
            self.num_copies += 1
            if not torch.equal(host, seen):
                raise Overwritten(f"copy {self.num_copies} read what was written after it was called")
            staged.copy_(host)

        def place() -> None:
            there.copy_(staged)

        event = LateEvent(self)
        self.enqueue("copy", copy)
        self.enqueue("copy", Reach(event))
        self.enqueue("forward", event)
        self.enqueue("forward", place)
        self.linger()
        return there, event

    def record(self) -> LateEvent:
        self._refuse_capture()
        return self.mark("forward")

    def download(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], LateEvent]:
        self._refuse_capture()
        with self._plainly():
            host = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]
            for copy in host:
                copy.view(torch.uint8).fill_(POISON) if copy.dtype != torch.bool else copy.fill_(False)

        def read(copy: Tensor, tensor: Tensor) -> None:
            copy.copy_(tensor)

        for copy, tensor in zip(host, tensors, strict=True):
            self.enqueue("forward", lambda copy=copy, tensor=tensor: read(copy, tensor))
        event = self.mark("forward")
        self.linger()
        return host, event

    def capture(self, run: Callable[[], Result]) -> tuple[LateGraph, Result]:
        [graph], result = self.capture_parts(lambda divide: run())
        return graph, result

    def capture_parts(self, run: Callable[[Divide], Result]) -> tuple[list[LateGraph], Result]:
        parts: list[list[Captured]] = []

        def divide() -> None:
            parts.append([])
            self._recording = parts[-1]

        divide()
        try:
            with self.forward():
                result = run(divide)
        finally:
            self._recording = None
        return [LateGraph(self, works) for works in parts], result

    def measure(self, run: Callable[[], object]) -> MemoryUse:
        with self.forward():
            run()
        self.settle()
        return MemoryUse(0, 0)

    def free_bytes(self) -> tuple[int, int]:
        return 1 << 30, 1 << 31

    def release_unused(self) -> None:
        return

    # --- streams ---

    def enqueue(self, stream: str, work: Work | LateEvent) -> None:
        with self._lock:
            if self._recording is not None:
                self._recording.append((stream, work))
            else:
                self._streams[stream].append(work)

    def _refuse_capture(self) -> None:
        if self._recording is not None:
            raise AssertionError("work that the host waits for cannot be captured")

    def linger(self) -> None:
        """Let some time pass."""
        while self._random.random() < self._haste and self.move():
            pass

    def settle(self) -> None:
        """Let the device complete all work."""
        while self.move():
            pass

    def move(self) -> bool:
        """Execute one operation of a stream that may proceed. Return False if there is none."""
        with self._lock:
            able = [work for work in self._streams.values() if work and not self._waits(work[0])]
            if not able:
                return False
            work = self._random.choice(able).popleft()
            if not isinstance(work, LateEvent):
                with self._plainly(), torch.inference_mode():
                    work()
            return True

    def adopt(self, tensor: Tensor) -> None:
        """Make this memory the device's memory."""
        storage = tensor.untyped_storage()
        self._own[storage._cdata] = StorageWeakRef(storage)

    def owns(self, tensor: Tensor) -> bool:
        reference = self._own.get(tensor.untyped_storage()._cdata)
        return reference is not None and not reference.expired()

    @staticmethod
    def _waits(work: Work | LateEvent) -> bool:
        return isinstance(work, LateEvent) and not work.reached

    @contextmanager
    def _plainly(self) -> Iterator[None]:
        """Execute operations inside the context immediately."""
        before = self.moving
        self._thread.moving = True
        try:
            yield
        finally:
            self._thread.moving = before

    @property
    def moving(self) -> bool:
        """Whether this thread executes recorded work, or belongs to the device in another way."""
        return getattr(self._thread, "moving", False)


class _Noting(TorchDispatchMode):
    """Records operations on the device's tensors instead of executing them."""

    def __init__(self, device: LateDevice, stream: Stream) -> None:
        super().__init__()
        self._device = device
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = self._device
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if device.moving or not any(device.owns(tensor) for tensor in tensors):
            return func(*args, **kwargs)
        if func._schema.name in WAITING_OPERATIONS or _selects_by_mask(func, args):
            raise Waited(f"{func} needs values that are on the device")
        if func._schema.is_mutable:
            return self._note_change(func, args, kwargs)
        with device._plainly():
            result = func(*_with_valid_indices(func, args), **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        storages = {tensor.untyped_storage()._cdata for tensor in tensors}
        if all(leaf.untyped_storage()._cdata in storages for leaf in made):
            return result  # the result consists of views
        for leaf in made:
            device.adopt(leaf)
            with device._plainly():  # the mode of one stream may be nested in that of another
                leaf.zero_()

        def compute() -> None:
            again = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
            for leaf, value in zip(made, again, strict=True):
                leaf.copy_(value)

        device.enqueue(self._stream, compute)
        return result

    def _note_change(self, func: Any, args: Any, kwargs: Any) -> Any:
        arguments = dict(zip((argument.name for argument in func._schema.arguments), args)) | kwargs
        changed = [
            argument.name
            for argument in func._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        for leaf in tree_leaves([arguments[name] for name in changed]):
            self._device.adopt(leaf)
        self._device.enqueue(self._stream, lambda: func(*args, **kwargs))
        returned = [arguments[name] for name in changed][: len(func._schema.returns)]
        return returned[0] if len(returned) == 1 else tuple(returned) or None


def _with_valid_indices(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with indices of 0, because the indices in memory may be those of an earlier step."""
    if func._schema.name != "aten::index":
        return args
    values, indices = args
    return values, [None if index is None else torch.zeros_like(index) for index in indices]


class _Calls(TorchFunctionMode):
    """Makes tensors created with `device=` the device's, and refuses reads that bypass the dispatcher."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WAITING_METHODS and not self._device.moving and self._device.owns(args[0]):
            raise Waited(f"{func.__name__} needs values that are on the device")
        result = func(*args, **(kwargs or {}))
        if kwargs and kwargs.get("device") is not None and isinstance(result, Tensor):
            self._device.adopt(result)
        return result


def _selects_by_mask(func: Any, args: Any) -> bool:
    """Whether the result's shape depends on a mask, so that the host would wait for a GPU."""
    if func._schema.name != "aten::index":
        return False
    return any(index is not None and index.dtype == torch.bool for index in args[1])


class ReplayingDevice(CpuDevice):
    """A device that executes everything immediately. A captured graph is the call itself, which a replay repeats.

    Python code runs again too, so even collectives can be captured. Values that a real capture would freeze are not
    frozen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_replays = 0

    def capture(self, run: Callable[[], Result]) -> tuple[Graph, Result]:
        result = run()

        def replay() -> None:
            self.num_replays += 1
            for kept, new in zip(tree_leaves(result), tree_leaves(run()), strict=True):
                kept.copy_(new)

        return cast("Graph", SimpleNamespace(replay=replay)), result

    def capture_parts(self, run: Callable[[Divide], Result]) -> tuple[Sequence[Graph], Result]:
        parts = _Parts(run)
        result = run(parts.count)
        parts.kept = tree_leaves(result)

        def replay(number: int) -> None:
            self.num_replays += number == 0
            parts.replay(number)

        graphs = [SimpleNamespace(replay=partial(replay, number)) for number in range(parts.num_parts)]
        return cast("list[Graph]", graphs), result


class _Parts:
    """Replays a function in parts. A thread runs the function, and waits at each division for the next replay."""

    def __init__(self, run: Callable[[Divide], object]) -> None:
        self._run, self.num_parts = run, 1
        self.kept: list[Tensor] = []
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None

    def count(self) -> None:
        self.num_parts += 1

    def replay(self, number: int) -> None:
        if number == 0:
            self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
            threading.Thread(target=self._run_whole, args=(self._go, self._stopped), daemon=True).start()
        else:
            self._go.release()
        if not self._stopped.acquire(timeout=60):
            raise AssertionError("a replayed part did not end")
        if self._error is not None:
            raise self._error

    def _run_whole(self, go: threading.Semaphore, stopped: threading.Semaphore) -> None:
        def divide() -> None:
            stopped.release()
            if not go.acquire(timeout=60):
                raise AssertionError("a part was not replayed")

        try:
            with torch.inference_mode():
                for kept, new in zip(self.kept, tree_leaves(self._run(divide)), strict=True):
                    if isinstance(kept, Tensor):  # a result may be None
                        kept.copy_(new)
        except BaseException as error:
            self._error = error
        stopped.release()
