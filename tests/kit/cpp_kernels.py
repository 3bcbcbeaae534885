"""The C++ kernels for tests: compiled as in an engine, or for processors with fewer instruction sets."""

from __future__ import annotations

import os
import platform
from functools import cache, partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ops.cpp.build import FLAGS
from ops.cpp.kernel_launcher import KernelLauncher
from ops.cpp.library import Library, load
from ops.machine import Machine

NATIVE = "-march=native"
NO_MATRIX_UNIT = (NATIVE, "-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8")
LESSER = {  # instruction sets that a processor may lack
    "no matrix unit": NO_MATRIX_UNIT,
    "no bfloat16 products": (*NO_MATRIX_UNIT, "-mno-avx512bf16"),
    "AVX2": ("-march=x86-64-v3",),
    "SSE2": ("-march=x86-64",),
}
SANITIZER = "PENSTOCK_SANITIZER"  # environment variable with a key of SANITIZERS, which `just sanitize` sets
# Flags of the compiler. `-fexpensive-optimizations` fuses multiplications and additions, which `-O1` alone does not;
# kernels would otherwise round ties differently from the definition in the tests.
_SLOW_AND_CHECKED = ("-O1", "-fexpensive-optimizations", "-g", "-fno-omit-frame-pointer")
SANITIZERS = {
    "address": ("-fsanitize=address", *_SLOW_AND_CHECKED),
    "undefined": ("-fsanitize=undefined", *_SLOW_AND_CHECKED),
    "thread": ("-fsanitize=thread", *_SLOW_AND_CHECKED),
}
# Choices for `ops.select`: all operations in C++.
CHOICES: dict[str, str] = dict.fromkeys(
    (
        "activation",
        "attention",
        "embedding",
        "encoder_attention",
        "kv",
        "latent",
        "low_rank",
        "matmul",
        "moe",
        "norm",
        "recurrence",
        "rope",
        "sampling",
    ),
    "with_cpp",
)
DTYPES = (torch.float32, torch.bfloat16)
THREADS = (1, 2)


@cache
def library(*march: str) -> Library:
    """Return the library for this processor, or compiled with these flags. Skips the test without a compiler."""
    if march and platform.machine() != "x86_64":
        pytest.skip("these flags are for x86")
    if march and SANITIZER in os.environ:
        pytest.skip("compilers fail below the sanitizer's runtime, so only one library is compiled before the tests")
    return load(compiler(), Machine.probe().cpu_flags, flags(*march))


def flags(*march: str) -> tuple[str, ...]:
    """Return the compiler's flags for this processor, or with these flags, and for the sanitizer of the environment."""
    chosen = (*(flag for flag in FLAGS if flag != NATIVE), *march) if march else FLAGS
    return (*chosen, *SANITIZERS.get(os.environ.get(SANITIZER, ""), ()))


def compiler() -> str:
    """Return the C++ compiler of this machine. Skips the test if there is none."""
    found = Machine.probe().compiler
    if found is None:
        pytest.skip("there is no C++ compiler")
    return found


def launcher(num_threads: int = 2, *march: str) -> KernelLauncher:
    """Return a kernel launcher with this number of threads."""
    return KernelLauncher(library(*march), num_threads)


_kept = cache(launcher)


def backend(operation: str, num_threads: int = 1, *march: str, weight_bits: int | None = None) -> Any:
    """Return the callables of an operation in C++ as attributes, like a backend's module. `bits` quantises weights."""
    callables = dict(import_module(f"ops.{operation}.with_cpp").make(_kept(num_threads, *march)))
    if weight_bits is not None:
        callables["prepare"] = partial(callables["prepare"], bits=weight_bits)
    return SimpleNamespace(**callables)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Return normal random numbers, which are equal for equal shape and seed."""
    generator = torch.Generator().manual_seed(seed + 1000 * sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)
