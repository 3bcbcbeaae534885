"""The options of a profile of running steps, and the path of its file."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import InvalidRequest

MAX_STEPS = 1000  # maximum number of steps in a profile; each operation takes some hundred bytes of memory
MAX_FOLDER_BYTES = 4 * 1024**3
FOLDER_VARIABLES = ("PENSTOCK_PROFILE_DIR", "SGLANG_TORCH_PROFILER_DIR", "VLLM_TORCH_PROFILER_DIR")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """The options of one profile. It ends automatically after `num_steps` steps."""

    path: Path  # path of the trace; no such file may exist
    num_steps: int = MAX_STEPS
    cpu: bool = True
    gpu: bool = True  # whether to record GPU kernels, if there is a GPU
    with_stack: bool = False  # whether to record the Python stack of each operation, which is slow
    record_shapes: bool = False
    memory: bool = False


def profile_path(output_dir: str | None, prefix: str | None, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the path of a new trace, in the server's folder of profiles or in its subfolder `output_dir`.

    Creates the folder. Raises `InvalidRequest` if it is outside the server's folder, or if profiles take too much disk
    space.
    """
    named = next((environment[name] for name in FOLDER_VARIABLES if environment.get(name)), None)
    base = Path(named or Path(tempfile.gettempdir()) / "penstock-profiles").resolve()
    try:
        folder = (base / (output_dir or "")).resolve()
    except ValueError:  # the name contains a NUL character
        folder = Path()
    if not folder.is_relative_to(base):
        raise InvalidRequest(
            f"output_dir must lie in the server's folder of profiles, which {FOLDER_VARIABLES[0]} sets.",
            param="output_dir",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        size = sum(file.stat().st_size for file in base.rglob("*.trace.json.gz"))
    except OSError as error:
        raise InvalidRequest(f"The folder cannot be used: {error.strerror}.", param="output_dir") from None
    if size > MAX_FOLDER_BYTES:
        raise InvalidRequest(
            f"The server's profiles take {size} bytes; delete some before the next one.", param="output_dir"
        )
    return folder / f"{prefix + '-' if prefix else ''}{time.time():.3f}-TP-0.trace.json.gz"
