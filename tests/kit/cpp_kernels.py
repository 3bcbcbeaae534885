"""The kernels in C++ as tests call them; what needs them is skipped where they cannot be compiled."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ops.cpp.build import BuildError, build
from ops.cpp.executor import Executor
from ops.cpp.library import Library
from ops.machine import Machine

DTYPES = (torch.float32, torch.bfloat16)
THREADS = (1, 2)


@cache
def library() -> Library:
    """For this processor, from the user's cache where it is there."""
    machine = Machine.probe()
    if machine.compiler is None:
        pytest.skip("there is no C++ compiler")
    try:
        return Library(build(machine.compiler, machine.cpu_flags))
    except BuildError as error:
        pytest.skip(f"the kernels in C++ cannot be compiled: {error}")


@cache
def executor(num_threads: int = 1) -> Executor:
    """One for the whole session."""
    return Executor(library(), num_threads)


def backend(operation: str, num_threads: int = 1, **options: Any) -> Any:
    """The callables of an operation in C++, as attributes: like a backend's file."""
    make = import_module(f"ops.{operation}.with_cpp").make
    return SimpleNamespace(**make(executor(num_threads), **options))


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal numbers, the same for the same shape and seed."""
    generator = torch.Generator().manual_seed(seed + 1000 * sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)
