"""One copy of the model, ready to compute: its plan, its schedule and its runner."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import anyio

from ops.machine import GIB
from runtime.batch import Runner
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import Plan
from runtime.errors import first_error
from runtime.kv_cache.prefix_cache import PrefixCache
from runtime.kv_cache.sizing import StepMemory, check_balance, max_running, memory_table, size_pool
from runtime.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from runtime.distributed.worker_group import Crew

logger = logging.getLogger("penstock.core")


class DeviceRunner(Runner, Protocol):
    """A runner that the core owns, watches and closes."""

    async def watch(self) -> None:
        """Never returns; raises `WorkerFailed` when a process that it needs is gone."""
        ...

    def close(self) -> None:
        """Finish what was launched and give everything back. Blocks; `watch` has ended before."""
        ...


@dataclass(frozen=True, slots=True)
class Replica:
    """Belongs to the core, which closes the runner."""

    plan: Plan  # with the number of sequences that its KV pool allows
    schedule: Scheduler
    runner: DeviceRunner


async def start_replica(plan: Plan, facts: ModelFacts, place: int = 0) -> Replica:
    """Load the weights, on every rank, and size and make the KV pool of the replica with this number.

    Raises `ConfigurationError` for what only the files themselves show, `WorkerFailed` naming the rank.
    Failed or cancelled, it leaves nothing behind.
    """
    from runtime.distributed.worker_group import Crew

    crew = Crew(plan, facts, place * plan.parallel.ranks)
    try:
        began = time.monotonic()
        memory = await crew.load()
        logger.info(
            "Load weight end. type=%s, dtype=%s, mem usage=%.2f GB, %.1f s",
            facts.architecture,
            plan.model.dtype,
            memory[0]["weights"] / GIB,
            time.monotonic() - began,
        )
        pages, because = _size(plan, facts, memory, crew.steps)
        plan = replace(plan, schedule=replace(plan.schedule, max_running=max_running(plan, pages)))
        pool = await crew.join(pages, plan.schedule.max_running)
        logger.info(
            "KV Cache is allocated. #tokens: %d, %.2f GB", pages * plan.cache.page_size, pool.nbytes / GIB
        )
        _log_memory(
            plan,
            memory[0],
            pool.nbytes,
            f"{pages} pages of {plan.cache.page_size} tokens in {plan.cache.kv_dtype}: {because}",
            crew,
        )
        schedule = Scheduler(
            plan.schedule,
            PrefixCache(pages, plan.cache.page_size, enabled=plan.cache.prefix_cache),
            vocab_size=facts.vocab_size,
            context_length=plan.model.context_length,
        )
        return Replica(plan, schedule, await crew.lead(pool, plan.schedule.max_running))
    except BaseException as error:
        with anyio.CancelScope(shield=True):
            await crew.close()
        raise first_error(error) from None


def _log_memory(plan: Plan, before: Mapping[str, int], kv_bytes: int, because: str, crew: Crew) -> None:
    """One table of the first rank's memory, now that weights and pool are in place."""
    own = crew.member.memory() if crew.member is not None else before
    table = memory_table(
        device=plan.model.device,
        total_bytes=before["total"],
        weight_bytes=before["weights"],
        kv_bytes=kv_bytes,
        kv_reason=because,
        # A pool of zeros takes real memory only as it is written.
        free_bytes=min(own["available"], before["available"] - kv_bytes),
        steps=crew.steps,
    )
    logger.info("%s", table)


def _size(
    plan: Plan, facts: ModelFacts, memory: Sequence[Mapping[str, int]], steps: StepMemory | None
) -> tuple[int, str]:
    """Pages of the KV pool, now that the weights are in place: what the rank with the least room can hold.

    Raises `ConfigurationError` where other programs take much more of one GPU than of the others.
    """
    from runtime.distributed.mesh import Place

    parallel = plan.parallel
    on_cpu = plan.model.device == "cpu"
    # Ranks of one machine share its memory; each replica counts only itself as there.
    sharing = parallel.ranks * parallel.dp_size if on_cpu else 1
    check_balance([] if on_cpu else [own["available"] for own in memory])
    sizes = [
        size_pool(
            plan,
            Place(rank=rank, tp_size=parallel.tp_size, pp_size=parallel.pp_size).local(facts),
            available_bytes=own["available"] // sharing,
            total_bytes=own["total"] // sharing,
            weight_bytes=own["weights"],
            steps=steps,
        )
        for rank, own in enumerate(memory)
    ]
    pages, because = min(sizes)
    asked = plan.cache.max_total_tokens or 0
    level = logging.WARNING if pages < asked // plan.cache.page_size else logging.INFO
    logger.log(level, "The KV cache gets %d pages of %d tokens: %s.", pages, plan.cache.page_size, because)
    return pages, because
