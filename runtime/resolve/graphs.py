"""The section of the plan about captured and compiled steps."""

from __future__ import annotations

from ops.machine import Gpu, Machine
from runtime.execute.graphs import Buckets, buckets
from runtime.plan import GraphPlan
from runtime.resolve.ledger import Ledger

_CAPTURING = (
    "cuda_graph_max_bs",
    "cuda_graph_bs",
    "disable_cuda_graph_padding",
    "enable_profile_cuda_graph",
    "enable_cudagraph_gc",
)
# What captures: it reads the rows' lengths on the device.
CAPTURED_ATTENTION = "triton"
SPLIT_TILE = "triton_attention_split_tile_size"


def graph_plan(
    ledger: Ledger, machine: Machine, gpu: Gpu | None, decode_attention: str, max_running: int
) -> GraphPlan:
    args = ledger.args.graphs
    sizes = _sizes(ledger, gpu, decode_attention, max_running)
    return GraphPlan(
        sizes=sizes,
        padding=ledger.take(
            "graphs.padding", "disable_cuda_graph_padding", not args.disable_cuda_graph_padding
        ),
        profile=ledger.take("graphs.profile", "enable_profile_cuda_graph"),
        collect_garbage=ledger.take("graphs.collect_garbage", "enable_cudagraph_gc"),
        compile_max_rows=_compiled(ledger, machine, gpu),
    )


def _sizes(ledger: Ledger, gpu: Gpu | None, decode_attention: str, max_running: int) -> tuple[int, ...]:
    place, args = "graphs.sizes", ledger.args.graphs
    if args.disable_cuda_graph:
        _refuse_idle(ledger, "--disable-cuda-graph is said too")
        return ledger.decide(place, (), "as asked")
    reason = _none_here(ledger, gpu, decode_attention)
    if gpu is None or reason:
        _refuse_idle(ledger, reason)
        return ledger.decide(place, (), reason)
    captured = buckets(
        gpu.memory_bytes,
        max_running,
        sizes=args.cuda_graph_bs,
        largest=args.cuda_graph_max_bs,
        padding=not args.disable_cuda_graph_padding,
    )
    asked = args.cuda_graph_bs or args.cuda_graph_max_bs
    why = "as asked" if asked else f"by the GPU's {gpu.memory_bytes >> 30} GiB of memory"
    return ledger.decide(place, captured.sizes, f"{why}, and at most {max_running} rows run together")


def _none_here(ledger: Ledger, gpu: Gpu | None, decode_attention: str) -> str:
    """Why no graph can be captured; empty if some can."""
    parallel = ledger.args.parallel
    if gpu is None:
        return "CUDA graphs need an NVIDIA GPU, and this model runs on the CPU"
    if parallel.tp_size * parallel.pp_size > 1:
        return "CUDA graphs are captured on one rank only so far"
    if decode_attention != CAPTURED_ATTENTION:
        return (
            f"attention by {decode_attention} reads the lengths of rows on the host, so that no CUDA graph "
            f"can hold it; {CAPTURED_ATTENTION} does not"
        )
    if ledger.args.get(SPLIT_TILE) is not None:
        return f"with --{SPLIT_TILE.replace('_', '-')} the longest row decides what is launched"
    return ""


def _refuse_idle(ledger: Ledger, reason: str) -> None:
    """What only captures read must not be said in vain."""
    for option in _CAPTURING:
        if option in ledger.args.said and ledger.args.get(option):
            flag = "--" + option.replace("_", "-")
            ledger.refuse(option, f"{flag} has no effect here: {reason}.")


def _compiled(ledger: Ledger, machine: Machine, gpu: Gpu | None) -> int:
    """Rows of one token that are compiled for, at most; 0: nothing is."""
    place, args, parallel = "graphs.compile_max_rows", ledger.args.graphs, ledger.args.parallel
    if not args.enable_torch_compile:
        if "torch_compile_max_bs" in ledger.args.said:
            ledger.refuse(
                "torch_compile_max_bs",
                "--torch-compile-max-bs has a meaning only with --enable-torch-compile.",
            )
        return ledger.decide(place, 0, "not asked for")
    needed = ""
    if parallel.tp_size * parallel.pp_size > 1:
        needed = "compiles for one rank only so far"
    elif gpu is None and machine.compiler is None:
        needed = "needs a C++ compiler, and there is none here"
    elif gpu is not None and "triton" not in machine.packages:
        needed = "needs the package triton, which is not installed"
    if needed:
        ledger.refuse("enable_torch_compile", f"--enable-torch-compile {needed}; leave it out.")
        return ledger.decide(place, 0, needed)
    return ledger.decide(place, args.torch_compile_max_bs, "as asked")


def within(plan: GraphPlan, max_running: int) -> Buckets:
    """The sizes to capture, now that it is known how many sequences the KV pool lets run together."""
    sizes = {min(size, max_running) for size in plan.sizes}
    return Buckets(tuple(sorted(sizes)), plan.padding)
