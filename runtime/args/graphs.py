"""Options about captured and compiled steps: CUDA graphs and torch.compile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from runtime.args.knob import Knob, planned


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphArgs:
    """CUDA graphs and compilation."""

    disable_cuda_graph: Annotated[
        bool, Knob("Capture no CUDA graphs. So far none are captured, so this is always so.")
    ] = False
    cuda_graph_max_bs: Annotated[
        int | None, planned("Largest batch size for which a CUDA graph is captured.", low=1)
    ] = None
    cuda_graph_bs: Annotated[
        tuple[int, ...] | None, planned("Batch sizes for which CUDA graphs are captured.", low=1)
    ] = None
    disable_cuda_graph_padding: Annotated[
        bool, planned("Replay a CUDA graph only for exactly its batch size.")
    ] = False
    enable_profile_cuda_graph: Annotated[bool, planned("Profile the capture of CUDA graphs.")] = False
    enable_cudagraph_gc: Annotated[
        bool, planned("Let Python's garbage collector run while CUDA graphs are captured.")
    ] = False
    enable_torch_compile: Annotated[
        bool, planned("Compile the step for small batches with torch.compile.")
    ] = False
    torch_compile_max_bs: Annotated[int, planned("Largest batch size that is compiled.", low=1)] = 32
