"""Checks every memory access of interpreted Triton kernels: bounds, and races between the programs of a launch.

`install` is called once in the interpreting process. From then on a launch fails with a `MemoryFault` if a program
touches memory outside the launch's tensors, if two programs write the same address, or if a program reads what another
one writes. On a GPU, programs run in any order, so the last two are races. Atomic operations may share addresses.
Kernels with deliberate errors (`kernel_mutants`) are not checked, since their tests compare results.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Addresses = NDArray[np.uint64]


class MemoryFault(AssertionError):
    """A kernel that would corrupt memory or give results that depend on the order of programs."""


class Launch:
    """The tensors and the accesses of one launch."""

    def __init__(self, name: str, tensors: list[Tensor]) -> None:
        self._name = name
        self._begins, self._ends = _spans(tensors)
        # span of the tensors -> accesses of each program
        self._loads: dict[int, list[tuple[int, Addresses]]] = {}
        self._stores: dict[int, list[tuple[int, Addresses]]] = {}

    def access(self, kind: str, program: int, addresses: Addresses) -> None:
        """Record the accesses of a program. Raises `MemoryFault` for addresses outside the tensors."""
        if not len(addresses):
            return
        first, last = (int(np.searchsorted(self._begins, end, side="right")) - 1 for end in _ends(addresses))
        if first == last >= 0 and addresses.max() < self._ends[first]:  # usual, and fast
            self._record(kind, program, first, addresses)
            return
        span = np.searchsorted(self._begins, addresses, side="right").astype(np.int64) - 1
        is_inside = (span >= 0) & (addresses < self._ends[np.maximum(span, 0)])
        if not is_inside.all():
            raise MemoryFault(f"{self._name}: {kind} of {int((~is_inside).sum())} addresses outside its tensors")
        for number in np.unique(span):
            self._record(kind, program, int(number), addresses[span == number])

    def _record(self, kind: str, program: int, span: int, addresses: Addresses) -> None:
        if kind != "atomic":
            (self._loads if kind == "load" else self._stores).setdefault(span, []).append((program, addresses))

    def finish(self) -> None:
        """Raise `MemoryFault` if programs race."""
        for span, stores in self._stores.items():
            self._check_races(stores, self._loads.get(span, []))

    def _check_races(self, stores: list[tuple[int, Addresses]], loads: list[tuple[int, Addresses]]) -> None:
        programs = np.concatenate([np.full(len(found), program) for program, found in stores])
        written = np.concatenate([found for _, found in stores])
        pairs = np.unique(np.stack([written, programs.astype(np.uint64)], axis=1), axis=0)
        addresses, counts = np.unique(pairs[:, 0], return_counts=True)
        if (counts > 1).any():
            raise MemoryFault(f"{self._name}: {int((counts > 1).sum())} addresses are written by several programs")
        writers = pairs[:, 1].astype(np.int64)  # of `addresses`, which are sorted and distinct
        for program, read in loads:
            place = np.minimum(np.searchsorted(addresses, read), len(addresses) - 1)
            if ((addresses[place] == read) & (writers[place] != program)).any():
                raise MemoryFault(f"{self._name}: program {program} reads what another program writes")


class Traffic:
    """Counts loaded elements while it is active (see `traffic`)."""

    def __init__(self) -> None:
        self._loads: list[Addresses] = []

    def add(self, addresses: Addresses) -> None:
        self._loads.append(addresses)

    def loads_from(self, tensor: Tensor) -> int:
        """Return the number of elements loaded from a contiguous tensor. An element counts once per load."""
        begin = tensor.data_ptr()
        end = begin + tensor.numel() * tensor.element_size()
        return sum(int(((found >= begin) & (found < end)).sum()) for found in self._loads)


unchecked_modules = "mutant_"  # prefix of the names of modules whose kernels are not checked; None: check all
_launches: list[Launch] = []  # the current launch, if any
_listeners: list[Traffic] = []
num_checked = 0  # finished launches, for a test that the checks are active


@contextmanager
def traffic() -> Iterator[Traffic]:
    """Count the loads of the block's launches."""
    counter = Traffic()
    _listeners.append(counter)
    try:
        yield counter
    finally:
        _listeners.remove(counter)


def install() -> None:
    """Check all later launches of this process, which must interpret kernels."""
    import triton.runtime.interpreter as interpreter

    if not isinstance(interpreter._interpreter, _Checked):
        interpreter._interpreter = _Checked(interpreter._interpreter, interpreter.interpreter_builder)
        _check_launches(interpreter.GridExecutor)


class _Checked:
    """Stands for the interpreter's memory operations."""

    def __init__(self, real: Any, builder: Any) -> None:
        self._real, self._builder = real, builder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._access("load", pointers, mask)
        return self._real.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        self._access("store", pointers, mask)
        return self._real.store(pointers, value, mask)

    def atomic_rmw(self, operation: Any, pointers: Any, value: Any, mask: Any, order: Any) -> Any:
        self._access("atomic", pointers, mask)
        return self._real.atomic_rmw(operation, pointers, value, mask, order)

    def _access(self, kind: str, pointers: Any, mask: Any) -> None:
        if not _launches:
            return
        used = np.broadcast_to(np.asarray(mask), np.shape(pointers)).reshape(-1).astype(bool)
        addresses = np.asarray(pointers).reshape(-1).astype(np.uint64)[used]
        (x, y, z), (width, height, _) = self._builder.grid_idx, self._builder.grid_dim
        _launches[-1].access(kind, (z * height + y) * width + x, addresses)
        if kind == "load":
            for counter in _listeners:
                counter.add(addresses)


def _check_launches(executor: Any) -> None:
    """Make every launch of Triton's `GridExecutor` a `Launch`."""
    prepare, launch = executor._init_args_hst, executor.__call__

    def prepare_checked(self: Any, args: Any, kwargs: Any) -> Any:
        on_host, by_name = prepare(self, args, kwargs)
        if unchecked_modules is not None and self.fn.__module__.startswith(unchecked_modules):
            return on_host, by_name
        tensors = [value for value in (*on_host, *by_name.values()) if hasattr(value, "data_ptr")]
        _launches.append(Launch(self.fn.__name__, tensors))
        return on_host, by_name

    def launch_checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        global num_checked
        depth = len(_launches)
        try:
            result = launch(self, *args, **kwargs)
            if len(_launches) > depth:
                _launches[-1].finish()
                num_checked += 1
            return result
        finally:
            del _launches[depth:]

    executor._init_args_hst, executor.__call__ = prepare_checked, launch_checked


def _spans(tensors: list[Tensor]) -> tuple[Addresses, Addresses]:
    """Return the ascending, disjoint address ranges of the tensors: begins and ends."""
    merged: list[list[int]] = []
    for begin, end in sorted(_span(tensor) for tensor in tensors if tensor.numel()):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    merged = merged or [[0, 0]]
    return tuple(np.array(column, np.uint64) for column in zip(*merged))  # pyright: ignore[reportReturnType]


def _ends(addresses: Addresses) -> tuple[np.uint64, np.uint64]:
    return addresses.min(), addresses.max()


def _span(tensor: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
