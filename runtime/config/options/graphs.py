"""Options about captured and compiled steps: CUDA graphs and torch.compile."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config.option_spec import option
from runtime.config.plan import GraphPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphArgs:
    """CUDA graphs and compilation."""

    disable_cuda_graph: bool = option(
        False, "Capture no CUDA graphs: every step is launched operation by operation."
    )
    cuda_graph_max_bs: int | None = option(
        None,
        "Largest batch size for which a CUDA graph is captured. Default: by the GPU's memory, from 8 to 512.",
        low=1,
        plan=GraphPlan.sizes,
    )
    cuda_graph_bs: tuple[int, ...] | None = option(
        None,
        "Batch sizes for which CUDA graphs are captured. Default: 1, 2, 4, 8 and steps of 8 or 16 above "
        "them. Graphs are captured while the engine already answers, largest first.",
        low=1,
        plan=GraphPlan.sizes,
    )
    disable_cuda_graph_padding: bool = option(
        False,
        "Replay a CUDA graph only for exactly its batch size, instead of filling a batch up to the next one. "
        "By default all sizes up to 32 are captured then.",
        plan=GraphPlan.padding,
        says="the opposite",
    )
    enable_profile_cuda_graph: bool = option(
        False, "Log a profile of each capture of a CUDA graph.", plan=GraphPlan.profile
    )
    enable_cudagraph_gc: bool = option(
        False,
        "Let Python's garbage collector run while CUDA graphs are captured.",
        plan=GraphPlan.collect_garbage,
    )
    enable_torch_compile: bool = option(
        False,
        "Compile the layers with torch.compile for batches of up to --torch-compile-max-bs rows of one "
        "token. The start takes minutes longer. Needs a C++ compiler on a CPU, triton on a GPU.",
        plan=GraphPlan.compile_max_rows,
    )
    torch_compile_max_bs: int = option(
        32, "Largest batch size that is compiled.", low=1, plan=GraphPlan.compile_max_rows
    )
