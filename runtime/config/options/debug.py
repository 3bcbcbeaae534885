"""Options for finding mistakes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from runtime.config.option_spec import inert, planned


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugArgs:
    """Finding mistakes."""

    crash_dump_folder: Annotated[
        str | None, planned("Folder for a record of the last requests when the server fails.")
    ] = None
    debug_tensor_dump_output_folder: Annotated[
        str | None, planned("Folder into which the logits of every step are written.")
    ] = None
    debug_tensor_dump_input_file: Annotated[
        str | None, planned("NumPy file with token ids that are run once at the start; then the server ends.")
    ] = None
    debug_tensor_dump_inject: Annotated[
        str | None, planned("Folder with written tensors that replace the computed ones.")
    ] = None
    debug_tensor_dump_prefill_only: Annotated[
        bool,
        inert("Write tensors of prompts only.", because="nothing reads it where it comes from either"),
    ] = False
