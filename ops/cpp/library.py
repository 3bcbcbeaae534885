"""The compiled kernels, loaded with ctypes."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Collection, Iterable, Sequence
from ctypes import c_bool, c_char_p, c_int64, c_void_p
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ops.cpp import prebuilt
from ops.cpp.build import FLAGS, BuildError, Lifeline, build
from ops.cpp.structures import STRUCTURES

logger = logging.getLogger(__name__)

TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}  # dtypes in which the kernels compute

# Dtypes that only a KV cache may have -> the code that kernels use for them.
CACHE_TYPES = {
    torch.float8_e4m3fn: 1,
    torch.float8_e5m2: 2,
}


class KernelDescription(NamedTuple):
    """The properties of a CPU engine on which the rounding of its kernels depends.

    Engines with equal descriptions round equally. `str` returns one line for a table or a bug report.
    """

    kernels: str  # "C++" or "torch"
    library: str  # file name, which contains a hash of the sources; or torch's version
    num_threads: int
    instruction_set: str  # for example "avx512f avx512_vnni avx512_bf16"
    # Whether the kernels use AMX and the system permits it. None: torch decides.
    matrix_unit: bool | None

    def __str__(self) -> str:
        text = f"{self.kernels}, {self.library}, {self.num_threads} threads, {self.instruction_set}"
        if self.matrix_unit is None:
            return text
        if not self.matrix_unit and "amx" in self.instruction_set:
            return f"{text}, without matrix unit (the system does not permit it)"
        return f"{text}, {'with' if self.matrix_unit else 'without'} matrix unit"


class _Size(ctypes.Structure):
    """Size of a structure in the library."""

    _fields_ = (("structure", c_char_p), ("bytes", c_int64))


def check_sizes(compiled: Iterable[_Size]) -> None:
    """Raise RuntimeError if the size of a structure in `STRUCTURES` differs in the library."""
    sizes = {(size.structure or b"").decode(): size.bytes for size in compiled}
    for name, structure in STRUCTURES.items():
        if sizes.get(name) != ctypes.sizeof(structure):
            raise RuntimeError(
                f"{name} has {ctypes.sizeof(structure)} bytes in Python and {sizes.get(name)} in the kernels."
            )


class Library:
    """The kernels of a library file, by name and dtype.

    The constructor raises OSError if the file cannot be loaded, and RuntimeError if the size of a structure differs
    from its size in Python.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self.run = self._library.run  # run(pool, nodes, count, step), without the GIL
        self.run.argtypes = (c_void_p, c_void_p, c_int64, c_void_p)
        self.run.restype = None
        self.open_pool = self._library.open_pool  # open_pool(num_threads) -> pool
        self.open_pool.argtypes, self.open_pool.restype = (c_int64,), c_void_p
        self.close_pool = self._library.close_pool
        self.close_pool.argtypes, self.close_pool.restype = (c_void_p,), None
        check_sizes((_Size * (len(STRUCTURES) + 1)).in_dll(self._library, "STRUCTURE_SIZES"))
        self.panel_width = int(self._library.panel_width())
        # 8-bit products pad rows of inputs to a multiple of this number of bytes.
        self.byte_step = int(self._library.byte_step())
        self.max_byte_depth = int(self._library.max_byte_depth())
        self._library.instruction_set.restype = c_char_p
        self._library.uses_matrix_unit.restype = c_bool
        self.instruction_set: str = self._library.instruction_set().decode()
        self.uses_matrix_unit: bool = self._library.uses_matrix_unit()
        self._addresses: dict[tuple[str, torch.dtype], int] = {}

    def kernel(self, name: str, dtype: torch.dtype) -> int:
        """Return the address of a kernel for tensors of `dtype`. Raises KeyError for an unsupported dtype."""
        key = (name, dtype)
        if key not in self._addresses:
            function = getattr(self._library, f"{name}_{TYPES[dtype]}")
            self._addresses[key] = ctypes.cast(function, c_void_p).value or 0
        return self._addresses[key]

    def name_of(self, kernel: int) -> str:
        """Return the name of the kernel at this address, which must come from `kernel`."""
        return next(name for (name, _), known in self._addresses.items() if known == kernel)


def load(
    compiler: str, processor: Collection[str], flags: Sequence[str] = FLAGS, lifeline: Lifeline | None = None
) -> Library:
    """Return the library for a processor with the CPU flags `processor`, and the compiler flags `flags`.

    Compiles the library if the cache has none that loads. Raises `BuildError` if the library cannot be compiled or
    loaded, and `BuildStopped` after `lifeline` is cut.
    """
    path = build(compiler, processor, flags, lifeline)
    try:
        return Library(path)
    except OSError:
        path.unlink(missing_ok=True)
    try:
        return Library(build(compiler, processor, flags, lifeline))
    except OSError as error:  # for example on a file system mounted noexec
        raise BuildError(f"Cannot load the library that {compiler} compiled: {error}.") from error


def load_prebuilt(machine: str, cpu_flags: Collection[str]) -> Library | None:
    """Return the package's precompiled library for this processor, or None if there is none or it does not load."""
    path = prebuilt.find(machine, cpu_flags)
    try:
        return Library(path) if path else None
    except OSError as error:  # for example on a file system mounted noexec
        logger.warning("Cannot load the compiled kernels of the package: %s", error)
        return None


def cache_type(pool: Tensor, dtype: torch.dtype) -> int | None:
    """Return the code of the pool's dtype for kernels in `dtype` (0: `dtype`), or None if they cannot read the pool."""
    return 0 if pool.dtype == dtype else CACHE_TYPES.get(pool.dtype)


def address(tensor: Tensor | None) -> int | None:
    """Return the address of the tensor's first element, or None (a null pointer) if there is no tensor."""
    return None if tensor is None else tensor.data_ptr()


def contiguous_tokens(x: Tensor) -> Tensor:
    """Return x [T, D] or [T, H, D] such that each token's elements are contiguous. Copies x if necessary."""
    if x.stride(-1) == 1 and (x.dim() < 3 or x.stride(1) == x.shape[2]):
        return x
    return x.contiguous()
