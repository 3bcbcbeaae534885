"""How many pages the KV pool gets once the weights are in place, and what a device's memory is used for.

Pure functions of the plan, the model and numbers of bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ops.machine import GIB
from runtime.config.plan import Plan
from runtime.errors import ConfigurationError
from runtime.kv_cache.kinds import DTYPE_BYTES, PAGED, Specs
from runtime.kv_cache.registry import KINDS, by_kind

BALANCE = 0.9
MARGIN = 1.05  # of the measured activations: allocators round up and lose a little between blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """What steps take beside weights and KV cache, in bytes, and how that is known."""

    activation_bytes: int = 0  # of the largest step
    graph_bytes: int = 0  # of all CUDA graphs
    measured: bool = False  # by a step that was run; else nothing is known

    @property
    def reserved_bytes(self) -> int:
        """What the KV cache must leave free."""
        return int(self.activation_bytes * MARGIN) + self.graph_bytes


def largest_step_tokens(plan: Plan) -> int:
    """Tokens of the largest step that the schedule can fill."""
    schedule = plan.scheduler
    prompt = schedule.chunk_tokens or max(schedule.max_prefill_tokens, plan.model.context_length)
    return max(prompt + schedule.max_running * schedule.mixed, schedule.max_running)


def pool_bytes(plan: Plan, specs: Specs, num_pages: int) -> int:
    """Bytes of all layers' caches that go with so many pages."""
    total = 0
    for name, own in by_kind(specs, plan).items():
        if name == PAGED:
            size, dtype_bytes = plan.cache.page_size, DTYPE_BYTES[plan.cache.kv_dtype]
            total += num_pages * sum(spec.page_bytes(size, dtype_bytes) for spec in own.values())
        else:
            kind = KINDS[name]
            total += kind.num_units(own, plan, num_pages) * kind.unit_bytes(own, plan)
    return total


def _most_pages(plan: Plan, specs: Specs, budget: int) -> int:
    """The largest number of pages that, with all that goes with them, takes no more than these bytes."""
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
    """(pages, reason): what the KV pool gets on a device with `total_bytes`, of which `available_bytes` are free
    now, when the weights (`weight_bytes`) are in place; and what limited it, as a sentence. `specs` are what the
    device's layers keep.

    What `steps` need stays free, whatever share of the memory was asked for. Raises `ConfigurationError` when not
    one page fits.
    """
    cache, schedule = plan.cache, plan.scheduler
    if not specs:
        pages = schedule.max_running * -(-plan.model.context_length // cache.page_size)
        return pages, "they take no memory: no layer keeps anything"
    if cache.of_free_memory:
        budget = int(cache.mem_fraction * available_bytes)
        reason = f"{cache.mem_fraction:.0%} of the {available_bytes / GIB:.1f} GiB that are free"
    else:
        # A share of everything, less what others and the weights (mapped ones may not show up as used) take.
        others = available_bytes - int(total_bytes * (1 - cache.mem_fraction))
        budget = min(others, int(total_bytes * cache.mem_fraction) - weight_bytes)
        reason = f"{cache.mem_fraction:.1%} of {total_bytes / GIB:.1f} GiB, less the weights"
    if steps is not None and available_bytes - steps.reserved_bytes < budget:
        budget = available_bytes - steps.reserved_bytes
        reason = f"the {available_bytes / GIB:.1f} GiB that are free, less {steps.reserved_bytes / GIB:.1f} for steps"
    pages = _most_pages(plan, specs, budget)
    no_pages = not by_kind(specs, plan)[PAGED]  # pages take no memory then
    if no_pages or (cache.of_free_memory and cache.max_total_tokens is None):
        most = schedule.max_running * -(-plan.model.context_length // cache.page_size)
        if most < pages:
            pages, reason = most, f"{schedule.max_running} sequences of full length need no more"
    if cache.max_total_tokens is not None:
        asked = cache.max_total_tokens // cache.page_size
        if asked <= pages:
            pages, reason = asked, "as asked with --max-total-tokens"
        else:
            reason = f"less than --max-total-tokens asks for: {reason}"
    if pages < 1:
        figures = _figures(
            plan, pool_bytes(plan, specs, 1), available_bytes, total_bytes, weight_bytes, steps
        )
        raise ConfigurationError(f"{_too_little(plan, specs, budget)} {figures}")
    return pages, reason


def _figures(
    plan: Plan,
    page_bytes: int,
    available_bytes: int,
    total_bytes: int,
    weight_bytes: int,
    steps: StepMemory | None,
) -> str:
    """What one page needs and what there is, and the share from which on it fits."""
    fraction = plan.cache.mem_fraction
    page = f"one page of {plan.cache.page_size} tokens takes {page_bytes / GIB:.3f} GiB"
    if steps is not None and available_bytes - steps.reserved_bytes < page_bytes:
        free, reserved = available_bytes / GIB, steps.reserved_bytes / GIB
        return f"Here {page}, and of the {free:.2f} GiB that are free steps need {reserved:.2f}."
    if plan.cache.of_free_memory:
        whole, there, taken, needed = available_bytes, "free", page, page_bytes
    else:
        whole, there = total_bytes, "there"
        others = max(0, total_bytes - available_bytes - weight_bytes)
        taken = f"the weights take {weight_bytes / GIB:.2f} GiB, all else {others / GIB:.2f}, and {page}"
        needed = max(weight_bytes, total_bytes - available_bytes) + page_bytes
    share = math.ceil(100 * needed / max(1, whole)) / 100
    of_all = f"{share:.2f} of" if share < 1 else "more than"
    return (
        f"Here {taken}: {of_all} the {whole / GIB:.2f} GiB that are {there}, "
        f"and {fraction:g} of them is {fraction * whole / GIB:.2f}."
    )


def _too_little(plan: Plan, specs: Specs, budget: int) -> str:
    """What to do where not one page fits, with what the kinds of caches beside the pages take."""
    sentence = "Not enough memory. Please try to increase --mem-fraction-static"
    for name, own in by_kind(specs, plan).items():
        if name != PAGED and KINDS[name].less_memory:
            taken = KINDS[name].num_units(own, plan, 1) * KINDS[name].unit_bytes(own, plan)
            left = max(0, budget) / GIB
            sentence += (
                f", or {KINDS[name].less_memory} {taken / GIB:.2f} GiB of the {left:.2f} that are left"
            )
    return f"{sentence}."


def max_running(plan: Plan, pages: int) -> int:
    """Sequences that may run together in a pool of so many pages: two tokens for each, and at least one."""
    return max(1, min(plan.scheduler.max_running, pages * plan.cache.page_size // 2))


def check_balance(available_bytes: Sequence[int]) -> None:
    """Raise `ConfigurationError` where one GPU has less than nine tenths of the memory that another has free."""
    least, most = min(available_bytes, default=0), max(available_bytes, default=0)
    if least < BALANCE * most:
        raise ConfigurationError(
            f"One GPU has {least / GIB:.1f} GiB free and another {most / GIB:.1f}: other programs take part of it. "
            "End them, or choose other GPUs with --base-gpu-id."
        )


def memory_table(
    *,
    device: str,
    total_bytes: int,
    weight_bytes: int,
    kv_bytes: int,
    kv_reason: str,
    free_bytes: int,
    steps: StepMemory | None = None,
) -> str:
    """Lines of "what, GiB, how that came about". `free_bytes` is what nobody holds now that the pool is there.

    Activations and graphs come out of what is free; both are shown where steps were measured.
    """
    rows = [
        ("weights", weight_bytes, ""),
        ("KV cache", kv_bytes, kv_reason),
    ]
    if steps is not None and steps.measured:
        rows.append(("activations", steps.activation_bytes, "of the largest step, as measured"))
        if steps.graph_bytes:
            rows.append(("CUDA graphs", steps.graph_bytes, "set aside, captured while the engine runs"))
        free_bytes = max(0, free_bytes - steps.activation_bytes - steps.graph_bytes)
    rows.append(("free", free_bytes, f"of {total_bytes / GIB:.2f} GiB, for other programs too"))
    lines = [f"Memory of {device}, GiB"]
    lines += [f"  {name:<12}{size / GIB:>8.2f}  {note}".rstrip() for name, size, note in rows]
    return "\n".join(lines)
