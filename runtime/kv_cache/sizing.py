"""Sizes of the KV pool and of the host pools, and the table of a device's memory.

The functions are pure: they depend only on the plan, the model's specs and numbers of bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ops.machine import GIB
from runtime.config.plan import Plan
from runtime.errors import ConfigurationError
from runtime.kv_cache.kinds import DTYPE_BYTES, PAGED, Specs
from runtime.kv_cache.registry import KINDS, by_kind

BALANCE = 0.9  # a GPU's free memory must be at least this share of the largest free memory of all GPUs
MARGIN = 1.05  # the measured activations are multiplied by this, to cover the allocator's rounding and fragmentation


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Memory that steps need in addition to weights and KV cache, in bytes."""

    activation_bytes: int = 0  # activations of the largest step, in bytes
    graph_bytes: int = 0  # memory of all CUDA graphs, in bytes
    table_bytes: int = 0  # tables of the draft model or draft head on a GPU, in bytes
    measured: bool = False  # whether a profile run measured the sizes; if not, all of them are 0

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the KV cache must leave free."""
        return int(self.activation_bytes * MARGIN) + self.graph_bytes + self.table_bytes


def largest_step_tokens(plan: Plan) -> int:
    """Return the number of tokens of the largest step that the scheduler can build."""
    schedule = plan.scheduler
    prompt = schedule.chunk_tokens or max(schedule.max_prefill_tokens, plan.model.context_length)
    return max(prompt + schedule.max_running * schedule.mixed, schedule.max_running)


def pool_bytes(plan: Plan, specs: Specs, num_pages: int) -> int:
    """Return the bytes of the caches of all layers for `num_pages` pages."""
    total = 0
    for name, kind_specs in by_kind(specs, plan).items():
        if name == PAGED:
            size, dtype_bytes = plan.cache.page_size, DTYPE_BYTES[plan.cache.kv_dtype]
            total += num_pages * sum(spec.page_bytes(size, dtype_bytes) for spec in kind_specs.values())
        else:
            kind = KINDS[name]
            total += kind.num_units(kind_specs, plan, num_pages) * kind.unit_bytes(kind_specs, plan)
    return total


def _max_pages(plan: Plan, specs: Specs, budget: int) -> int:
    """Return the largest number of pages that fits into `budget` bytes, or 0."""
    low, high = 0, 1
    while high <= budget and pool_bytes(plan, specs, high) <= budget:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if pool_bytes(plan, specs, middle) <= budget else (low, middle)
    return low


def size_pool(
    plan: Plan,
    specs: Specs,
    *,
    available_bytes: int,
    total_bytes: int,
    weight_bytes: int,
    steps: StepMemory | None = None,
) -> tuple[int, str]:
    """Return the number of pages in a device's KV pool, and the reason for this number.

    The device has `total_bytes`, of which `available_bytes` are free after loading the weights (`weight_bytes`).
    `specs` are the cache specs of its layers. The pool leaves at least `steps.reserved_bytes` (activations and CUDA
    graphs) free. Raises `ConfigurationError` if not even one page fits.
    """
    cache, schedule = plan.cache, plan.scheduler
    if not specs:
        pages = schedule.max_running * -(-plan.model.context_length // cache.page_size)
        return pages, "they take no memory, since no layer has a KV cache"
    if cache.of_free_memory:
        budget = int(cache.mem_fraction * available_bytes)
        reason = f"{cache.mem_fraction:.0%} of the {available_bytes / GIB:.1f} GiB of free memory"
    else:
        # The allowed share of all memory, minus the memory of other programs and the weights. Weights that are mapped
        # from files may not count as used memory, so they are also subtracted from the fraction itself.
        others = available_bytes - int(total_bytes * (1 - cache.mem_fraction))
        budget = min(others, int(total_bytes * cache.mem_fraction) - weight_bytes)
        reason = f"{cache.mem_fraction:.1%} of {total_bytes / GIB:.1f} GiB, less the weights"
    if steps is not None and available_bytes - steps.reserved_bytes < budget:
        budget = available_bytes - steps.reserved_bytes
        reason = f"{available_bytes / GIB:.1f} GiB of free memory, less {steps.reserved_bytes / GIB:.1f} for steps"
    pages = _max_pages(plan, specs, budget)
    no_pages = not by_kind(specs, plan)[PAGED]  # no layer uses KV pages, so the number of pages costs no memory
    if no_pages or (cache.of_free_memory and cache.max_total_tokens is None):
        needed = schedule.max_running * -(-plan.model.context_length // cache.page_size)
        if needed < pages:
            pages, reason = needed, f"enough for {schedule.max_running} sequences of full length"
    if cache.max_total_tokens is not None:
        requested = cache.max_total_tokens // cache.page_size
        if requested <= pages:
            pages, reason = requested, "set by --max-total-tokens"
        else:
            reason = f"fewer than --max-total-tokens requests: {reason}"
    if pages < 1:
        figures = _figures(plan, pool_bytes(plan, specs, 1), available_bytes, total_bytes, weight_bytes, steps)
        raise ConfigurationError(f"{_not_enough_memory(plan, specs, budget)} {figures}")
    return pages, reason


def _figures(
    plan: Plan,
    page_bytes: int,
    available_bytes: int,
    total_bytes: int,
    weight_bytes: int,
    steps: StepMemory | None,
) -> str:
    """Return sentences for an error: the size of a page, the free memory, and the fraction that a page needs."""
    fraction = plan.cache.mem_fraction
    page = f"one page of {plan.cache.page_size} tokens takes {page_bytes / GIB:.3f} GiB"
    if steps is not None and available_bytes - steps.reserved_bytes < page_bytes:
        free, reserved = available_bytes / GIB, steps.reserved_bytes / GIB
        return f"Here {page}, and steps need {reserved:.2f} of the {free:.2f} GiB of free memory."
    if plan.cache.of_free_memory:
        whole, memory, taken, needed = available_bytes, "free memory", page, page_bytes
    else:
        whole, memory = total_bytes, "memory"
        others = max(0, total_bytes - available_bytes - weight_bytes)
        taken = f"the weights take {weight_bytes / GIB:.2f} GiB, other programs {others / GIB:.2f}, and {page}"
        needed = max(weight_bytes, total_bytes - available_bytes) + page_bytes
    share = math.ceil(100 * needed / max(1, whole)) / 100
    of_all = f"{share:.2f} of" if share < 1 else "more than"
    return (
        f"Here {taken}: {of_all} the {whole / GIB:.2f} GiB of {memory}. "
        f"The fraction {fraction:g} allows {fraction * whole / GIB:.2f} GiB."
    )


def _not_enough_memory(plan: Plan, specs: Specs, budget: int) -> str:
    """Return advice for an error message if not even one page fits. Names the memory that other cache kinds take."""
    sentence = "Not enough memory. Please try to increase --mem-fraction-static"
    for name, kind_specs in by_kind(specs, plan).items():
        if name != PAGED and KINDS[name].less_memory:
            taken = KINDS[name].num_units(kind_specs, plan, 1) * KINDS[name].unit_bytes(kind_specs, plan)
            left = max(0, budget) / GIB
            sentence += f", or {KINDS[name].less_memory} {taken / GIB:.2f} of the remaining {left:.2f} GiB"
    return f"{sentence}."


def host_pages(plan: Plan, specs: Specs) -> tuple[int, str]:
    """Return how many host pages each rank has for retracted sequences, and the reason for this number.

    `specs` are the specs of one rank's layers. The reason is empty if no host memory is requested.
    """
    if not plan.cache.swap_space_gib:
        return 0, ""
    kinds = by_kind(specs, plan)
    others = sorted(kinds.keys() - {PAGED})
    if others:
        return 0, f"{' and '.join(others)} layers cannot be moved, so retracted requests are recomputed"
    size, dtype_bytes = plan.cache.page_size, DTYPE_BYTES[plan.cache.kv_dtype]
    page_bytes = sum(spec.page_bytes(size, dtype_bytes) for spec in kinds[PAGED].values())
    if not page_bytes:
        return 0, "no layer has a KV cache"
    num_pages = int(plan.cache.swap_space_gib * GIB) // page_bytes
    if not num_pages:
        raise ConfigurationError(
            f"--swap-space {plan.cache.swap_space_gib:g} holds no page of this model; it needs at least "
            f"{page_bytes / GIB:.6f} GiB."
        )
    return num_pages, f"{num_pages} pages of {size} tokens in {plan.cache.swap_space_gib:g} GiB for each rank"


def tier_pages(plan: Plan, specs: Specs, num_pages: int) -> tuple[int, int]:
    """Return the number of pages in each rank's host tier, and the bytes of one page. Both are 0 without a host tier.

    `specs` are the specs of one rank's layers, and `num_pages` is the number of device pages. Raises
    `ConfigurationError` if the requested size is smaller than a page.
    """
    if not plan.cache.host_tier:
        return 0, 0
    size, dtype_bytes = plan.cache.page_size, DTYPE_BYTES[plan.cache.kv_dtype]
    kinds = by_kind(specs, plan)
    if kinds.keys() - {PAGED}:
        names = " and ".join(sorted(kinds.keys() - {PAGED}))
        raise ConfigurationError(f"--enable-hierarchical-cache: {names} caches cannot be copied to the host.")
    page_bytes = sum(spec.page_bytes(size, dtype_bytes) for spec in kinds[PAGED].values())
    if not plan.cache.host_gb or not page_bytes:
        return max(1, int(num_pages * plan.cache.host_ratio)), page_bytes
    count = plan.cache.host_gb * 10**9 // page_bytes
    if not count:
        raise ConfigurationError(f"--hicache-size {plan.cache.host_gb} holds no page; one takes {page_bytes} bytes.")
    return count, page_bytes


def max_running(plan: Plan, pages: int) -> int:
    """Return how many sequences may run with this number of pages: at most one per two tokens, but at least 1."""
    return max(1, min(plan.scheduler.max_running, pages * plan.cache.page_size // 2))


def check_balance(available_bytes: Sequence[int]) -> None:
    """Raise `ConfigurationError` if one GPU's free memory is below `BALANCE` times the largest free memory."""
    least, most = min(available_bytes, default=0), max(available_bytes, default=0)
    if least < BALANCE * most:
        raise ConfigurationError(
            f"One GPU has {least / GIB:.1f} GiB free and another {most / GIB:.1f}, because other programs use it. "
            "End these programs, or choose other GPUs with --base-gpu-id."
        )


def memory_table(
    *,
    device: str,
    total_bytes: int,
    weight_bytes: Mapping[str, int],
    kv_bytes: int,
    kv_reason: str,
    free_bytes: int,
    steps: StepMemory | None = None,
) -> str:
    """Return a table of the uses of a device's memory. Each line has a name, GiB and a note.

    The keys of `weight_bytes` are model names. `free_bytes` is the free memory after the pools are allocated. If
    `steps` was measured, activations and graphs get their own lines, and the line of free memory does not include them.
    """
    parts = ", ".join(f"{size / GIB:.2f} of the {name}" for name, size in weight_bytes.items())
    rows = [
        ("weights", sum(weight_bytes.values()), parts if len(weight_bytes) > 1 else ""),
        ("KV cache", kv_bytes, kv_reason),
    ]
    if steps is not None and steps.measured:
        rows.append(("activations", steps.activation_bytes, "largest step, measured"))
        if steps.graph_bytes:
            rows.append(("CUDA graphs", steps.graph_bytes, "reserved; captured while the engine runs"))
        free_bytes = max(0, free_bytes - steps.activation_bytes - steps.graph_bytes)
    rows.append(("free", free_bytes, f"of {total_bytes / GIB:.2f} GiB, also for other programs"))
    lines = [f"Memory of {device}, GiB"]
    lines += [f"  {name:<12}{size / GIB:>8.2f}  {note}".rstrip() for name, size, note in rows]
    return "\n".join(lines)
