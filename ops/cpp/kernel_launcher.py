"""Runs C++ kernels one by one, or captures them in a graph that later steps run in one call."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
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
from ops.large_pages import CACHE_LINE, LargePages, large_pages

LARGE_PAGE = 2 << 20


class NotCapturable(RuntimeError):
    """A step cannot be captured in a graph, for example because torch computes a part of it."""


class KernelLauncher:
    """Runs the kernels of one engine on `num_threads` threads. Only one thread may call the launcher at a time.

    Operations allocate outputs with `empty` and run kernels with `launch`. During graph capture, `launch` computes
    nothing: the graph records the kernels with the addresses of their operands.
    """

    def __init__(self, library: Library, num_threads: int) -> None:
        self.library = library
        self.num_threads = num_threads
        self._pool = _Pool(library, num_threads)
        self._close = weakref.finalize(self, self._pool.close)
        self._graph: KernelGraph | None = None
        self._captured: Step | None = None  # during capture: buffers from which the graph's kernels will read rows
        self._own_pages: Sequence[Step] = ()  # during capture: further buffers, for cache pools with their own pages
        self._weights = LargePages()

    def close(self) -> None:
        """Wait for a run that is in progress, and stop the threads. Later runs raise RuntimeError."""
        self._close()

    @property
    def description(self) -> KernelDescription:
        """Description of the kernels and their arithmetic."""
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
        """Dtypes in which the kernels compute."""
        return TYPES.keys()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised contiguous tensor for a kernel's output."""
        if self._graph is None:
            return torch.empty(*shape, dtype=dtype)
        return self._graph.arena.empty(shape, dtype)

    def weight_memory(self, size: int) -> Tensor:
        """Return a uint8 tensor of `size` bytes for a weight, aligned to a cache line, with a storage of its own.

        Weights are adjacent in blocks of large pages. A step reads all weights, and with small pages much of this time
        would be spent on address translation.
        """
        return self._weights.take(size)

    @contextmanager
    def weights_in(self, memory: LargePages) -> Iterator[None]:
        """Let `weight_memory` return tensors of `memory` inside the context."""
        before, self._weights = self._weights, memory
        try:
            yield
        finally:
            self._weights = before

    def tokens(self, x: Tensor) -> int:
        """Return the operand that tells a kernel the number of tokens T of x [T, ...].

        During capture this is 0, which makes captured kernels use the number of tokens of the step that they compute.
        Raises `NotCapturable` if x does not have one row per token of the step.
        """
        if self._graph is None:
            return len(x)
        if len(x) != self._graph.capacity:
            raise NotCapturable("an operation reads a tensor that does not have one row per token of the step")
        return 0

    def launch(self, kernel: str, dtype: torch.dtype, operands: ctypes.Structure, step: Step | None = None) -> None:
        """Run a kernel or, during capture, record it. `step` describes the step's rows, if the kernel reads them."""
        if self._graph is not None:
            if step is not None and self._captured is not None:
                self._bind(operands, step, self._captured)
            self._graph.append(kernel, dtype, operands)
            return
        node = GraphNode(kernel=self.library.kernel(kernel, dtype), operands=ctypes.addressof(operands))
        self.run(ctypes.addressof(node), 1, step or _NO_STEP)

    def _bind(self, operands: ctypes.Structure, step: Step, captured: Step) -> None:
        """Let a captured kernel read rows from `captured` or, for a pool with its own pages, from `_own_pages`.

        Raises `NotCapturable` if `step` has other buffers.
        """
        for own in self._own_pages:
            if isinstance(operands, Attend | Store) and step.slot_mapping == own.slot_mapping:
                if isinstance(operands, Attend):
                    operands.page_table = own.page_table
                else:
                    operands.slot_mapping = own.slot_mapping
                return
        _check_same(step, captured)

    def run(self, nodes: int, count: int, step: Step) -> None:
        """Run `count` graph nodes, an array at the address `nodes`. Raises RuntimeError after `close`."""
        self._pool.run(nodes, count, ctypes.addressof(step))

    def capture(
        self,
        capacity: int,
        forward: Callable[[], object],
        step: Step | None = None,
        own_pages: Sequence[Step] = (),
    ) -> KernelGraph:
        """Return a graph of the kernels that `forward` launches, for steps of up to `capacity` tokens.

        `step` has the buffers that each later step fills. `own_pages` has a further `Step` for each cache pool that has
        its own page table. Raises `NotCapturable` if torch would have to compute a part of the step, or if a kernel
        reads token ids, positions, a slot mapping or query starts from other buffers.
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


def _check_same(step: Step, captured: Step) -> None:
    """Raise `NotCapturable` if `step` has other buffers than `captured`."""
    for name in _BUFFERS:
        if getattr(step, name) not in (None, getattr(captured, name)):
            raise NotCapturable(f"an operation reads {name} from another buffer than the step's")


class _Pool:
    """The worker threads. `close` waits for a running kernel: at exit, a daemon thread may still be running one."""

    def __init__(self, library: Library, num_threads: int) -> None:
        self._library = library
        self._in_use = Lock()
        self._threads: int | None = library.open_pool(num_threads)

    def run(self, nodes: int, count: int, step: int) -> None:
        with self._in_use:
            if self._threads is None:
                raise RuntimeError("The kernel launcher is closed.")
            self._library.run(self._threads, nodes, count, step)

    def close(self) -> None:
        with self._in_use:
            if self._threads is not None:
                self._library.close_pool(self._threads)
            self._threads = None


class KernelGraph:
    """A captured step: its kernels in order, and the memory of their intermediate tensors."""

    def __init__(self, launcher: KernelLauncher, capacity: int) -> None:
        self.capacity = capacity
        self.arena = Arena()
        self.nodes: list[GraphNode] = []
        self.operands: list[ctypes.Structure] = []
        self._parts: tuple[KernelGraph, ...] = ()  # graphs whose memory this graph uses
        self._launcher = launcher
        self._array: ctypes.Array[GraphNode] | None = None

    def append(self, kernel: str, dtype: torch.dtype, operands: ctypes.Structure) -> None:
        """Add a kernel, or fuse it with the previous kernel.

        A store of keys and values is fused with the rotation of the keys, so that the core that has rotated the keys
        stores them from its cache. An activation is fused with the product before it, because only the activation may
        read the product's results (see `ops.activation`).
        """
        last = self.operands[-1] if self.operands else None
        if isinstance(operands, Store) and isinstance(last, Rotate) and operands.k == last.k:
            del self.nodes[-1], self.operands[-1]
            kernel, operands = "rotate_store", RotateStore(rotate=last, store=operands)
        if isinstance(operands, Gate) and not operands.gated and self._last_product_writes(operands.x, dtype):
            last_product = self.operands[-1]
            last_product.out, last_product.activation = operands.out, operands.kind + 1
            return
        self.nodes.append(
            GraphNode(kernel=self._launcher.library.kernel(kernel, dtype), operands=ctypes.addressof(operands))
        )
        self.operands.append(operands)

    def _last_product_writes(self, x: int | None, dtype: torch.dtype) -> bool:
        """Return whether the last kernel is an unquantised product that writes to address `x`."""
        if not self.operands or self.nodes[-1].kernel != self._launcher.library.kernel("product", dtype):
            return False
        return self.operands[-1].out == x

    def close(self) -> None:
        """Complete the graph, so that it can run. No kernel may be added afterwards."""
        self._array = (GraphNode * len(self.nodes))(*self.nodes)

    def followed_by(self, other: KernelGraph) -> KernelGraph:
        """Return a graph that runs the kernels of this graph and then those of `other`, in the memory of both."""
        joined = KernelGraph(self._launcher, min(self.capacity, other.capacity))
        joined.nodes = [*self.nodes, *other.nodes]
        joined._parts = (self, other)
        joined.close()
        return joined

    def without(self, kernels: Collection[str]) -> KernelGraph:
        """Return a graph that runs all kernels of this graph except those named, in the memory of this graph."""
        rest = KernelGraph(self._launcher, self.capacity)
        name_of = self._launcher.library.name_of
        rest.nodes = [node for node in self.nodes if name_of(node.kernel) not in kernels]
        rest._parts = (self,)
        rest.close()
        return rest

    def run(self, step: Step) -> None:
        """Compute a step. Raises ValueError if the step has more tokens than the graph's capacity."""
        if self._array is None:
            raise RuntimeError("The graph is still being captured.")
        if step.num_tokens > self.capacity:
            raise ValueError(f"The step has {step.num_tokens} tokens, but the graph's capacity is {self.capacity}.")
        self._launcher.run(ctypes.addressof(self._array), len(self._array), step)

    def time(self, step: Step) -> list[tuple[str, float]]:
        """Compute a step kernel by kernel. Return (name, seconds) of each kernel, call overhead included."""
        times = []
        for node in self.nodes:
            began = perf_counter()
            self._launcher.run(ctypes.addressof(node), 1, step)
            times.append((self._launcher.library.name_of(node.kernel), perf_counter() - began))
        return times

    def record(self, step: Step) -> None:
        """Compute a step kernel by kernel, each under its name in torch's profile."""
        for node in self.nodes:
            with torch.profiler.record_function(self._launcher.library.name_of(node.kernel)):
                self._launcher.run(ctypes.addressof(node), 1, step)

    @property
    def nbytes(self) -> int:
        """Bytes of the intermediate tensors."""
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
    """Memory for the intermediate tensors of a graph. Tensors reuse memory of tensors that are freed during capture.

    Therefore a step needs memory for the tensors of only one layer, which stay in the processor's caches.
    """

    blocks: list[_Block] = field(default_factory=list)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor in a free block, or in a new one."""
        nbytes = max(1, prod(shape)) * dtype.itemsize
        fitting = [block for block in self.blocks if block.free and nbytes <= block.memory.nbytes <= 2 * nbytes]
        if fitting:
            block = min(fitting, key=lambda block: block.memory.nbytes)
        else:
            block = _Block(_aligned(nbytes))
            self.blocks.append(block)
        # A separate storage over the block's memory. It expires when the last view of this tensor is freed.
        whole = torch.frombuffer(block.memory[:nbytes].data, dtype=dtype)
        block.user = StorageWeakRef(whole.untyped_storage())
        return whole.view(*shape)

    @property
    def nbytes(self) -> int:
        return sum(block.memory.nbytes for block in self.blocks)


def _aligned(nbytes: int) -> np.ndarray:
    """Return `nbytes` bytes of memory, aligned to a large page if they fill one, otherwise to a cache line."""
    if nbytes < LARGE_PAGE:
        memory, alignment = np.empty(nbytes + CACHE_LINE, np.uint8), CACHE_LINE
    else:
        whole_pages = -(-nbytes // LARGE_PAGE) * LARGE_PAGE
        memory, alignment = np.frombuffer(large_pages(whole_pages + LARGE_PAGE), np.uint8), LARGE_PAGE
    first = -memory.ctypes.data % alignment
    return memory[first : first + nbytes]


class _ViewsOnly(TorchDispatchMode):
    """Lets torch create views of tensors. All other torch operations raise `NotCapturable`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping would import torch's compiler, which takes most of a second

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        returns = func._schema.returns
        views = bool(returns) and all(result.alias_info is not None for result in returns)
        if not views or func._schema.is_mutable:  # raise before torch computes on uninitialised memory
            raise NotCapturable(f"{func} is computed by torch")
        return func(*args, **(kwargs or {}))
