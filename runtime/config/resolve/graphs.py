"""The graph section of the plan: captured and compiled steps."""

from __future__ import annotations

from ops.backends import ATTENTION
from ops.machine import Gpu, Machine
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import GraphPlan
from runtime.config.resolve.graph_sizes import Buckets, buckets, launch_bound_tokens, prompt_sizes
from runtime.config.resolve.plan_builder import Decision, PlanBuilder

_CAPTURING = (
    "cuda_graph_max_bs",
    "cuda_graph_bs",
    "disable_cuda_graph_padding",
    "enable_profile_cuda_graph",
    "enable_cudagraph_gc",
)
_CAPTURING_PROMPTS = ("piecewise_cuda_graph_max_tokens", "piecewise_cuda_graph_tokens")
# Most tokens of a step with prompts that is captured by default. Larger steps take longer to compute than to launch.
_MAX_PROMPT_TOKENS = 2048
_UNKNOWN_TOKENS = 256  # the same limit if the model's number of weights is unknown


def graph_plan(
    builder: PlanBuilder,
    machine: Machine,
    gpu: Gpu | None,
    decode_attention: str,
    max_running: int,
    facts: ModelFacts,
    *,
    step_tokens: int,
    by_transformers: bool = False,
    is_embedding: bool = False,
) -> GraphPlan:
    """Plan CUDA graphs and torch.compile. A step has at most `step_tokens` tokens.

    A model `by_transformers` has no graphs, because its modules may read tensors on the host. A model with recurrent
    layers cannot be compiled, because outside of captured steps these layers read each row's token range on the host.
    """
    foreign = (
        "transformers' modules compute this model, and their code may not allow a capture" if by_transformers else ""
    )
    if is_embedding:
        foreign = "graphs are captured for decode steps only, and this model generates no tokens"
    uncompiled = "recurrent layers read the state slots of the rows on the host" if facts.recurrent else foreign
    sizes = _sizes(builder, gpu, decode_attention, max_running, foreign)
    return builder.build(
        GraphPlan,
        sizes=sizes,
        prompt_sizes=_prompt_sizes(builder, gpu, facts, sizes, step_tokens),
        compile_max_rows=_compiled(builder, machine, gpu, uncompiled),
    )


def _sizes(
    builder: PlanBuilder, gpu: Gpu | None, decode_attention: str, max_running: int, foreign: str
) -> Decision[tuple[int, ...]]:
    args = builder.args.graphs
    if args.disable_cuda_graph:
        _refuse_idle(builder, "--disable-cuda-graph is set too")
        return Decision((), "as asked")
    if builder.args.offload.enable_memory_saver and gpu is not None:
        reason = "--enable-memory-saver: graphs would hold the addresses of memory that is given back"
        _refuse_idle(builder, reason)
        return Decision((), reason)
    if builder.args.debug.debug_tensor_dump_output_folder is not None:
        foreign = "--debug-tensor-dump-output-folder reads the outputs of layers"
    reason = foreign or _none_here(builder, gpu, decode_attention)
    if gpu is None or reason:
        _refuse_idle(builder, reason)
        return Decision((), reason)
    captured = buckets(
        gpu.memory_bytes,
        max_running,
        sizes=args.cuda_graph_bs,
        largest=args.cuda_graph_max_bs,
        padding=not args.disable_cuda_graph_padding,
    )
    asked = args.cuda_graph_bs or args.cuda_graph_max_bs
    reason = "as asked" if asked else f"by the GPU's {gpu.memory_bytes >> 30} GiB of memory"
    return Decision(captured.sizes, f"{reason}, and at most {max_running} rows or draft tokens run together")


def _prompt_sizes(
    builder: PlanBuilder,
    gpu: Gpu | None,
    facts: ModelFacts,
    sizes: Decision[tuple[int, ...]],
    step_tokens: int,
) -> Decision[tuple[int, ...]]:
    """Decide for which numbers of tokens steps with prompts are captured."""
    args, reason = builder.args.graphs, ""
    if gpu is None or not sizes.value:
        reason = f"no CUDA graphs are captured: {sizes.reason}"
    elif args.disable_piecewise_cuda_graph:
        reason = "--disable-piecewise-cuda-graph is set"
    elif builder.args.offload.cpu_offload_gb or builder.args.offload.offload_group_size > 0:
        reason = "copies of weights from host memory would cross from one graph to the next"
    if gpu is None or reason:
        for option in _CAPTURING_PROMPTS:
            if builder.args.changed(option):
                flag = "--" + option.replace("_", "-")
                builder.refuse(option, f"{flag} has no effect here: {reason}.")
        return Decision((), reason)
    asked, largest = args.piecewise_cuda_graph_tokens, args.piecewise_cuda_graph_max_tokens
    if asked is not None:
        kept = {size for size in asked if size <= min(largest or step_tokens, step_tokens)}
        return Decision(tuple(sorted(kept)), f"as asked, and a step has at most {step_tokens} tokens")
    if largest is not None:
        return Decision(prompt_sizes(min(largest, step_tokens)), "as asked")
    estimate, reason = _UNKNOWN_TOKENS, "the size of the model is not known"
    if facts.weight_bytes:
        weights = _weights_per_token(facts) / builder.args.parallel.tp_size
        estimate = launch_bound_tokens(gpu.capability, facts.num_layers, weights)
        reason = "up to this number, launching a step is estimated to take longer than computing it"
    largest = min(max(estimate, prompt_sizes(1)[0]), _MAX_PROMPT_TOKENS, step_tokens)
    fitting = tuple(size for size in prompt_sizes(min(step_tokens, _MAX_PROMPT_TOKENS)) if size <= largest)
    return Decision(fitting, reason)


def _weights_per_token(facts: ModelFacts) -> float:
    """Estimate the number of weights that each token is multiplied with.

    A twentieth of the weights of a mixture is assumed to be outside of the experts.
    """
    weights = facts.weight_bytes / (2 if facts.quantization is None else 1)
    if not facts.num_experts:
        return weights
    return weights * (0.05 + 0.95 * min(1.0, facts.num_experts_per_token / facts.num_experts))


def _none_here(builder: PlanBuilder, gpu: Gpu | None, decode_attention: str) -> str:
    """Return the reason why no graph can be captured, or ""."""
    parallel = builder.args.parallel
    if gpu is None:
        return "CUDA graphs need an NVIDIA GPU, and this model runs on the CPU"
    if parallel.pp_size > 1:
        return "no CUDA graphs are captured with pipeline parallelism (--pp-size)"
    if parallel.enable_two_batch_overlap:
        return "the halves of --enable-two-batch-overlap have different numbers of rows in a step"
    if parallel.enable_dp_attention:
        return "the groups of --enable-dp-attention have different numbers of rows in a step"
    backend = ATTENTION[decode_attention]
    if not backend.captured:
        others = " or ".join(name for name, other in ATTENTION.items() if other.captured)
        return (
            f"the attention backend {decode_attention} reads the lengths of rows on the host and cannot be captured; "
            f"{others} can"
        )
    for option, reason in backend.uncaptured_with.items():
        if builder.args.changed(option):
            return f"with --{option.replace('_', '-')} {reason}"
    return ""


def _refuse_idle(builder: PlanBuilder, reason: str) -> None:
    """Refuse the options of graph capture, because nothing is captured."""
    for option in _CAPTURING:
        if builder.args.changed(option):
            flag = "--" + option.replace("_", "-")
            builder.refuse(option, f"{flag} has no effect here: {reason}.")


def _compiled(builder: PlanBuilder, machine: Machine, gpu: Gpu | None, foreign: str) -> Decision[int]:
    """Decide the largest decode batch for torch.compile. 0: compile nothing."""
    args, parallel = builder.args.graphs, builder.args.parallel
    if not args.enable_torch_compile:
        if builder.args.changed("torch_compile_max_bs"):
            builder.refuse(
                "torch_compile_max_bs",
                "--torch-compile-max-bs has no effect without --enable-torch-compile.",
            )
        return Decision(0, "--enable-torch-compile is not set")
    needed = ""
    if foreign:
        needed = f"does not support this model: {foreign}"
    elif parallel.tp_size * parallel.pp_size > 1:
        needed = "supports one rank only so far"
    elif gpu is None and machine.compiler is None:
        needed = "needs a C++ compiler, which is not installed"
    elif gpu is not None and "triton" not in machine.packages:
        needed = "needs the package triton, which is not installed"
    if needed:
        builder.refuse("enable_torch_compile", f"--enable-torch-compile {needed}; leave it out.")
        return Decision(0, needed)
    return Decision(args.torch_compile_max_bs, "as asked")


def within(plan: GraphPlan, max_running: int) -> Buckets:
    """Return the planned sizes of decode steps. Sizes above `max_running` are replaced by `max_running`.

    `max_running` is the number of sequences that fit into the KV cache plus the maximum number of draft tokens.
    """
    sizes = {min(size, max_running) for size in plan.sizes}
    return Buckets(tuple(sorted(sizes)), plan.padding)


def prompts_of(plan: GraphPlan) -> Buckets:
    """Return the numbers of tokens for which steps with prompts are captured."""
    return Buckets(tuple(plan.prompt_sizes))
