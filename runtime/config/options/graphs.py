"""Options about captured and compiled steps: CUDA graphs and torch.compile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from runtime.config.option_spec import OptionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphArgs:
    """CUDA graphs and compilation."""

    disable_cuda_graph: Annotated[
        bool, OptionSpec("Capture no CUDA graphs: every step is launched operation by operation.")
    ] = False
    cuda_graph_max_bs: Annotated[
        int | None,
        OptionSpec(
            "Largest batch size for which a CUDA graph is captured. Default: by the GPU's memory, from 8 to 512.",
            low=1,
            plan="graphs.sizes",
        ),
    ] = None
    cuda_graph_bs: Annotated[
        tuple[int, ...] | None,
        OptionSpec(
            "Batch sizes for which CUDA graphs are captured. Default: 1, 2, 4, 8 and steps of 8 or 16 above "
            "them. Graphs are captured while the engine already answers, largest first.",
            low=1,
            plan="graphs.sizes",
        ),
    ] = None
    disable_cuda_graph_padding: Annotated[
        bool,
        OptionSpec(
            "Replay a CUDA graph only for exactly its batch size, instead of filling a batch up to the next "
            "one. By default all sizes up to 32 are captured then.",
            plan="graphs.padding",
        ),
    ] = False
    enable_profile_cuda_graph: Annotated[
        bool, OptionSpec("Log a profile of each capture of a CUDA graph.", plan="graphs.profile")
    ] = False
    enable_cudagraph_gc: Annotated[
        bool,
        OptionSpec(
            "Let Python's garbage collector run while CUDA graphs are captured.",
            plan="graphs.collect_garbage",
        ),
    ] = False
    enable_torch_compile: Annotated[
        bool,
        OptionSpec(
            "Compile the layers with torch.compile for batches of up to --torch-compile-max-bs rows of one "
            "token. The start takes minutes longer. Needs a C++ compiler on a CPU, triton on a GPU.",
            plan="graphs.compile_max_rows",
        ),
    ] = False
    torch_compile_max_bs: Annotated[
        int, OptionSpec("Largest batch size that is compiled.", low=1, plan="graphs.compile_max_rows")
    ] = 32
