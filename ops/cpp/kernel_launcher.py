"""Running C++ kernels one by one, or capturing them in a graph that a later step runs in a single call."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from threading import Lock
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.profiler
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ops.cpp.library import TYPES, KernelDescription, Library
from ops.cpp.structures import Attend, Gate, GraphNode, Rotate, RotateStore, Step, Store

CACHE_LINE = 64
LARGE_PAGE = 2 << 20
BLOCK_BYTES = 64 << 20  # of weights, at least


class NotCapturable(RuntimeError):
    """A step does something that no graph can repeat: torch computes a part of it."""


def _large_pages(size: int) -> memoryview:
    """Memory of zeros in large pages, where the system has some; what is never written takes none."""
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            block.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(block)


class KernelLauncher:
    """Runs the kernels of one engine, on so many threads. For one thread at a time.

    Operations ask it for their outputs (`empty`) and give it their kernels (`launch`). While a graph is captured
    nothing is computed: kernels are noted with the addresses of their operands.
    """

    def __init__(self, library: Library, num_threads: int) -> None:
        self.library = library
        self.num_threads = num_threads
        self._pool = _Pool(library, num_threads)
        self._close = weakref.finalize(self, self._pool.close)
        self._graph: KernelGraph | None = None
        self._captured: Step | None = None  # what captured kernels may read of rows
        self._own_pages: Sequence[Step] = ()  # and those whose pools have pages of their own
        self._block = memoryview(b"")  # where further weights go

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
        if self._graph is None:
            return torch.empty(*shape, dtype=dtype)
        return self._graph.arena.empty(shape, dtype)

    def weight_memory(self, size: int) -> Tensor:
        """So many bytes for a weight, uint8, that begin at a cache line and at the beginning of their storage.

        Weights stand one after the other in blocks of large pages: a step reads all of them once, and to find a small
        page takes a good part of the time of reading it. A block lasts as long as any weight in it.
        """
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        if size > len(self._block):
            self._block = _large_pages(max(size, BLOCK_BYTES))
        taken, self._block = self._block[:size], self._block[-(-size // CACHE_LINE) * CACHE_LINE :]
        return torch.frombuffer(taken, dtype=torch.uint8)

    def tokens(self, x: Tensor) -> int:
        """The number of tokens of x [T, ...] as operands say it: in a graph it is the step's."""
        if self._graph is None:
            return len(x)
        if len(x) != self._graph.capacity:
            raise NotCapturable("an operation takes something else than the step's tokens")
        return 0

    def launch(
        self, kernel: str, dtype: torch.dtype, operands: ctypes.Structure, step: Step | None = None
    ) -> None:
        """Run a kernel now, for the rows in `step` if it reads any; or note it."""
        if self._graph is not None:
            if step is not None and self._captured is not None:
                self._bind(operands, step, self._captured)
            self._graph.note(kernel, dtype, operands)
            return
        node = GraphNode(self.library.kernel(kernel, dtype), ctypes.addressof(operands))
        self.run(ctypes.addressof(node), 1, step or _NO_STEP)

    def _bind(self, operands: ctypes.Structure, step: Step, captured: Step) -> None:
        """Have a captured kernel read rows from the captured step, or page table and slots of its pool's own pages."""
        for own in self._own_pages:
            if isinstance(operands, Attend | Store) and step.slot_mapping == own.slot_mapping:
                if isinstance(operands, Attend):
                    operands.page_table = own.page_table
                else:
                    operands.slot_mapping = own.slot_mapping
                return
        _check_same(step, captured)

    def run(self, nodes: int, count: int, step: Step) -> None:
        """Run so many nodes from an address on. Raises RuntimeError after `close`."""
        self._pool.run(nodes, count, ctypes.addressof(step))

    def capture(
        self,
        capacity: int,
        forward: Callable[[], object],
        step: Step | None = None,
        own_pages: Sequence[Step] = (),
    ) -> KernelGraph:
        """What `forward` launches for steps of up to `capacity` tokens.

        Raises `NotCapturable` where torch itself would have to compute something. With a `step`, whose buffers
        every step that is run will have, also where a kernel is given token ids, positions, a slot mapping or
        the rows' borders that are not in those buffers, or page table and slot mapping of one of `own_pages`.
        """
        graph = KernelGraph(self, capacity)
        self._graph, self._captured, self._own_pages = graph, step, own_pages
        try:
            with _ViewsOnly():
                forward()
        finally:
            self._graph = None
        graph.close()
        return graph


_NO_STEP = Step()
_BUFFERS = ("token_ids", "positions", "slot_mapping", "query_starts")


def _check_same(given: Step, captured: Step) -> None:
    """Raise `NotCapturable` where a kernel was given buffers that the captured step does not have."""
    for name in _BUFFERS:
        if getattr(given, name) not in (None, getattr(captured, name)):
            raise NotCapturable(f"an operation reads {name} that are not the step's own")


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


class KernelGraph:
    """The kernels of a step, in order, with memory for what passes between them."""

    def __init__(self, launcher: KernelLauncher, capacity: int) -> None:
        self.capacity = capacity
        self.arena = Arena()
        self.nodes: list[GraphNode] = []
        self.operands: list[ctypes.Structure] = []
        self._parts: tuple[KernelGraph, ...] = ()  # whose memory this one uses
        self._launcher = launcher
        self._array: ctypes.Array[GraphNode] | None = None

    def note(self, kernel: str, dtype: torch.dtype, operands: ctypes.Structure) -> None:
        """Add a kernel; one that stores the keys which the last one rotated takes that one's place and does both.

        So keys are stored while they are in the cache of the core that rotated them. Likewise a product activates
        its results itself, for which nobody asks otherwise (see `ops.activation`).
        """
        last = self.operands[-1] if self.operands else None
        if isinstance(operands, Store) and isinstance(last, Rotate) and operands.k == last.k:
            del self.nodes[-1], self.operands[-1]
            kernel, operands = "rotate_store", RotateStore(last, operands)
        if isinstance(operands, Gate) and not operands.gated and self._gives(operands.x, dtype):
            last_product = self.operands[-1]
            last_product.out, last_product.activation = operands.out, operands.kind + 1
            return
        self.nodes.append(GraphNode(self._launcher.library.kernel(kernel, dtype), ctypes.addressof(operands)))
        self.operands.append(operands)

    def _gives(self, x: int | None, dtype: torch.dtype) -> bool:
        """Whether the last kernel is a plain product with these results."""
        if not self.operands or self.nodes[-1].kernel != self._launcher.library.kernel("product", dtype):
            return False
        return self.operands[-1].out == x

    def close(self) -> None:
        """No kernels come any more."""
        self._array = (GraphNode * len(self.nodes))(*self.nodes)

    def followed_by(self, other: KernelGraph) -> KernelGraph:
        """The kernels of this graph, then those of the other, with the memory of both."""
        joined = KernelGraph(self._launcher, min(self.capacity, other.capacity))
        joined.nodes = [*self.nodes, *other.nodes]
        joined._parts = (self, other)
        joined.close()
        return joined

    def run(self, step: Step) -> None:
        """Compute a step. ValueError if it has more tokens than the graph has room for."""
        if self._array is None:
            raise RuntimeError("The graph is still being captured.")
        if step.num_tokens > self.capacity:
            raise ValueError(f"The graph takes {self.capacity} tokens, not {step.num_tokens}.")
        self._launcher.run(ctypes.addressof(self._array), len(self._array), step)

    def time(self, step: Step) -> list[tuple[str, float]]:
        """Compute a step kernel by kernel -> the name of each and the seconds that it took, its call included."""
        times = []
        for node in self.nodes:
            began = perf_counter()
            self._launcher.run(ctypes.addressof(node), 1, step)
            times.append((self._launcher.library.name_of(node.kernel), perf_counter() - began))
        return times

    def record(self, step: Step) -> None:
        """Compute a step kernel by kernel, each under its name in the profile that torch takes."""
        for node in self.nodes:
            with torch.profiler.record_function(self._launcher.library.name_of(node.kernel)):
                self._launcher.run(ctypes.addressof(node), 1, step)

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
    """Memory for the tensors of a graph. What nobody holds any more while capturing is used again.

    So a step of many layers needs the memory of one, and stays in the processor's caches.
    """

    blocks: list[_Block] = field(default_factory=list)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor in a block that nobody uses any more, or in a new one."""
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
    """So many bytes that begin at a cache line, or fill large pages where they are as many as one has."""
    if nbytes < LARGE_PAGE:
        memory, grain = np.empty(nbytes + CACHE_LINE, np.uint8), CACHE_LINE
    else:
        whole_pages = -(-nbytes // LARGE_PAGE) * LARGE_PAGE
        memory, grain = np.frombuffer(_large_pages(whole_pages + LARGE_PAGE), np.uint8), LARGE_PAGE
    first = -memory.ctypes.data % grain
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
            raise NotCapturable(f"{func} is computed by torch")
        return func(*args, **(kwargs or {}))
