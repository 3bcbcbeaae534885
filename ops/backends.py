"""The backends that users can name: which file implements each, and what it needs of a machine.

Torch is not imported here, so that a choice can be explained without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ops.machine import Gpu, Machine

CAPABILITY = (8, 0)  # of the GPUs that our kernels are compiled for
GENERATIONS = {9: "Hopper", 10: "Blackwell"}  # major number of the capability -> what it is called

Needs = Callable[[Machine, Gpu | None], str]


@dataclass(frozen=True, slots=True)
class Backend:
    """One implementation as users call it.

    `unmet` takes a machine and the GPU that the model runs on (None: the CPU) and says what is missing to run
    there, as the end of a sentence that begins with the backend's name; empty if nothing is.
    """

    file: str  # the role of its file in the operation's folder
    unmet: Needs


def _nothing(machine: Machine, gpu: Gpu | None) -> str:
    return ""


def _gpu_package(package: str, *, generation: int | None = None) -> Needs:
    """A GPU that is new enough, or of one generation (the major number of its capability), and a package."""
    major, minor = CAPABILITY
    needed = f"needs an NVIDIA GPU of compute capability {major}.{minor} or newer"
    if generation is not None:
        needed = f"needs an NVIDIA {GENERATIONS[generation]} GPU (compute capability {generation}.x)"

    def unmet(machine: Machine, gpu: Gpu | None) -> str:
        if gpu is None:
            return f"{needed}, and this model runs on the CPU"
        if gpu.capability < CAPABILITY or generation not in (None, gpu.capability[0]):
            return f"{needed}, and {gpu.name} has {gpu.capability[0]}.{gpu.capability[1]}"
        if package not in machine.packages:
            return f"needs the package {package}, which is not installed (pip install 'penstock[cuda]')"
        return ""

    return unmet


# In the order in which they are tried where nobody says which.
ATTENTION: Mapping[str, Backend] = {
    "triton": Backend("with_triton", _gpu_package("triton")),
    "torch_native": Backend("native", _nothing),
    "flashinfer": Backend("with_flashinfer", _gpu_package("flashinfer-python")),
    "fa3": Backend("with_fa3", _gpu_package("flashinfer-python", generation=9)),
    "trtllm_mha": Backend("with_trtllm", _gpu_package("flashinfer-python", generation=10)),
}
SAMPLING: Mapping[str, Backend] = {
    "pytorch": Backend("native", _nothing),
    "triton": Backend("with_triton", _gpu_package("triton")),
}
# Operations that users do not choose for: the first backend that runs.
SMALL_OPERATIONS = ("activation", "kv", "norm", "rope")
GPU_OPERATIONS = ("embedding", "moe")  # likewise on a GPU; on a CPU plain torch, or C++ for the former
SMALL: Mapping[str, Backend] = {name: ATTENTION[name] for name in ("triton", "torch_native")}
# What FlashInfer computes, of what models have, in all of its backends.
FLASHINFER = ("flashinfer", "fa3", "trtllm_mha")
FLASHINFER_HEAD_DIMS = (64, 128, 256)
FLASHINFER_DTYPES = ("float16", "bfloat16")
SAME_DTYPE_CACHE = ("fa3", "trtllm_mha")  # these read no cache of another dtype than the query's
TRTLLM_PAGE_SIZES = (16, 32, 64)


def first_that_runs(
    backends: Mapping[str, Backend], machine: Machine, gpu: Gpu | None
) -> tuple[str, dict[str, str]]:
    """The name of the first backend that this machine runs, and of those before it what each lacks."""
    lacking: dict[str, str] = {}
    for name, backend in backends.items():
        if not (reason := backend.unmet(machine, gpu)):
            return name, lacking
        lacking[name] = reason
    raise LookupError("every operation has a backend that runs anywhere")
