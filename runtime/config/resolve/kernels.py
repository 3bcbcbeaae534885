"""The kernels' section of the plan: which implementation of each operation runs, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ops.backends import (
    ATTENTION,
    FLASHINFER,
    FLASHINFER_DTYPES,
    FLASHINFER_HEAD_DIMS,
    GPU_OPERATIONS,
    SAME_DTYPE_CACHE,
    SAMPLING,
    SMALL,
    SMALL_OPERATIONS,
    TRTLLM_PAGE_SIZES,
    Backend,
    first_that_runs,
)
from ops.machine import Gpu, Machine
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import KernelPlan
from runtime.config.resolve.plan_builder import PlanBuilder

# Flags of an x86 processor, of which it needs one set whole: without them oneDNN refuses the dtype or is slow.
ONEDNN_NEEDS: Mapping[str, Sequence[frozenset[str]]] = {
    "float32": (frozenset({"avx2", "fma"}),),
    "bfloat16": (frozenset({"avx512bw", "avx512dq", "avx512vl"}), frozenset({"avx_ne_convert"})),
}
# What the kernels in C++ are worth it with.
CPP_DTYPES = ("float32", "bfloat16")
CPP_NEEDS = frozenset({"avx2", "fma"})
# What torch.compile fuses better than we do by hand.
FUSED = ("activation", "norm", "rope")
_ATTENTION_OPTIONS = ("attention_backend", "decode_attention_backend", "prefill_attention_backend")
_SPLITTING = ("triton_attention_num_kv_splits", "triton_attention_split_tile_size")


def kernel_plan(
    builder: PlanBuilder, machine: Machine, gpu: Gpu | None, dtype: str, facts: ModelFacts, page_size: int
) -> KernelPlan:
    attention = _chosen(builder, "attention_backend", ATTENTION, machine, gpu)
    decode = _chosen(builder, "decode_attention_backend", ATTENTION, machine, gpu, otherwise=attention)
    prefill = _chosen(builder, "prefill_attention_backend", ATTENTION, machine, gpu, otherwise=attention)
    sampling = _chosen(builder, "sampling_backend", SAMPLING, machine, gpu)
    _refuse_idle_splitting(builder, decode)
    for option, name in zip(_ATTENTION_OPTIONS, (attention, decode, prefill)):
        if name in FLASHINFER and option in builder.args.said:
            _refuse_for_flashinfer(builder, option, name, dtype, facts, page_size)
    small, lacking = first_that_runs(SMALL, machine, gpu)
    choices = dict.fromkeys((*SMALL_OPERATIONS, *GPU_OPERATIONS), SMALL[small].file)
    compiled = builder.args.graphs.enable_torch_compile
    if compiled:
        choices |= dict.fromkeys(FUSED, "native")
    choices |= {
        "attention": ATTENTION[decode].file,
        "prefill_attention": ATTENTION[prefill].file,
        "sampling": SAMPLING[sampling].file,
    }
    reasons = ["attention and sampling as said there; of the small operations the first that runs here"]
    reasons += _sentences(lacking)
    if compiled:
        reasons.append(f"{', '.join(FUSED)} are plain torch, which torch.compile fuses")
    if gpu is None:
        by_products, why = _attends_by_products(builder, machine, dtype)
        if by_products:  # it hands rows of several tokens to plain torch itself
            choices |= dict.fromkeys(("attention", "prefill_attention"), "with_onednn")
        reasons.append(why)
    if builder.args.quant.quantization is None:
        choices["matmul"], why = _matmul(machine, gpu, dtype, compiled=compiled)
    else:
        choices["matmul"], why = "int8", "weights have 8 bits, and torch makes them wide for every product"
    reasons.append(why)
    fallback: Mapping[str, str] | None = None
    if gpu is None and not compiled:
        in_cpp, why = _in_cpp(builder, machine, dtype)
        if in_cpp:
            fallback, choices, reasons = choices, choices | in_cpp, []
        reasons.append(why)
    return KernelPlan(
        choices=builder.decide("kernels.choices", choices, "; ".join(reasons)),
        fallback=builder.decide(
            "kernels.fallback", fallback, "where the kernels in C++ turn out not to compile"
        ),
        cpu_threads=builder.take("kernels.cpu_threads", "cpu_threads"),
        attention_backend=attention,
        prefill_attention_backend=prefill,
        decode_attention_backend=decode,
        sampling_backend=sampling,
        triton_attention_num_kv_splits=builder.take(f"kernels.{_SPLITTING[0]}", _SPLITTING[0]),
        triton_attention_split_tile_size=builder.take(f"kernels.{_SPLITTING[1]}", _SPLITTING[1]),
    )


def _chosen(
    builder: PlanBuilder,
    option: str,
    backends: Mapping[str, Backend],
    machine: Machine,
    gpu: Gpu | None,
    *,
    otherwise: str | None = None,
) -> str:
    """The backend's name: as asked, or else `otherwise`, or else the first that runs here."""
    place, asked = f"kernels.{option}", builder.args.get(option)
    if asked in backends:
        if not (reason := backends[asked].unmet(machine, gpu)):
            return builder.decide(place, asked, "as asked")
        fallback, _ = first_that_runs(backends, machine, gpu)
        flag = "--" + option.replace("_", "-")
        builder.refuse(option, f"{flag} {asked} cannot be used: it {reason}; use {fallback}.")
        return builder.decide(place, fallback, "what was asked for cannot be used")
    if otherwise is not None:
        return builder.decide(place, otherwise, "that of --attention-backend")
    name, lacking = first_that_runs(backends, machine, gpu)
    why = "; ".join(_sentences(lacking)) or "the first choice, and this machine runs it"
    return builder.decide(place, name, why)


def _in_cpp(builder: PlanBuilder, machine: Machine, dtype: str) -> tuple[dict[str, str], str]:
    """The operations that a CPU computes in C++, and why, or why none."""
    if machine.compiler is None:
        return {}, "there is no C++ compiler, with which a step would be faster"
    if dtype not in CPP_DTYPES:
        return {}, f"the kernels in C++ do not compute in {dtype}"
    if not machine.cpu_flags >= CPP_NEEDS:
        return {}, f"the kernels in C++ are slow on a processor without {'+'.join(sorted(CPP_NEEDS))}"
    operations: dict[str, str] = dict.fromkeys([*SMALL_OPERATIONS, "embedding", "matmul"], "with_cpp")
    if any(name.endswith("attention_backend") for name in builder.args.said):
        return operations, "C++ kernels compiled for this processor, but for attention, as asked"
    for rows in ("attention", "prefill_attention"):
        operations[rows] = "with_cpp"
    return operations, "C++ kernels compiled for this processor, a whole step in one call"


def _attends_by_products(builder: PlanBuilder, machine: Machine, dtype: str) -> tuple[bool, str]:
    """Whether a CPU attends in batched products, and why."""
    if any(name.endswith("attention_backend") for name in builder.args.said):
        return False, "attention is plain torch as asked"
    if dtype != "bfloat16" or "amx_bf16" in machine.cpu_flags:
        return False, "attention is plain torch, the best there is so far"
    if not _packs(machine, dtype):
        return False, "attention is plain torch: this processor has no bfloat16 products"
    return True, "single tokens attend in batched products, which are faster without AMX"


def _matmul(machine: Machine, gpu: Gpu | None, dtype: str, *, compiled: bool) -> tuple[str, str]:
    """The file of products with weights, and why."""
    if gpu is not None:
        return "native", "products with weights are torch's own on a GPU"
    if compiled:
        return "native", "products with weights are plain torch, which torch.compile sees through"
    needed = ONEDNN_NEEDS.get(dtype)
    if needed is None:
        return "native", f"products with weights are plain torch: oneDNN packs none in {dtype}"
    if not _packs(machine, dtype):
        return "native", f"products with weights are plain torch: this processor lacks {_any_of(needed)}"
    return "with_onednn", "weights are packed once for oneDNN, not at every product"


def _packs(machine: Machine, dtype: str) -> bool:
    return any(flags <= machine.cpu_flags for flags in ONEDNN_NEEDS[dtype])


def _any_of(needed: Sequence[frozenset[str]]) -> str:
    return " or ".join("+".join(sorted(flags)) for flags in needed)


def _sentences(lacking: Mapping[str, str]) -> list[str]:
    return [f"{name} {reason}" for name, reason in lacking.items()]


def _refuse_idle_splitting(builder: PlanBuilder, decode: str) -> None:
    """What only the Triton decode kernel reads must not be said in vain."""
    for option in _SPLITTING:
        if option in builder.args.said and decode != "triton":
            flag = "--" + option.replace("_", "-")
            builder.refuse(option, f"{flag} has a meaning for triton only, and output tokens use {decode}.")


def _refuse_for_flashinfer(
    builder: PlanBuilder, option: str, name: str, dtype: str, facts: ModelFacts, page_size: int
) -> None:
    """What FlashInfer's kernels do not compute. Of heads nothing is refused while the model is unknown."""
    missing = []
    if facts.architecture and not (facts.head_dim in FLASHINFER_HEAD_DIMS and dtype in FLASHINFER_DTYPES):
        missing.append(
            f"takes heads of {_listed(FLASHINFER_HEAD_DIMS)} dimensions in float16 or bfloat16, and this model has "
            f"{facts.head_dim} in {dtype}"
        )
    if name == "trtllm_mha" and page_size not in TRTLLM_PAGE_SIZES:
        missing.append(f"reads pages of {_listed(TRTLLM_PAGE_SIZES)} tokens, and --page-size is {page_size}")
    kv_dtype = builder.args.cache.kv_cache_dtype
    if name in SAME_DTYPE_CACHE and kv_dtype != "auto":
        missing.append(f"reads a cache of the model's dtype only, and --kv-cache-dtype is {kv_dtype}")
    if missing:
        builder.refuse(
            option, f"--{option.replace('_', '-')} {name} {', and it '.join(missing)}; use triton."
        )


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
