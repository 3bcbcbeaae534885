"""Running C++ kernels one by one, or recording them on a tape that a later step runs in a single call."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import prod
from threading import Lock
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ops.attention import AttentionInputs
from ops.cpp.library import TYPES, KernelDescription, Library, Node, Rotate, RotateStore, Step, Store, address

CACHE_LINE = 64


class NotRecordable(RuntimeError):
    """A step does something that no tape can repeat: torch computes a part of it."""


class Executor:
    """Runs the kernels of one engine, on so many threads. For one thread at a time.

    Operations ask it for their outputs (`empty`) and give it their kernels (`launch`). While a tape is recorded
    nothing is computed: kernels are noted with the addresses of their operands.
    """

    def __init__(self, library: Library, num_threads: int) -> None:
        self.library = library
        self.num_threads = num_threads
        self._pool = _Pool(library, num_threads)
        self._close = weakref.finalize(self, self._pool.close)
        self._tape: Tape | None = None
        self._recorded: Step | None = None  # what recorded kernels may read of rows

    def close(self) -> None:
        """End the threads, after the run that another thread is in; nothing can be run any more."""
        self._close()

    @property
    def description(self) -> KernelDescription:
        """Which arithmetic the kernels use."""
        library = self.library
        return KernelDescription(
            kernels="C++",
            library=library.path.name,
            num_threads=self.num_threads,
            instruction_set=library.instruction_set,
            matrix_unit=library.uses_matrix_unit,
        )

    @property
    def dtypes(self) -> Collection[torch.dtype]:
        """What the kernels compute in."""
        return TYPES.keys()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor for a kernel to write."""
        if self._tape is None:
            return torch.empty(*shape, dtype=dtype)
        return self._tape.arena.empty(shape, dtype)

    def tokens(self, x: Tensor) -> int:
        """The number of tokens of x [T, ...] as operands say it: on a tape it is the step's."""
        if self._tape is None:
            return len(x)
        if len(x) != self._tape.capacity:
            raise NotRecordable("an operation takes something else than the step's tokens")
        return 0

    def launch(
        self, kernel: str, dtype: torch.dtype, operands: ctypes.Structure, step: Step | None = None
    ) -> None:
        """Run a kernel now, for the rows in `step` if it reads any; or note it."""
        if self._tape is not None:
            if step is not None and self._recorded is not None:
                _check_same(step, self._recorded)
            self._tape.note(kernel, dtype, operands)
            return
        node = Node(self.library.kernel(kernel, dtype), ctypes.addressof(operands))
        self.run(ctypes.addressof(node), 1, step or _NO_STEP)

    def run(self, nodes: int, count: int, step: Step) -> None:
        """Run so many nodes from an address on. Raises RuntimeError after `close`."""
        self._pool.run(nodes, count, ctypes.addressof(step))

    def record(self, capacity: int, forward: Callable[[], object], step: Step | None = None) -> Tape:
        """What `forward` launches for steps of up to `capacity` tokens.

        Raises `NotRecordable` where torch itself would have to compute something. With a `step`, whose buffers every
        step that is run will have, also where a kernel is given token ids, positions, slots or the rows' borders that
        are not in those buffers.
        """
        tape = Tape(self, capacity)
        self._tape, self._recorded = tape, step
        try:
            with _ViewsOnly():
                forward()
        finally:
            self._tape = None
        tape.close()
        return tape


_NO_STEP = Step()
_BUFFERS = ("token_ids", "positions", "slots", "query_starts")


def _check_same(given: Step, recorded: Step) -> None:
    """Raise `NotRecordable` where a kernel was given buffers that the recorded step does not have."""
    for name in _BUFFERS:
        if getattr(given, name) not in (None, getattr(recorded, name)):
            raise NotRecordable(f"an operation reads {name} that are not the step's own")


class _Pool:
    """The threads. They are not ended while one runs kernels: that may be in a thread that the process ends with."""

    def __init__(self, library: Library, num_threads: int) -> None:
        self._library = library
        self._in_use = Lock()
        self._threads: int | None = library.open_pool(num_threads)

    def run(self, nodes: int, count: int, step: int) -> None:
        with self._in_use:
            if self._threads is None:
                raise RuntimeError("The threads of the kernels have ended.")
            self._library.run(self._threads, nodes, count, step)

    def close(self) -> None:
        with self._in_use:
            if self._threads is not None:
                self._library.close_pool(self._threads)
            self._threads = None


class Tape:
    """The kernels of a step, in order, with memory for what passes between them."""

    def __init__(self, executor: Executor, capacity: int) -> None:
        self.capacity = capacity
        self.arena = Arena()
        self.nodes: list[Node] = []
        self.operands: list[ctypes.Structure] = []
        self._parts: tuple[Tape, ...] = ()  # whose memory this one uses
        self._executor = executor
        self._array: ctypes.Array[Node] | None = None

    def note(self, kernel: str, dtype: torch.dtype, operands: ctypes.Structure) -> None:
        """Add a kernel; one that stores the keys which the last one rotated takes that one's place and does both.

        So keys are stored while they are in the cache of the core that rotated them.
        """
        last = self.operands[-1] if self.operands else None
        if isinstance(operands, Store) and isinstance(last, Rotate) and operands.k == last.k:
            del self.nodes[-1], self.operands[-1]
            kernel, operands = "rotate_store", RotateStore(last, operands)
        self.nodes.append(Node(self._executor.library.kernel(kernel, dtype), ctypes.addressof(operands)))
        self.operands.append(operands)

    def close(self) -> None:
        """No kernels come any more."""
        self._array = (Node * len(self.nodes))(*self.nodes)

    def followed_by(self, other: Tape) -> Tape:
        """The kernels of this tape, then those of the other, with the memory of both."""
        joined = Tape(self._executor, min(self.capacity, other.capacity))
        joined.nodes = [*self.nodes, *other.nodes]
        joined._parts = (self, other)
        joined.close()
        return joined

    def run(self, step: Step) -> None:
        """Compute a step. ValueError if it has more tokens than the tape has room for."""
        if self._array is None:
            raise RuntimeError("The tape is still recorded.")
        if step.num_tokens > self.capacity:
            raise ValueError(f"The tape takes {self.capacity} tokens, not {step.num_tokens}.")
        self._executor.run(ctypes.addressof(self._array), len(self._array), step)

    def time(self, step: Step) -> list[tuple[str, float]]:
        """Compute a step kernel by kernel -> the name of each and the seconds that it took, its call included."""
        times = []
        for node in self.nodes:
            began = perf_counter()
            self._executor.run(ctypes.addressof(node), 1, step)
            times.append((self._executor.library.name_of(node.kernel), perf_counter() - began))
        return times

    @property
    def nbytes(self) -> int:
        """Of what passes between the kernels."""
        return self.arena.nbytes + sum(part.nbytes for part in self._parts)


@dataclass(slots=True)
class _Block:
    memory: np.ndarray
    user: StorageWeakRef | None = None

    @property
    def free(self) -> bool:
        return self.user is None or self.user.expired()


@dataclass(slots=True)
class Arena:
    """Memory for the tensors of a tape. What nobody holds any more while recording is used again.

    So a step of many layers needs the memory of one, and stays in the processor's caches.
    """

    blocks: list[_Block] = field(default_factory=list)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        nbytes = max(1, prod(shape)) * dtype.itemsize
        fitting = [
            block for block in self.blocks if block.free and nbytes <= block.memory.nbytes <= 2 * nbytes
        ]
        if fitting:
            block = min(fitting, key=lambda block: block.memory.nbytes)
        else:
            block = _Block(_aligned(nbytes))
            self.blocks.append(block)
        # A storage of its own over the same memory: it ends when the last view of this tensor does.
        whole = torch.frombuffer(block.memory[:nbytes].data, dtype=dtype)
        block.user = StorageWeakRef(whole.untyped_storage())
        return whole.view(*shape)

    @property
    def nbytes(self) -> int:
        return sum(block.memory.nbytes for block in self.blocks)


def _aligned(nbytes: int) -> np.ndarray:
    """So many bytes that begin at a cache line."""
    memory = np.empty(nbytes + CACHE_LINE, np.uint8)
    first = -memory.ctypes.data % CACHE_LINE
    return memory[first : first + nbytes]


class _ViewsOnly(TorchDispatchMode):
    """Lets torch look at tensors, not compute."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping would import torch's compiler, which takes most of a second

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        returns = func._schema.returns
        views = bool(returns) and all(result.alias_info is not None for result in returns)
        if not views or func._schema.is_mutable:  # before it computes on memory that nothing was written to
            raise NotRecordable(f"{func} is computed by torch")
        return func(*args, **(kwargs or {}))


def step_in(inputs: AttentionInputs) -> Step:
    """What kernels of a step's rows read, made once for all layers. It holds addresses: the inputs must outlive it."""
    key = (__name__, "step")
    if key not in inputs.memo:
        inputs.memo[key] = Step(
            num_tokens=len(inputs.slots),
            num_rows=len(inputs.counts_host),
            slots=address(inputs.slots),
            page_table=address(inputs.page_table),
            table_width=inputs.page_table.stride(0),
            starts=address(inputs.starts),
            counts=address(inputs.counts),
            query_starts=address(inputs.query_starts),
            page_size=inputs.page_size,
        )
    return inputs.memo[key]
