"""One copy of the model, ready to compute: its plan, its scheduler and its runner."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from ops.machine import GIB
from runtime.actors.kv_events import KvEventPublisher
from runtime.batch import Runner
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import Plan
from runtime.distributed.link import encode
from runtime.distributed.worker_group import WorkerGroup, thread_environment
from runtime.errors import CheckpointError, ConfigurationError, EngineFailure, first_error
from runtime.kv_cache.kinds import CacheKind, Specs
from runtime.kv_cache.page_events import PageEvents
from runtime.kv_cache.prefix_cache import PrefixCache
from runtime.kv_cache.registry import make_kinds
from runtime.kv_cache.sizing import StepMemory, check_balance, max_running, memory_table, size_pool
from runtime.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from runtime.worker.model_runner import StepExecutor
    from runtime.worker.worker import CacheSetup, ModelWorker

logger = logging.getLogger("penstock.core")

NO_MEMORY = (
    "There is too little memory for the model and its KV cache; lower --mem-fraction-static or --max-total-tokens, or "
    "end other programs."
)


@dataclass(frozen=True, slots=True)
class Replica:
    """One copy of the model, handed to a scheduler actor, which closes the runner."""

    plan: Plan  # with the number of sequences that its KV pool allows
    scheduler: Scheduler
    runner: Runner
    kv_events: KvEventPublisher | None = None


async def start_replicas(plan: Plan, facts: ModelFacts, indices: Iterable[int]) -> list[Replica]:
    """The replicas with these numbers. Their weights load at the same time; then their KV pools are sized and made
    one after the other, since replicas on one machine share its memory.

    Raises `ConfigurationError` for what only the files themselves show, `WorkerFailed` naming the rank,
    `EngineFailure` for what the system refused. Failed or cancelled, it leaves nothing behind.
    """
    loaders = [_ReplicaLoader(plan, facts, index) for index in indices]
    try:
        async with anyio.create_task_group() as loading:
            for loader in loaders:
                loading.start_soon(loader.load)
        return [await loader.finish() for loader in loaders]
    except BaseException as error:
        with anyio.CancelScope(shield=True):
            for loader in loaders:
                await loader.close()
        cause = first_error(error)
        failure = _start_failure(cause)
        raise failure from (cause.__cause__ if failure is cause else cause)


async def start_replica(plan: Plan, facts: ModelFacts, index: int) -> Replica:
    """As `start_replicas`, one of them."""
    [replica] = await start_replicas(plan, facts, [index])
    return replica


class _ReplicaLoader:
    """One replica on its way: `load`, then `finish`; or `close` at any time, which gives everything back."""

    def __init__(self, plan: Plan, facts: ModelFacts, index: int) -> None:
        self._plan = plan
        self._facts = facts
        self._index = index
        self._group = WorkerGroup()
        self._worker: ModelWorker | None = None
        self._runner: Runner | None = None
        self._kv_events: KvEventPublisher | None = None

    async def load(self) -> None:
        """Start the worker processes and load every rank's weights."""
        from runtime.worker.worker import ModelWorker, WorkerSetup

        plan, facts, group = self._plan, self._facts, self._group
        if plan.observe.kv_events is not None:  # before what takes long
            self._kv_events = KvEventPublisher(plan.observe.kv_events, self._index)
        parallel = plan.parallel
        began = time.monotonic()
        logger.info("Load weight begin. type=%s, from %s", facts.architecture, facts.path)
        environment = _share_processors(plan)
        with _in_time(parallel.join_timeout_s, "join from the other machines"):
            await group.start(parallel, facts, environment)
        own, *others = (
            WorkerSetup.of(plan, facts, rank, self._index * parallel.ranks) for rank in range(parallel.ranks)
        )
        for process, setup in zip(group.workers, others, strict=True):
            process.send(encode({"setup": setup}))
        with _in_time(parallel.join_timeout_s, "load the model"):
            async with anyio.create_task_group() as loading:
                loading.start_soon(group.receive)
                self._worker = worker = await anyio.to_thread.run_sync(ModelWorker, own)
        logger.info(
            "Load weight end. type=%s, dtype=%s, mem usage=%.2f GB, %.1f s",
            facts.architecture,
            plan.model.dtype,
            worker.weight_bytes / GIB,
            time.monotonic() - began,
        )
        logger.info("Kernels: %s", worker.kernels_description)

    async def finish(self) -> Replica:
        """Size and make the KV pools, and the runner, which owns worker and processes from then on."""
        from runtime.distributed.group_runner import GroupRunner
        from runtime.worker.model_runner import ModelRunner

        worker, group = self._worker, self._group
        if worker is None:
            raise RuntimeError("A replica finishes when it has loaded.")
        steps = None
        if worker.device.type == "cuda" and self._plan.parallel.ranks == 1:
            steps = await anyio.to_thread.run_sync(worker.profile_memory, self._plan)
        group.send({"measure": True})
        memory = [
            await anyio.to_thread.run_sync(worker.memory),
            *(body["memory"] for body in await group.receive()),
        ]
        cache, kinds, reason = self._size_cache(worker.cache_specs, memory, steps)
        plan = self._plan
        kv_bytes = await self._join(worker, cache)
        num_tokens = cache.num_pages * cache.page_size
        logger.info("KV Cache is allocated. #tokens: %d, %.2f GB", num_tokens, kv_bytes / GIB)
        after = await anyio.to_thread.run_sync(worker.memory)
        _log_memory(plan, memory[0], after, kv_bytes, reason, steps)
        prefixes = PrefixCache(
            cache.num_pages,
            plan.cache.page_size,
            enabled=plan.cache.prefix_cache,
            kinds=kinds,
            events=PageEvents(plan.cache.page_size) if self._kv_events is not None else None,
        )
        scheduler = Scheduler(
            plan.scheduler,
            prefixes,
            vocab_size=self._facts.vocab_size,
            context_length=plan.model.context_length,
        )
        executor = await self._lead(worker)
        runner = ModelRunner(executor, kernels_description=worker.kernels_description)
        self._runner = GroupRunner(runner, group, worker.mesh) if group.workers else runner
        return Replica(plan, scheduler, self._runner, self._kv_events)

    def _size_cache(
        self, specs: Specs, memory: Sequence[Mapping[str, int]], steps: StepMemory | None
    ) -> tuple[CacheSetup, list[CacheKind], str]:
        """What the pools hold on every rank, and why. The plan learns how many sequences fit into them."""
        from runtime.distributed.mesh import RankInfo
        from runtime.worker.worker import CacheSetup

        plan, parallel = self._plan, self._plan.parallel
        ranks = [
            RankInfo(rank=rank, tp_size=parallel.tp_size, pp_size=parallel.pp_size)
            for rank in range(parallel.ranks)
        ]
        local = [rank.local_specs(specs, self._facts.num_layers) for rank in ranks]
        pages, reason = _size(plan, local, memory, steps)
        plan = replace(plan, scheduler=replace(plan.scheduler, max_running=max_running(plan, pages)))
        kinds = make_kinds(specs, plan, pages)
        limits = [plan.scheduler.max_running, *(kind.max_sequences for kind in kinds if kind.max_sequences)]
        self._plan = replace(plan, scheduler=replace(plan.scheduler, max_running=min(limits)))
        cache = CacheSetup(
            num_pages=pages,
            page_size=plan.cache.page_size,
            kv_dtype=plan.cache.kv_dtype,
            num_sequences=min(limits),
            kinds={kind.name: kind.count for kind in kinds},
        )
        also = "".join(f", {count} for {name} layers" for name, count in cache.kinds.items())
        reason = f"{pages} pages{also} of {cache.page_size} tokens in {cache.kv_dtype}: {reason}"
        return cache, kinds, reason

    async def close(self) -> None:
        """Give everything back, however far it came."""
        if self._kv_events is not None:
            await anyio.to_thread.run_sync(self._kv_events.close)
        if self._runner is not None:
            await anyio.to_thread.run_sync(self._runner.close)
            return
        await self._group.close()
        if self._worker is not None:
            await anyio.to_thread.run_sync(self._worker.close)

    async def _join(self, worker: ModelWorker, cache: CacheSetup) -> int:
        """Have all ranks meet and make their pools -> the bytes of rank 0's."""
        plan, group = self._plan, self._group
        if not group.workers:
            return await anyio.to_thread.run_sync(worker.join, cache, None)
        timeout_s = max(plan.parallel.join_timeout_s, plan.scheduler.watchdog_timeout_s)
        rendezvous, listening = group.open_rendezvous(plan.parallel, timeout_s)
        group.send({"join": {"rendezvous": rendezvous, "cache": cache}})
        with _in_time(plan.parallel.join_timeout_s, "meet"):
            async with anyio.create_task_group() as joining:
                joining.start_soon(group.receive)
                join = partial(worker.join, cache, rendezvous, listening=listening)
                kv_bytes = await anyio.to_thread.run_sync(join, abandon_on_cancel=True)
        return kv_bytes

    async def _lead(self, worker: ModelWorker) -> StepExecutor:
        """Have all ranks make ready for steps, together -> those of rank 0."""
        plan, group = self._plan, self._group
        if not group.workers:
            return await anyio.to_thread.run_sync(worker.lead, plan)
        with _in_time(plan.parallel.join_timeout_s, "capture their CUDA graphs"):
            async with anyio.create_task_group() as preparing:
                preparing.start_soon(group.receive)
                executor = await anyio.to_thread.run_sync(worker.lead, plan, abandon_on_cancel=True)
        return executor


def _share_processors(plan: Plan) -> dict[str, str]:
    """Set how many threads this process computes with, and return what others are started with."""
    environment = thread_environment(plan)
    if environment:
        import torch

        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    return environment


def _start_failure(error: BaseException) -> BaseException:
    """What to raise when a replica cannot start: what the system refused becomes an error of ours."""
    import torch
    from safetensors import SafetensorError

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return EngineFailure(NO_MEMORY)
    if isinstance(error, RuntimeError) and "allocate memory" in str(error):  # torch's word for it on a CPU
        return EngineFailure(NO_MEMORY)
    if isinstance(error, SafetensorError):
        return CheckpointError(f"The weights cannot be read: {error}.")
    if isinstance(error, OSError | RuntimeError):
        return EngineFailure("The model could not be started.")
    return error


@contextmanager
def _in_time(seconds: float, what: str) -> Iterator[None]:
    """Turn too long a wait into a refusal that says what to do."""
    try:
        with anyio.fail_after(seconds):
            yield
    except TimeoutError as error:
        raise ConfigurationError(
            f"The ranks did not {what} within {seconds:g} s; see --dist-timeout."
        ) from error


def _log_memory(
    plan: Plan,
    before: Mapping[str, int],
    after: Mapping[str, int],
    kv_bytes: int,
    reason: str,
    steps: StepMemory | None,
) -> None:
    """One table of rank 0's memory, before and after its pool was made."""
    table = memory_table(
        device=plan.model.device,
        total_bytes=before["total"],
        weight_bytes=before["weights"],
        kv_bytes=kv_bytes,
        kv_reason=reason,
        # A pool of zeros takes real memory only as it is written.
        free_bytes=min(after["available"], before["available"] - kv_bytes),
        steps=steps,
    )
    logger.info("%s", table)


def _size(
    plan: Plan, specs: Sequence[Specs], memory: Sequence[Mapping[str, int]], steps: StepMemory | None
) -> tuple[int, str]:
    """Pages of the KV pool, now that the weights are in place: what the rank with the least room can hold.

    Raises `ConfigurationError` where other programs take much more of one GPU than of the others.
    """
    parallel = plan.parallel
    on_cpu = plan.model.device == "cpu"
    # Ranks of one machine share its memory; each replica counts only itself as there.
    sharing = parallel.ranks * parallel.dp_size if on_cpu else 1
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
