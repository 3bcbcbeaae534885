"""The compiled kernels, as ctypes sees them."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from ctypes import c_bool, c_char_p, c_int64, c_void_p
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ops.cpp.build import FLAGS, BuildError, build
from ops.cpp.structures import STRUCTURES

TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}  # what the kernels compute in

CACHE_TYPES = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}  # of caches that are not of their model's dtype


class KernelDescription(NamedTuple):
    """Which arithmetic a CPU's kernels use: two engines that differ in it may round differently.

    As text it is one line for a table or a bug report.
    """

    kernels: str  # "C++" or "torch"
    library: str  # the compiled file, whose name holds the hash of what was compiled; torch's version
    num_threads: int
    instruction_set: str  # such as "avx512f avx512_vnni avx512_bf16"
    # Whether the system has granted AMX to kernels that use it; None where torch decides.
    matrix_unit: bool | None

    def __str__(self) -> str:
        text = f"{self.kernels}, {self.library}, {self.num_threads} threads, {self.instruction_set}"
        if self.matrix_unit is None:
            return text
        if not self.matrix_unit and "amx" in self.instruction_set:
            return f"{text}, without the matrix unit, which the system refuses"
        return f"{text}, {'with' if self.matrix_unit else 'without'} matrix unit"


class Library:
    """The kernels by name and type. Raises RuntimeError where they and this file differ about a structure."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self.run = self._library.run  # run(pool, nodes, count, step); no lock of Python's is held
        self.run.argtypes = (c_void_p, c_void_p, c_int64, c_void_p)
        self.run.restype = None
        self.open_pool = self._library.open_pool  # open_pool(num_threads) -> pool
        self.open_pool.argtypes, self.open_pool.restype = (c_int64,), c_void_p
        self.close_pool = self._library.close_pool
        self.close_pool.argtypes, self.close_pool.restype = (c_void_p,), None
        sizes = (c_int64 * len(STRUCTURES)).in_dll(self._library, "STRUCTURE_SIZES")
        for structure, size in zip(STRUCTURES, sizes, strict=True):
            if ctypes.sizeof(structure) != size:
                raise RuntimeError(f"{structure.__name__} has {size} bytes in the compiled kernels.")
        self.panel_width = int(self._library.panel_width())
        self.byte_step = int(self._library.byte_step())  # to whole ones depths are filled up in 8 bits
        self.max_byte_depth = int(self._library.max_byte_depth())
        self._library.instruction_set.restype = c_char_p
        self._library.uses_matrix_unit.restype = c_bool
        self.instruction_set: str = self._library.instruction_set().decode()
        self.uses_matrix_unit: bool = self._library.uses_matrix_unit()
        self._addresses: dict[tuple[str, torch.dtype], int] = {}

    def kernel(self, name: str, dtype: torch.dtype) -> int:
        """The address of a kernel for tensors of `dtype`. KeyError for a dtype that it does not compute in."""
        key = (name, dtype)
        if key not in self._addresses:
            function = getattr(self._library, f"{name}_{TYPES[dtype]}")
            self._addresses[key] = ctypes.cast(function, c_void_p).value or 0
        return self._addresses[key]

    def name_of(self, kernel: int) -> str:
        """The name of a kernel that was asked for, by its address."""
        return next(name for (name, _), known in self._addresses.items() if known == kernel)


def load(compiler: str, processor: Collection[str], flags: Sequence[str] = FLAGS) -> Library:
    """The library for a processor of these flags, compiled where the cache has none that can be loaded.

    Raises `BuildError`.
    """
    path = build(compiler, processor, flags)
    try:
        return Library(path)
    except OSError:
        path.unlink(missing_ok=True)
    try:
        return Library(build(compiler, processor, flags))
    except OSError as error:  # from a disk of which nothing may be run, say
        raise BuildError(f"What {compiler} made cannot be loaded: {error}.") from error


def cache_type(pool: Tensor, dtype: torch.dtype) -> int | None:
    """How kernels in `dtype` call what a pool holds; None for what they do not read."""
    return 0 if pool.dtype == dtype else CACHE_TYPES.get(pool.dtype)


def address(tensor: Tensor | None) -> int | None:
    """Of a tensor's first element, null for none."""
    return None if tensor is None else tensor.data_ptr()


def in_line(x: Tensor) -> Tensor:
    """x [T, D] or [T, H, D] as kernels read it, copied where it is not: a token's numbers one after the other."""
    if x.stride(-1) == 1 and (x.dim() < 3 or x.stride(1) == x.shape[2]):
        return x
    return x.contiguous()
