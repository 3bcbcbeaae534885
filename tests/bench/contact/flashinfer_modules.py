"""`flashinfer-modules`: compile the FlashInfer modules that Penstock calls, without a GPU.

This proves that the modules exist in the installed flashinfer, and that its sources compile with the installed nvcc.
Objects are compiled, but neither linked nor loaded. A module takes one to ten minutes, and up to 6 GiB of memory.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench import PROGRAM
from ops.machine import Machine
from runtime.errors import ConfigurationError
from serve.bench import report
from serve.bench.options import new_parser

ARCHITECTURE = "9.0a"  # in FlashInfer's notation: Hopper
WHEELS = "nvidia-cuda-nvcc, nvidia-cuda-cccl, nvidia-cuda-crt, nvidia-cuda-runtime, nvidia-nvvm and nvidia-curand"
CUBLAS = ("cublasLt.h", "nvrtc.h")
HEADERS = {"products": CUBLAS, "experts": CUBLAS}  # module -> headers that it needs and the packages in `WHEELS` lack
# Module -> the only objects of the module that are compiled, because all of them would take hours. Here: the calls, the
# layout, and kernels for bfloat16 and MXFP4.
OBJECTS = {
    "experts": (
        "fused_moe_binding",
        "moe_gemm_mixed_utils",
        "moe_gemm_kernels_bf16_bf16",
        "moe_gemm_kernels_bf16_fp4",
        "moe_gemm_tma_warp_specialized_input",
        "sm90_M64_Mixed_group0.generated",
    ),
}
PACKAGES = {"flashinfer": "flashinfer-python", "tvm_ffi": "apache-tvm-ffi"}  # module -> package


def _attention() -> Any:
    return import_module("flashinfer.jit.attention.modules")


def _types() -> tuple[Any, ...]:
    import torch

    return torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.int32


MODULES: Mapping[str, Callable[[], Any]] = {
    "decode": lambda: _attention().gen_batch_decode_module(*_types(), 128, 128, 0, False, False),
    "decode-tensor-cores": lambda: _attention().gen_batch_prefill_module(
        "fa2", *_types(), 128, 128, 0, False, False, False
    ),
    "prefill-fa3": lambda: _attention().gen_batch_prefill_module("fa3", *_types(), 128, 128, 0, False, False, False),
    "latent-fa2": lambda: _attention().gen_batch_mla_module("fa2", *_types(), 512, 64, False),
    "latent-fa3": lambda: _attention().gen_batch_mla_module("fa3", *_types(), 512, 64, False),
    "products": lambda: import_module("flashinfer.jit.gemm").gen_fp8_blockscale_gemm_sm90_module(),
    "experts": lambda: import_module("flashinfer.jit.fused_moe").gen_cutlass_fused_moe_sm90_module(),
}


def parser() -> argparse.ArgumentParser:
    options = new_parser(
        "flashinfer-modules", "Compile FlashInfer's modules for Hopper. Needs nvcc, but no GPU.", program=PROGRAM
    )
    options.add_argument("modules", nargs="*", metavar="MODULE", help=f"default: all of {', '.join(MODULES)}")
    options.add_argument("--jobs", type=int, default=1, help="number of files that are compiled at a time")
    return options


def missing(home: Path | None, modules: Sequence[str]) -> list[str]:
    """Return what this machine lacks to compile the modules, as ends of the sentence "This needs ..."."""
    found = [f"the package {package}" for name, package in PACKAGES.items() if find_spec(name) is None]
    if home is None:
        found.append(f"nvcc (set CUDA_HOME to a CUDA toolkit, or install the packages {WHEELS})")
    folders = () if home is None else (home / "include", home / "targets" / "x86_64-linux" / "include")
    for name in modules:
        absent = [each for each in HEADERS.get(name, ()) if not any((folder / each).is_file() for folder in folders)]
        if home is not None and absent:
            found.append(
                f"{' and '.join(absent)} in {home} for {name} (the packages nvidia-cublas and nvidia-cuda-nvrtc, or "
                f"CUDA_HOME with a whole toolkit)"
            )
    if shutil.which("ninja") is None:
        found.append("the program ninja (the package ninja)")
    return found


def cuda_home() -> Path | None:
    """Return the folder of a CUDA toolkit with nvcc: an installed toolkit, or one from NVIDIA's packages."""
    compiler = Machine.probe().cuda_compiler
    if compiler is not None:
        return Path(compiler).parent.parent
    return next((nvcc.parent.parent for each in sys.path for nvcc in Path(each).glob("nvidia/cu*/bin/nvcc")), None)


def compile_module(name: str, jobs: int) -> tuple[int, str]:
    """Compile the objects of a module, or those in `OBJECTS`. Return (ninja's exit status, the end of its output)."""
    module = MODULES[name]()
    module.write_ninja()
    objects = re.findall(r"^build (\S+\.o):", Path(module.ninja_path).read_text(encoding="utf-8"), re.MULTILINE)
    if chosen := OBJECTS.get(name):
        objects = [each for each in objects if any(part in each for part in chosen)]
        if len(objects) < len(chosen):
            return 1, f"The module has only {', '.join(objects)}."
    command = ["ninja", "-C", str(module.build_dir), "-f", str(module.ninja_path), "-j", str(jobs), *objects]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode if objects else 1, (done.stdout + done.stderr)[-2000:]


def main(argv: Sequence[str]) -> int:
    """Compile the named modules. Return 1 if one does not compile.

    Raises ConfigurationError for an unknown module, and if this machine cannot compile.
    """
    args = parser().parse_args(argv)
    if unknown := set(args.modules) - set(MODULES):
        raise ConfigurationError(f"Unknown module {', '.join(sorted(unknown))}. Modules: {', '.join(MODULES)}.")
    home, modules = cuda_home(), args.modules or list(MODULES)
    if needed := missing(home, modules):
        raise ConfigurationError(f"This needs {'; '.join(needed)}.")
    os.environ |= {"CUDA_HOME": str(home), "FLASHINFER_CUDA_ARCH_LIST": ARCHITECTURE}  # read when it is imported
    failed = 0
    for name in modules:
        began = time.perf_counter()
        status, output = compile_module(name, args.jobs)
        report.say(f"{name}: {'compiled' if status == 0 else 'failed'} in {time.perf_counter() - began:.0f} s")
        if status:
            failed += 1
            report.say(output)
    return 1 if failed else 0
