"""The backends that users can name: which file implements each, and what it needs of a machine.

Torch is not imported here, so that a choice can be explained without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ops.machine import Gpu, Machine

TRITON_CAPABILITY = (8, 0)

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


def _triton(machine: Machine, gpu: Gpu | None) -> str:
    major, minor = TRITON_CAPABILITY
    needed = f"needs an NVIDIA GPU of compute capability {major}.{minor} or newer"
    if gpu is None:
        return f"{needed}, and this model runs on the CPU"
    if gpu.capability < TRITON_CAPABILITY:
        return f"{needed}, and {gpu.name} has {gpu.capability[0]}.{gpu.capability[1]}"
    if "triton" not in machine.packages:
        return "needs the triton package, which is not installed (pip install 'penstock[cuda]')"
    return ""


# In the order in which they are tried where nobody says which.
ATTENTION: Mapping[str, Backend] = {
    "triton": Backend("with_triton", _triton),
    "torch_native": Backend("native", _nothing),
}
SAMPLING: Mapping[str, Backend] = {
    "pytorch": Backend("native", _nothing),
    "triton": Backend("with_triton", _triton),
}
# Operations that users do not choose for: the first backend that runs.
SMALL_OPERATIONS = ("activation", "kv", "norm", "rope")
SMALL: Mapping[str, Backend] = ATTENTION


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
