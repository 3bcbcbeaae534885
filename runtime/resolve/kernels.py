"""The kernels' section of the plan: which implementation of each operation runs, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ops.backends import (
    ATTENTION,
    FLASHINFER_DTYPES,
    FLASHINFER_HEAD_DIMS,
    SAMPLING,
    SMALL,
    SMALL_OPERATIONS,
    Backend,
    first_that_runs,
)
from ops.machine import Gpu, Machine
from runtime.facts import ModelFacts
from runtime.plan import KernelPlan
from runtime.resolve.ledger import Ledger

# Flags of an x86 processor, of which it needs one set whole: without them oneDNN refuses the dtype or is slow.
ONEDNN_NEEDS: Mapping[str, Sequence[frozenset[str]]] = {
    "float32": (frozenset({"avx2", "fma"}),),
    "bfloat16": (frozenset({"avx512bw", "avx512dq", "avx512vl"}), frozenset({"avx_ne_convert"})),
}
# What torch.compile fuses better than we do by hand.
FUSED = ("activation", "norm", "rope")
_SPLITTING = ("triton_attention_num_kv_splits", "triton_attention_split_tile_size")


def kernel_plan(
    ledger: Ledger, machine: Machine, gpu: Gpu | None, dtype: str, facts: ModelFacts
) -> KernelPlan:
    attention = _chosen(ledger, "attention_backend", ATTENTION, machine, gpu)
    decode = _chosen(ledger, "decode_attention_backend", ATTENTION, machine, gpu, otherwise=attention)
    prefill = _chosen(ledger, "prefill_attention_backend", ATTENTION, machine, gpu, otherwise=attention)
    sampling = _chosen(ledger, "sampling_backend", SAMPLING, machine, gpu)
    _refuse_idle_splitting(ledger, decode)
    if "flashinfer" in (attention, decode, prefill):
        _refuse_other_heads(ledger, dtype, facts)
    small, lacking = first_that_runs(SMALL, machine, gpu)
    choices = dict.fromkeys(SMALL_OPERATIONS, SMALL[small].file)
    compiled = ledger.args.graphs.enable_torch_compile
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
        by_products, why = _attends_by_products(ledger, machine, dtype)
        if by_products:  # it hands rows of several tokens to plain torch itself
            choices |= dict.fromkeys(("attention", "prefill_attention"), "with_onednn")
        reasons.append(why)
    choices["matmul"], why = _matmul(machine, gpu, dtype, compiled=compiled)
    reasons.append(why)
    return KernelPlan(
        choices=ledger.decide("kernels.choices", choices, "; ".join(reasons)),
        attention_backend=attention,
        prefill_attention_backend=prefill,
        decode_attention_backend=decode,
        sampling_backend=sampling,
        triton_attention_num_kv_splits=ledger.take(f"kernels.{_SPLITTING[0]}", _SPLITTING[0]),
        triton_attention_split_tile_size=ledger.take(f"kernels.{_SPLITTING[1]}", _SPLITTING[1]),
    )


def _chosen(
    ledger: Ledger,
    option: str,
    backends: Mapping[str, Backend],
    machine: Machine,
    gpu: Gpu | None,
    *,
    otherwise: str | None = None,
) -> str:
    """The backend's name: as asked, or else `otherwise`, or else the first that runs here."""
    place, asked = f"kernels.{option}", ledger.args.get(option)
    if asked in backends:
        if not (reason := backends[asked].unmet(machine, gpu)):
            return ledger.decide(place, asked, "as asked")
        fallback, _ = first_that_runs(backends, machine, gpu)
        flag = "--" + option.replace("_", "-")
        ledger.refuse(option, f"{flag} {asked} cannot be used: it {reason}; use {fallback}.")
        return ledger.decide(place, fallback, "what was asked for cannot be used")
    if otherwise is not None:
        return ledger.decide(place, otherwise, "that of --attention-backend")
    name, lacking = first_that_runs(backends, machine, gpu)
    why = "; ".join(_sentences(lacking)) or "the first choice, and this machine runs it"
    return ledger.decide(place, name, why)


def _attends_by_products(ledger: Ledger, machine: Machine, dtype: str) -> tuple[bool, str]:
    """Whether a CPU attends in batched products, and why."""
    if any(name.endswith("attention_backend") for name in ledger.args.said):
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


def _refuse_idle_splitting(ledger: Ledger, decode: str) -> None:
    """What only the Triton decode kernel reads must not be said in vain."""
    for option in _SPLITTING:
        if option in ledger.args.said and decode != "triton":
            flag = "--" + option.replace("_", "-")
            ledger.refuse(option, f"{flag} has a meaning for triton only, and output tokens use {decode}.")


def _refuse_other_heads(ledger: Ledger, dtype: str, facts: ModelFacts) -> None:
    """FlashInfer computes some head dimensions, in 16 bits. Nothing is refused while the model is unknown."""
    if not facts.architecture:
        return
    if facts.head_dim in FLASHINFER_HEAD_DIMS and dtype in FLASHINFER_DTYPES:
        return
    known = ", ".join(map(str, FLASHINFER_HEAD_DIMS))
    ledger.refuse(
        "attention_backend",
        f"Attention by flashinfer takes heads of {known} dimensions in float16 or bfloat16, and this model has "
        f"{facts.head_dim} in {dtype}; use triton.",
    )
