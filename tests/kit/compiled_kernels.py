"""Compiles Triton kernels for GPUs that are not here, from the calls that would launch them, and inspects the code."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

# A driver that only knows its target takes the place of CUDA's, and every launch compiles instead: with the types,
# alignments and launch options of that very call.
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # that one block may use


class Compiled(NamedTuple):
    """One kernel as ptxas made it."""

    name: str
    registers: int  # per thread
    spilled_bytes: int  # of stack, per thread
    shared_bytes: int  # per block


class TargetOnly:
    """As much of a Triton driver as a compilation asks for."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def is_active(self) -> bool:
        return True

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability  # Triton keeps what it compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, name: str) -> str:
        return name


class Launches(list[Any]):
    """Compiled kernels, in the order of their launches."""

    def __init__(self) -> None:
        super().__init__()
        self.grids: list[tuple[int, ...]] = []  # number of programs of each launch, on each axis of its grid


@contextmanager
def compiling_for(capability: int) -> Iterator[Launches]:
    """Within, a Triton launch compiles for this compute capability (90 for 9.0) and is added to the list."""
    import triton
    from triton.runtime.jit import JITFunction

    launch: Callable[..., Any] = JITFunction.run
    kernels = Launches()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernels.append(launch(self, *args, grid=grid, warmup=True, **kwargs))
        kernels.grids.append(grid if isinstance(grid, tuple) else ())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", compile_only)
        patch.setattr(triton.runtime.driver, "_active", TargetOnly(capability))
        patch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # its default is going to change
        yield kernels


def inspect(kernel: Any, folder: Path) -> Compiled:
    """Resources of a compiled kernel. Raises ValueError if there is no machine code in it."""
    import triton

    if not kernel.asm.get("cubin"):
        raise ValueError(f"no code was made for {kernel.metadata.name}")
    path = folder / "kernel.cubin"
    path.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    done = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True)
    usage = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout)
    if usage is None:
        raise ValueError(f"cuobjdump says nothing of {kernel.metadata.name}: {done.stdout}")
    return Compiled(kernel.metadata.name, int(usage[1]), int(usage[2]), kernel.metadata.shared)


def machine_code(kernel: Any, folder: Path) -> list[str]:
    """Return the instructions of a compiled kernel (SASS), one per line, without labels."""
    return re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", machine_text(kernel, folder), re.MULTILINE)


def machine_text(kernel: Any, folder: Path) -> str:
    """Return the disassembly of a compiled kernel, with labels."""
    import triton

    path = folder / "kernel.cubin"
    path.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    return subprocess.run([tool, "-c", path], capture_output=True, text=True, check=True).stdout


def buffers(kernel: Any, shape: str) -> int:
    """Return the smallest number of buffers that a loop of the kernel has for tiles of this shape ("64x128xbf16").

    With one buffer, the load of the next tile waits for the product of this one.
    """
    found = re.findall(rf"local_alloc.*memdesc<(\d+)x{shape},", kernel.asm["ttgir"])
    return min(map(int, found), default=0)
