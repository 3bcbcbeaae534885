"""Options about captured and compiled steps: CUDA graphs and torch.compile."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config.option_spec import option


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphArgs:
    """CUDA graphs and compilation."""

    disable_cuda_graph: bool = option(False, "Capture no CUDA graphs: every step runs eagerly.")
    cuda_graph_max_bs: int | None = option(
        None,
        "Largest batch size for which a CUDA graph is captured. Default: 8 to 512, depending on the GPU's memory.",
        low=1,
        plan="graphs.sizes",
    )
    cuda_graph_bs: tuple[int, ...] | None = option(
        None,
        "Batch sizes for which CUDA graphs are captured. Default: 1, 2, 4, 8, then steps of 8 or 16. The engine "
        "captures graphs while it already serves requests, largest first.",
        low=1,
        plan="graphs.sizes",
    )
    disable_cuda_graph_padding: bool = option(
        False,
        "Replay a CUDA graph only for batches of exactly its size, instead of padding batches to the next captured "
        "size. All sizes up to 32 are then captured by default.",
        plan="graphs.padding",
        invert=True,
    )
    disable_piecewise_cuda_graph: bool = option(
        False, "Capture no CUDA graphs of steps with prompts. Such steps are launched kernel by kernel."
    )
    piecewise_cuda_graph_max_tokens: int | None = option(
        None,
        "Largest number of tokens of a step with prompts for which CUDA graphs are captured. Attention is called "
        "between the graphs. Default: the number of tokens, at most 2,048, up to which launching the kernels of a step "
        "is estimated to take longer than computing them.",
        low=1,
        high=65_536,
        plan="graphs.prompt_sizes",
    )
    piecewise_cuda_graph_tokens: tuple[int, ...] | None = option(
        None,
        "Numbers of tokens for which CUDA graphs of steps with prompts are captured. Steps are padded to the next "
        "number. A number is captured after a step needed it or, with several ranks, at the start. Default: steps of 8 "
        "to 256 tokens, by size.",
        low=1,
        high=65_536,
        plan="graphs.prompt_sizes",
    )
    enable_profile_cuda_graph: bool = option(
        False, "Log a profile of each capture of a CUDA graph.", plan="graphs.profile"
    )
    enable_cudagraph_gc: bool = option(
        False,
        "Let Python's garbage collector run while CUDA graphs are captured.",
        plan="graphs.collect_garbage",
    )
    enable_torch_compile: bool = option(
        False,
        "Compile the layers with torch.compile for decode batches of up to --torch-compile-max-bs rows. The start "
        "takes minutes longer. Needs a C++ compiler on a CPU and triton on a GPU.",
        plan="graphs.compile_max_rows",
        zero_is_off=True,
    )
    torch_compile_max_bs: int = option(
        32, "Largest batch size that is compiled.", low=1, plan="graphs.compile_max_rows"
    )
