"""If the system refuses the matrix unit to a process, the kernels use AVX-512 instead."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cpp_kernels import library
from ops.machine import Machine

# Installs a system call filter: arch_prctl fails with EPERM from here on; all other calls are allowed.
REFUSED = """
import ctypes, struct
from pathlib import Path
import torch

libc = ctypes.CDLL(None, use_errno=True)
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18
LOAD, IF_EQUAL, RETURN, EPERM, ALLOW = 0x20, 0x15, 0x06, 0x50001, 0x7FFF0000
lines = [(LOAD, 0, 0, 0), (IF_EQUAL, 0, 1, ARCH_PRCTL), (RETURN, 0, 0, EPERM), (RETURN, 0, 0, ALLOW)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(lines), ctypes.addressof(code)))
libc.prctl(38, 1, 0, 0, 0)
if libc.prctl(22, 2, program, 0, 0) or libc.syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA) != -1:
    raise SystemExit(77)

from ops.cpp.kernel_launcher import KernelLauncher
from ops.cpp.library import Library
from ops.matmul import with_cpp

launcher = KernelLauncher(Library(Path(PATH)), 2)
matmul = with_cpp.make(launcher)
x, weight = torch.randn(40, 64).bfloat16(), torch.randn(70, 64).bfloat16()
found, wanted = matmul["logits"](x, matmul["prepare"](weight)), x.double() @ weight.double().T
print(launcher.description.matrix_unit, "refuses" in str(launcher.description))
print((found - wanted).norm().item() / wanted.norm().item())
"""


def test_products_are_right_without_the_unit() -> None:
    machine = Machine.probe()
    if "amx_bf16" not in machine.cpu_flags or machine.compiler is None:
        pytest.skip("there is no matrix unit that could be refused, or no compiler")
    script = REFUSED.replace("PATH", repr(str(library().path)))  # compiled before the filter is installed
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip("this system takes no filter of system calls")
    assert done.returncode == 0, done.stderr
    description, error = done.stdout.splitlines()
    assert description == "False True"
    assert float(error) < 1e-5
