"""The scheduler's section of the plan, and the kernels'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ops.machine import GIB, Gpu, Machine
from runtime.plan import KernelPlan, ModelPlan, SchedulePlan
from runtime.resolve.ledger import Ledger

# Flags of an x86 processor, of which it needs one set whole: without them oneDNN refuses the dtype or is slow.
ONEDNN_NEEDS: Mapping[str, Sequence[frozenset[str]]] = {
    "float32": (frozenset({"avx2", "fma"}),),
    "bfloat16": (frozenset({"avx512bw", "avx512dq", "avx512vl"}), frozenset({"avx_ne_convert"})),
}
DECAY_STEPS = 600  # over which the share reserved for output falls to its minimum


def schedule_plan(ledger: Ledger, gpu: Gpu | None, page_size: int) -> SchedulePlan:
    args = ledger.args.schedule
    ratio, ratio_min = _new_token_ratio(ledger)
    why_decay = f"from the first value to the smallest in {DECAY_STEPS} steps"
    return SchedulePlan(
        max_running=_max_running(ledger, gpu),
        max_queued=ledger.take("schedule.max_queued", "max_queued_requests"),
        chunk_tokens=_chunk_tokens(ledger, gpu, page_size),
        max_prefill_tokens=ledger.take("schedule.max_prefill_tokens", "max_prefill_tokens"),
        policy=_policy(ledger),
        mixed=ledger.take("schedule.mixed", "enable_mixed_chunk"),
        overlap=ledger.take(
            "schedule.overlap", "disable_overlap_schedule", not args.disable_overlap_schedule
        ),
        new_token_ratio=ratio,
        min_new_token_ratio=ratio_min,
        new_token_ratio_decay=ledger.decide(
            "schedule.new_token_ratio_decay", (ratio - ratio_min) / DECAY_STEPS, why_decay
        ),
        stream_interval=ledger.take("schedule.stream_interval", "stream_interval"),
        log_interval_steps=ledger.take("schedule.log_interval_steps", "decode_log_interval"),
        watchdog_timeout_s=ledger.take("schedule.watchdog_timeout_s", "watchdog_timeout"),
    )


def kernel_plan(ledger: Ledger, machine: Machine, model: ModelPlan) -> KernelPlan:
    attention, why_attention = _attention(ledger, machine, model)
    matmul, why_matmul = _matmul(machine, model)
    choices = {"attention": attention, "matmul": matmul}
    why = f"{why_attention}; {why_matmul}"
    return KernelPlan(choices=ledger.decide("kernels.choices", choices, why))


def _attention(ledger: Ledger, machine: Machine, model: ModelPlan) -> tuple[str, str]:
    if any(name.endswith("attention_backend") for name in ledger.args.said):
        return "native", "attention is plain torch as asked"
    if model.device != "cpu" or model.dtype != "bfloat16" or "amx_bf16" in machine.cpu_flags:
        return "native", "attention is plain torch, the best there is so far"
    if not _packs(machine, model.dtype):
        return "native", "attention is plain torch: this processor has no bfloat16 products"
    return "with_onednn", "single tokens attend in batched products, which are faster without AMX"


def _packs(machine: Machine, dtype: str) -> bool:
    return any(flags <= machine.cpu_flags for flags in ONEDNN_NEEDS[dtype])


def _matmul(machine: Machine, model: ModelPlan) -> tuple[str, str]:
    if model.device != "cpu":
        return "native", "products with weights are torch's own on a GPU"
    needed = ONEDNN_NEEDS.get(model.dtype)
    if needed is None:
        return "native", f"products with weights are plain torch: oneDNN packs none in {model.dtype}"
    if not _packs(machine, model.dtype):
        return "native", f"products with weights are plain torch: this processor lacks {_any_of(needed)}"
    return "with_onednn", "weights are packed once for oneDNN, not at every product"


def _any_of(needed: Sequence[frozenset[str]]) -> str:
    return " or ".join("+".join(sorted(flags)) for flags in needed)


def _max_running(ledger: Ledger, gpu: Gpu | None) -> int:
    asked = ledger.args.schedule.max_running_requests
    if asked is not None:
        return ledger.decide("schedule.max_running", asked, "as asked")
    if gpu is None:
        return ledger.decide("schedule.max_running", 256, "enough for a CPU; the KV cache may allow fewer")
    return ledger.decide("schedule.max_running", 2048, "enough for a GPU; the KV cache may allow fewer")


def _chunk_tokens(ledger: Ledger, gpu: Gpu | None, page_size: int) -> int | None:
    place = "schedule.chunk_tokens"
    asked = ledger.args.schedule.chunked_prefill_size
    if asked is not None and asked <= 0:
        return ledger.decide(place, None, "as asked: prompts are never cut")
    if asked is not None:
        if asked % page_size:
            ledger.refuse(
                "chunked_prefill_size",
                f"--chunked-prefill-size {asked} must be a multiple of the page size, {page_size}.",
            )
        return ledger.decide(place, asked, "as asked")
    if gpu is None:
        size, why = 4096, "the default without a GPU"
    else:
        gibibytes = gpu.memory_bytes / GIB
        size = 2048 if gibibytes < 35 else 8192 if gibibytes < 160 else 16384
        why = f"by the GPU's {gibibytes:.0f} GiB of memory"
    whole = max(page_size, size // page_size * page_size)
    return ledger.decide(place, whole, why if whole == size else f"{why}, in whole pages")


def _policy(ledger: Ledger) -> str:
    policy = ledger.args.schedule.schedule_policy
    if policy == "lpm" and ledger.args.cache.disable_radix_cache:
        return ledger.decide(
            "schedule.policy", "fcfs", "without the prefix cache no prompt has a cached prefix"
        )
    return ledger.take("schedule.policy", "schedule_policy")


def _new_token_ratio(ledger: Ledger) -> tuple[float, float]:
    """(first, smallest) share of the remaining output that admission reserves."""
    conservativeness = ledger.args.schedule.schedule_conservativeness
    first = min(0.7 * conservativeness, 1.0)
    ledger.decide(
        "schedule.new_token_ratio", first, f"0.7 x the conservativeness of {conservativeness:g}, up to 1"
    )
    return first, ledger.decide("schedule.min_new_token_ratio", 0.14 * first, "0.14 x the first value")
