"""The kernels' section of the plan: which implementation of each operation runs, and why."""

from __future__ import annotations

from collections.abc import Mapping

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
    choices |= {
        "attention": ATTENTION[decode].file,
        "prefill_attention": ATTENTION[prefill].file,
        "sampling": SAMPLING[sampling].file,
    }
    why = "attention and sampling as said there; of the small operations the first that runs here"
    return KernelPlan(
        choices=ledger.decide("kernels.choices", choices, "; ".join([why, *_sentences(lacking)])),
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
