"""Sizes the caches of a replica, with the same number of pages on all ranks, and logs what limits it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ops.machine import GIB, Machine
from runtime.config.plan import Plan
from runtime.errors import ConfigurationError
from runtime.kv_cache.kinds import PAGED, CacheKind, Specs
from runtime.kv_cache.registry import KINDS, by_kind, make_kinds
from runtime.kv_cache.sizing import (
    StepMemory,
    check_balance,
    host_pages,
    max_running,
    memory_table,
    size_pool,
    tier_pages,
)

if TYPE_CHECKING:
    from runtime.mesh.rank_info import RankInfo
    from runtime.worker.worker import ModelWorker
    from runtime.worker.worker_setup import CacheSetup

logger = logging.getLogger("penstock.core")

HOST_SHARE = 0.9  # the host tier takes at most this share of the free host memory


def size_cache(
    plan: Plan, worker: ModelWorker, memory: Sequence[Mapping[str, int]], steps: StepMemory | None
) -> tuple[Plan, CacheSetup, list[CacheKind], str]:
    """Size the KV pools of all models on every rank.

    Returns the plan with the final `max_running`, the pool sizes (the same on all ranks), the cache kinds, and a text
    that says what limited the sizes. `memory` has the memory of each rank in bytes (see `ModelWorker.memory`).
    """
    from runtime.worker.worker_setup import CacheSetup

    local = [worker.local_specs(rank) for rank in _rank_infos(plan)]
    pages, reason = _size(plan, local, memory, steps)
    plan = replace(plan, scheduler=replace(plan.scheduler, max_running=max_running(plan, pages)))
    kinds = make_kinds(worker.cache_specs, plan, pages)
    breadths = {
        "--speculative-eagle-topk": plan.scheduler.draft_topk,
        "--speculative-ngram-max-bfs-breadth": plan.scheduler.draft_breadths[1],
    }
    for flag, breadth in breadths.items():
        if breadth > 1 and any(kind.steps_back is not None for kind in kinds):
            raise ConfigurationError(f"{flag} {breadth}: recurrent layers take one chain of drafts; set it to 1.")
    limits = [plan.scheduler.max_running, *(kind.max_sequences for kind in kinds if kind.max_sequences)]
    plan = replace(plan, scheduler=replace(plan.scheduler, max_running=min(limits)))
    cache = CacheSetup(
        num_pages=pages,
        page_size=plan.cache.page_size,
        kv_dtype=plan.cache.kv_dtype,
        num_sequences=min(limits),
        kinds={kind.name: kind.count for kind in kinds},
        num_host_pages=_size_swap_space(plan, local),
        host_blocks=plan.cache.host_layout != "layer_first",
        direct_copies=plan.cache.copy_backend == "direct",
    )
    also = "".join(f", {count} for {name} layers" for name, count in cache.kinds.items())
    also += "".join(f" ({each})" for each in _per_sequence(local[0], plan))
    reason = f"{pages} pages{also} of {cache.page_size} tokens in {cache.kv_dtype}: {reason}"
    return plan, cache, kinds, reason


def _per_sequence(specs: Specs, plan: Plan) -> list[str]:
    """Return what a running sequence takes in the caches other than pages."""
    by_name = by_kind(specs, plan)
    return [text for name in by_name if name != PAGED and (text := KINDS[name].per_sequence(by_name[name], plan))]


def _rank_infos(plan: Plan) -> list[RankInfo]:
    """Return the coordinates of all ranks of a replica."""
    from runtime.worker.worker_setup import rank_info

    return [rank_info(plan, rank) for rank in range(plan.parallel.ranks)]


def _size(
    plan: Plan, specs: Sequence[Specs], memory: Sequence[Mapping[str, int]], steps: StepMemory | None
) -> tuple[int, str]:
    """Return the number of pages that fits on every rank (see `size_pool`), and a text that says what limits it.

    Raises `ConfigurationError` if other programs use much more memory of one GPU than of another.
    """
    parallel = plan.parallel
    on_cpu = plan.model.device == "cpu"
    # On a CPU, the pools of all ranks and replicas share the machine's memory.
    sharing = parallel.ranks * parallel.copies if on_cpu else 1
    check_balance([] if on_cpu else [own["available"] for own in memory])
    sizes = [
        size_pool(
            plan,
            local,
            available_bytes=own["available"] // sharing,
            total_bytes=own["total"] // sharing,
            weight_bytes=own["weights"],
            steps=steps,
        )
        for local, own in zip(specs, memory, strict=True)
    ]
    pages, reason = min(sizes)
    asked = plan.cache.max_total_tokens or 0
    level = logging.WARNING if pages < asked // plan.cache.page_size else logging.INFO
    logger.log(level, "The KV cache gets %d pages of %d tokens: %s.", pages, plan.cache.page_size, reason)
    return pages, reason


def _size_swap_space(plan: Plan, specs: Sequence[Specs]) -> int:
    """Return the number of host pages for retracted sequences, the same on all ranks. Log it with the reason."""
    num_pages, reason = min(host_pages(plan, local) for local in specs)
    if reason:
        level = logging.INFO if num_pages else logging.WARNING
        logger.log(level, "--swap-space: %s.", reason)
    return num_pages


def size_tier(plan: Plan, worker: ModelWorker, num_pages: int) -> tuple[int, int]:
    """Return the number of pages of the host tier (the same on all ranks), and the bytes of one page on this rank.

    Raises `ConfigurationError` if the pages do not fit into host memory.
    """
    if not plan.cache.host_tier:
        return 0, 0
    ranks, parallel = _rank_infos(plan), plan.parallel
    sizes = [tier_pages(plan, worker.local_specs(rank), num_pages) for rank in ranks]
    count = min(number for number, _ in sizes)
    # All ranks on this machine share its memory. On a CPU, the KV pool is in the same memory.
    factor = 1 if plan.model.device != "cpu" else 1 + num_pages / count
    here = [page_bytes for _, page_bytes in sizes][parallel.ranks_here.start : parallel.ranks_here.stop]
    needed = int(sum(here) * count * parallel.copies * factor)
    free = Machine.probe().available_bytes
    if needed > free * HOST_SHARE > 0:
        raise ConfigurationError(
            f"--enable-hierarchical-cache needs {needed / GIB:.2f} GiB of host memory, and {free / GIB:.2f} GiB are "
            "free; lower --hicache-ratio, --hicache-size or --max-total-tokens."
        )
    size, page_bytes = plan.cache.page_size, sizes[0][1]
    logger.info("The host tier has %d pages of %d tokens, %.2f GB.", count, size, count * page_bytes / 10**9)
    return count, page_bytes


def log_memory(
    plan: Plan,
    weight_bytes: Mapping[str, int],
    before: Mapping[str, int],
    after: Mapping[str, int],
    kv_bytes: int,
    reason: str,
    steps: StepMemory | None,
) -> None:
    """Log a table of rank 0's memory. `before` and `after` were measured before and after the KV pool was allocated."""
    table = memory_table(
        device=plan.model.device,
        total_bytes=before["total"],
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        kv_reason=reason,
        # On a CPU, the system counts the pool's memory as used only once it is written, so the pool is subtracted here.
        free_bytes=min(after["available"], before["available"] - kv_bytes),
        steps=steps,
    )
    logger.info("%s", table)
