"""Starts replicas: copies of the model, each with its plan, scheduler and runner."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from ops.cpp.build import Lifeline
from ops.machine import GIB
from runtime.actors.cache_sizes import log_memory, size_cache, size_tier
from runtime.actors.expert_balancer import ExpertBalancer
from runtime.actors.kernel_compilation import KernelCompilation, cut_if_cancelled
from runtime.actors.kv_events import KvEventPublisher
from runtime.actors.storage import Storage
from runtime.batch import Runner
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import Plan
from runtime.config.resolve.cache import plan_of_replica
from runtime.config.resolve.drafts import draft_model_plan
from runtime.distributed.common_steps import CommonSteps
from runtime.distributed.link import encode
from runtime.distributed.worker_group import WorkerGroup, thread_environment
from runtime.errors import (
    NO_MEMORY_TO_START,
    CheckpointError,
    ConfigurationError,
    EngineFailure,
    OutOfMemory,
    first_error,
)
from runtime.kv_cache.kinds import CacheKind
from runtime.kv_cache.page_events import PageEvents
from runtime.kv_cache.prefix_cache import PrefixCache
from runtime.kv_cache.registry import make_kinds
from runtime.kv_cache.storage_tier import StorageTier
from runtime.loading.draft_facts import read_draft_facts
from runtime.page_store.offered_pages import LocalPages
from runtime.replay.recorder import RecordedScheduler, RecordWriter
from runtime.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from runtime.worker.model_runner import StepExecutor
    from runtime.worker.worker import ModelWorker
    from runtime.worker.worker_setup import CacheSetup

logger = logging.getLogger("penstock.core")

STEP_BYTES = 2**24  # bytes that one step can copy to the host tier without delaying the step noticeably
PREFETCH_THRESHOLD = 256  # the page store is not asked if fewer prompt tokens than this are missing from the cache

# Substrings of error messages that mean too little memory. PyTorch and CUDA's libraries do not always raise an
# OutOfMemoryError.
MEMORY_ERRORS = ("allocate memory", "out of memory", "STATUS_ALLOC_FAILED")


@dataclass(frozen=True, slots=True)
class Replica:
    """One copy of the model, with its scheduler and runner. Its scheduler actor, once made, closes the runner."""

    plan: Plan  # its `max_running` is reduced to what the KV pool allows
    scheduler: Scheduler
    runner: Runner
    kv_events: KvEventPublisher | None = None
    storage: Storage | None = None
    balancer: ExpertBalancer | None = None
    compilation: KernelCompilation | None = None  # None: the kernels of the replica will not change
    lacks_kernels: bool = False  # whether PyTorch computes all steps because the C++ kernels cannot be compiled

    async def close(self) -> None:
        """Release everything, if no scheduler actor has been made for the replica."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.runner.close)
            if self.kv_events is not None:
                await anyio.to_thread.run_sync(self.kv_events.close)


async def start_replicas(
    plan: Plan, facts: ModelFacts, indices: Iterable[int], local_pages: LocalPages | None = None
) -> list[Replica]:
    """Start the replicas with these indices. Replicas of an engine share `local_pages`.

    Their weights are loaded concurrently. Their KV pools are sized and allocated one after another, because replicas on
    one machine share its memory. Raises `ConfigurationError` if an option does not fit the checkpoint, `WorkerFailed`
    with the rank if a worker fails, and `EngineFailure` if the system lacks a resource. On failure or cancellation,
    everything that was started is released.
    """
    if plan.parallel.dp_attention:
        indices = [0]  # with data-parallel attention, one loader starts the ranks of all replicas
    loaders = [_ReplicaLoader(plan, facts, index, {} if local_pages is None else local_pages) for index in indices]
    try:
        async with anyio.create_task_group() as loading:
            for loader in loaders:
                loading.start_soon(loader.load)
        return [replica for loader in loaders for replica in await loader.finish()]
    except BaseException as error:
        with anyio.CancelScope(shield=True):
            for loader in loaders:
                await loader.close()
        cause = first_error(error)
        failure = _start_failure(cause)
        raise failure from (cause.__cause__ if failure is cause else cause)


def _with_refusal(plan: Plan, refusal: str) -> Plan:
    """Return the plan with media turned off if `refusal`, the loaded model's reason to refuse them, is not empty.

    Raises CheckpointError if the user asked for media.
    """
    if not refusal:
        return plan
    if plan.media.required:
        raise CheckpointError(f"{refusal} Start with --enable-multimodal false to serve texts.")
    logger.warning("Images are refused: %s", refusal)
    return replace(plan, media=replace(plan.media, enabled=False, refusal=refusal.rstrip(".")))


async def start_replica(plan: Plan, facts: ModelFacts, index: int, local_pages: LocalPages | None = None) -> Replica:
    """Start the replica with this index. Raises the same errors as `start_replicas`."""
    [replica] = await start_replicas(plan, facts, [index], local_pages)
    return replica


class _ReplicaLoader:
    """Starts one replica: first `load`, then `finish`. `close` may be called at any time and releases everything."""

    def __init__(self, plan: Plan, facts: ModelFacts, index: int, local_pages: LocalPages) -> None:
        self._plan = plan_of_replica(plan, index)
        self._facts = facts
        self._index = index
        self._local_pages = local_pages
        self._group = WorkerGroup()
        self._worker: ModelWorker | None = None
        self._runner: Runner | None = None
        self._kv_events: list[KvEventPublisher] = []

    async def load(self) -> None:
        """Start the worker processes, and load the weights of every rank."""
        from runtime.loading.expert_places import read_expert_places
        from runtime.worker.worker import ModelWorker
        from runtime.worker.worker_setup import DRAFT, TARGET, ModelSetup, WorkerSetup

        plan, facts, group = self._plan, self._facts, self._group
        # Created before the weights are loaded, so that its errors appear immediately.
        if plan.observe.kv_events is not None:
            for number in range(plan.parallel.num_groups):
                self._kv_events.append(KvEventPublisher(plan.observe.kv_events, self._index + number))
        parallel = plan.parallel
        began = time.monotonic()
        logger.info("Load weight begin. type=%s, from %s", facts.architecture, facts.path)
        environment = _share_processors(plan)
        with _in_time(parallel.join_timeout_s, "join from the other machines"):
            await group.start(parallel, facts, environment)
        models = {TARGET: ModelSetup(facts, plan.model, takes_media=plan.media.enabled)}
        if plan.draft.path is not None:
            models[DRAFT] = ModelSetup(
                read_draft_facts(plan.draft, facts), draft_model_plan(plan), whole=parallel.ranks > 1
            )
        places = await anyio.to_thread.run_sync(read_expert_places, plan, facts)
        own, *others = (
            WorkerSetup.of(plan, models, rank, self._index * parallel.ranks, places) for rank in range(parallel.ranks)
        )
        for process, setup in zip(group.workers, others, strict=True):
            process.send(encode({"setup": setup}))
        with _in_time(parallel.join_timeout_s, "load the model"), Lifeline() as lifeline:
            async with anyio.create_task_group() as loading, cut_if_cancelled(lifeline):
                loading.start_soon(group.receive)
                self._worker = worker = await anyio.to_thread.run_sync(ModelWorker, own, lifeline)
        logger.info(
            "Load weight end. type=%s, dtype=%s, mem usage=%.2f GB, %.1f s",
            facts.architecture,
            plan.model.dtype,
            sum(worker.weight_bytes.values()) / GIB,
            time.monotonic() - began - lifeline.build_s,
        )
        logger.info("Kernels: %s", worker.kernels_description)
        self._plan = _with_refusal(plan, worker.media_refusal)

    async def finish(self) -> list[Replica]:
        """Size and allocate the KV pools, and create the runner. The runner then owns the worker and its processes.

        Returns one replica, or one for each attention group (data-parallel attention).
        """
        from runtime.distributed.group_runner import GroupRunner
        from runtime.worker.model_runner import ModelRunner

        worker, group = self._worker, self._group
        if worker is None:
            raise RuntimeError("load() must complete before finish().")
        steps = None
        if worker.device.type == "cuda" and self._plan.parallel.ranks == 1:
            steps = await anyio.to_thread.run_sync(worker.profile_memory, self._plan)
        group.send({"measure": True})
        memory = [
            await anyio.to_thread.run_sync(worker.memory),
            *(body["memory"] for body in await group.receive()),
        ]
        # The new plan's `max_running` is limited to what the pools allow.
        self._plan, cache, kinds, reason = size_cache(self._plan, worker, memory, steps)
        plan = self._plan
        num_tier_pages, page_bytes = size_tier(plan, worker, cache.num_pages)
        cache = replace(cache, num_host_pages=cache.num_host_pages + num_tier_pages, num_tier_pages=num_tier_pages)
        kv_bytes = await self._join(worker, cache)
        num_tokens = cache.num_pages * cache.page_size
        logger.info("KV Cache is allocated. #tokens: %d, %.2f GB", num_tokens, kv_bytes / GIB)
        after = await anyio.to_thread.run_sync(worker.memory)
        log_memory(plan, worker.weight_bytes, memory[0], after, kv_bytes, reason, steps)
        restore_s = await anyio.to_thread.run_sync(worker.restore_s) if num_tier_pages else None
        executor = await self._lead(worker)
        if executor.rank.pages is not None:
            executor.rank.pages.local_pages = self._local_pages
        common = worker.common_leader
        runner = ModelRunner(executor, kernels_description=worker.kernels_description, common=common)
        self._runner = runner
        runners: list[Runner] = [runner]
        if group.workers:
            self._runner = together = GroupRunner(runner, group, worker.mesh)
            runners = [together]
            if common is not None:
                parallel, depth = plan.parallel, 1 + plan.scheduler.overlap
                steps = CommonSteps(together, parallel.num_groups, parallel.attention_ranks, depth)
                runners = [*steps.replicas]
        replicas = []
        for index, replica_runner in enumerate(runners):
            own_kinds = make_kinds(worker.cache_specs, plan, cache.num_pages) if index else kinds
            prefixes = self._prefixes(cache, own_kinds, num_tier_pages, page_bytes, restore_s)
            scheduler = self._make_scheduler(
                index, prefixes, cache.num_host_pages - num_tier_pages, num_tier_pages, page_bytes
            )
            replicas.append(self._replica(worker, index, scheduler, replica_runner))
        return replicas

    def _prefixes(
        self,
        cache: CacheSetup,
        kinds: list[CacheKind],
        num_tier_pages: int,
        page_bytes: int,
        restore_s: float | None,
    ) -> PrefixCache:
        """Create the prefix cache of a replica.

        `restore_s` is the time in seconds to copy one page from the host tier to the device, or None if unknown.
        """
        plan = self._plan
        prefixes = PrefixCache(
            cache.num_pages,
            plan.cache.page_size,
            enabled=plan.cache.prefix_cache,
            kinds=kinds,
            events=PageEvents(plan.cache.page_size) if self._kv_events else None,
            num_host_pages=cache.num_host_pages - num_tier_pages,
            num_tier_pages=num_tier_pages,
            write_policy=plan.cache.write_policy,
            step_pages=_step_pages(page_bytes),
            num_pinnable=int(plan.cache.pin_share * cache.num_pages),
        )
        if prefixes.tier is not None:
            prefixes.tier.copy_s = restore_s
            if plan.cache.host_layout != "layer_first":
                threshold = plan.cache.storage_config.get("prefetch_threshold", PREFETCH_THRESHOLD)
                prefixes.storage = StorageTier(
                    prefixes.tier,
                    waits=plan.cache.prefetch_policy != "best_effort",
                    min_pages=max(1, int(threshold) // plan.cache.page_size),
                    saves=plan.cache.storage != "decode",
                    loads=plan.cache.storage != "prefill",
                    # Fetch prompts even if computing them is faster: computing would delay running requests.
                    prefilled_only=plan.cache.storage == "decode",
                    is_awaited=plan.cache.storage == "prefill",
                )
        return prefixes

    def _replica(self, worker: ModelWorker, group: int, scheduler: Scheduler, runner: Runner) -> Replica:
        from runtime.worker.model_runner import ModelRunner

        plan = self._plan
        storage = None
        if scheduler.storage is not None:
            layout = _layout(plan, worker)
            storage = Storage(plan, self._facts.path, layout, scheduler.storage, scheduler, runner, self._local_pages)
        balancer = None
        # Attention groups share one set of experts, so only the first group balances them.
        if plan.experts.balance and group == 0 and self._runner is not None:
            balancer = ExpertBalancer(
                plan.experts,
                self._runner,
                num_nodes=plan.parallel.stage_nodes,
                num_groups=self._facts.num_expert_groups,
            )
        compilation = None
        if worker.compiles_later and isinstance(runner, ModelRunner):
            compilation = KernelCompilation(runner, lambda lifeline: worker.lead_in_cpp(plan, runner.pool, lifeline))
        events = self._kv_events[group] if self._kv_events else None
        return Replica(plan, scheduler, runner, events, storage, balancer, compilation, worker.lacks_kernels)

    def _make_scheduler(
        self, group: int, prefixes: PrefixCache, num_host_pages: int, num_tier_pages: int, page_bytes: int
    ) -> Scheduler:
        """Create the scheduler of an attention group.

        If the plan names a record file, its decisions are recorded there.
        """
        plan = self._plan
        sizes = {"vocab_size": self._facts.vocab_size, "context_length": plan.model.context_length}
        if plan.scheduler.record_file is None:
            return Scheduler(plan.scheduler, prefixes, **sizes)
        several = plan.parallel.dp_size > 1
        try:
            writer = RecordWriter(plan.scheduler.record_file + (f".{self._index + group}" if several else ""))
        except OSError as error:
            raise ConfigurationError(f"--record: {error}.") from error
        logger.info("The schedule is recorded to %s, with the token ids of all requests.", writer.path)
        return RecordedScheduler(
            plan.scheduler,
            prefixes,
            writer,
            num_host_pages=num_host_pages,
            num_tier_pages=num_tier_pages,
            write_policy=plan.cache.write_policy,
            step_pages=_step_pages(page_bytes),
            **sizes,
        )

    async def close(self) -> None:
        """Release everything that was started so far."""
        for publisher in self._kv_events:
            await anyio.to_thread.run_sync(publisher.close)
        if self._runner is not None:
            await anyio.to_thread.run_sync(self._runner.close)
            return
        await self._group.close()
        if self._worker is not None:
            await anyio.to_thread.run_sync(self._worker.close)

    async def _join(self, worker: ModelWorker, cache: CacheSetup) -> int:
        """Let all ranks join the process group and allocate their KV pools. Return the bytes of rank 0's pool."""
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
        """Let all ranks prepare for steps at the same time (graph capture). Return rank 0's executor."""
        from runtime.worker.worker_setup import TARGET

        plan, group = self._plan, self._group
        if not group.workers:
            return await anyio.to_thread.run_sync(worker.lead, plan, TARGET)
        with _in_time(plan.parallel.join_timeout_s, "capture their CUDA graphs"):
            async with anyio.create_task_group() as preparing:
                preparing.start_soon(group.receive)
                executor = await anyio.to_thread.run_sync(worker.lead, plan, TARGET, abandon_on_cancel=True)
        return executor


def _step_pages(page_bytes: int) -> int:
    """Return the number of pages that one step can copy to the host tier without delaying the step noticeably."""
    return max(1, STEP_BYTES // max(1, page_bytes))


def _layout(plan: Plan, worker: ModelWorker) -> str:
    """Return a text that identifies the layout of stored pages. Equal texts mean compatible pages."""
    specs = sorted((str(name), repr(spec)) for name, spec in worker.cache_specs.items())
    parallel, cache = plan.parallel, plan.cache
    num_ranks = 1 if cache.same_pages else parallel.attention_ranks
    sizes = (cache.page_size, cache.kv_dtype, num_ranks, parallel.pp_size)
    return repr((*sizes, plan.draft.path, specs))


def _share_processors(plan: Plan) -> dict[str, str]:
    """Set the number of CPU threads of this process. Return environment variables for the worker processes."""
    environment = thread_environment(plan)
    if environment:
        import torch

        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    return environment


def _start_failure(error: BaseException) -> BaseException:
    """Return the error to raise when a replica cannot start. Errors of the operating system become `PenstockError`s."""
    import torch
    from safetensors import SafetensorError

    if isinstance(error, torch.OutOfMemoryError | MemoryError | OutOfMemory):
        return EngineFailure(NO_MEMORY_TO_START)
    if isinstance(error, RuntimeError) and any(text in str(error) for text in MEMORY_ERRORS):
        return EngineFailure(NO_MEMORY_TO_START)
    if isinstance(error, SafetensorError):
        return CheckpointError(f"The weights cannot be read: {error}.")
    if isinstance(error, OSError | RuntimeError):
        return EngineFailure("The model could not be started.")
    return error


@contextmanager
def _in_time(seconds: float, what: str) -> Iterator[None]:
    """Raise `ConfigurationError` with advice if the block takes longer than `seconds`. `what` names the work."""
    try:
        with anyio.fail_after(seconds):
            yield
    except TimeoutError as error:
        raise ConfigurationError(f"The ranks did not {what} within {seconds:g} s; see --dist-timeout.") from error
