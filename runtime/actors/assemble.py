"""Builds an engine core from the arguments. The tokenizer and the weights are loaded concurrently on threads."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.to_thread

from ops.machine import Machine
from runtime.actors.engine_core import EngineCore
from runtime.actors.replica import Replica, start_replica, start_replicas
from runtime.actors.tracing import RequestTraces
from runtime.config import Args, without_effect
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import DraftPlan, LoraPlan, Plan, TokenizerPlan
from runtime.config.resolve import check, resolve
from runtime.config.resolve.drafts import check_draft_model
from runtime.config.resolve.lora import LEAST_MAX_RANK
from runtime.errors import CheckpointError, first_error
from runtime.loading.adapter_config import read_config
from runtime.loading.checkpoint import delete, locate, stored_as
from runtime.loading.draft_facts import read_draft_facts
from runtime.loading.facts import check_serves, read_facts
from runtime.media.preparation import MediaPreparer
from runtime.media.transcription import Transcriber
from runtime.page_store.offered_pages import LocalPages
from runtime.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger("penstock.core")
NOT_LOADED = "the model's image encoder could not be loaded; the server's log says why"


def prepare(args: Args, machine: Machine, *, demo_path: str | None = None) -> tuple[Plan, ModelFacts]:
    """Read the checkpoint's configuration and resolve the plan, before any weights are read.

    Does not import torch. If the path is a Hub id, the checkpoint is downloaded first. Raises `ConfigurationError` with
    all refused options at once, and `CheckpointError` if the files are not a model.
    """
    path = check(args, machine, demo_path=demo_path)
    weights = args.model.load_format != "dummy"
    directory = locate(path, args.model.revision, args.model.download_dir, weights=weights, load_format=stored_as(args))
    facts = read_facts(directory, args.model.json_model_override_args, model_impl=args.model.model_impl)
    check_serves(facts)
    for sentence in without_effect(args).values():
        logger.warning(sentence)
    plan = resolve(args, machine, facts, demo_path=demo_path)
    if args.schedule.chunked_prefill_size not in (None, -1, plan.scheduler.chunk_tokens):
        logger.info("--chunked-prefill-size: %s.", plan.scheduler.reasons["chunk_tokens"])
    tokenizer, lora = _with_local_tokenizer(plan.tokenizer, args), _with_local_adapters(plan.lora, args)
    plan = replace(plan, tokenizer=tokenizer, lora=lora)
    return replace(plan, draft=_with_local_draft(plan, facts, args)), facts


def _with_local_tokenizer(text: TokenizerPlan, args: Args) -> TokenizerPlan:
    if args.text.tokenizer_path is None:
        return text
    directory = locate(args.text.tokenizer_path, text.revision, args.model.download_dir, weights=False)
    return replace(text, tokenizer_path=directory)


def _with_local_adapters(lora: LoraPlan, args: Args) -> LoraPlan:
    """Return a plan in which every adapter is a folder on this machine. Adapters elsewhere are downloaded.

    If no maximum rank is set, the plan gets the largest rank of the adapters.
    """
    sources = [replace(each, path=locate(each.path, None, args.model.download_dir)) for each in lora.sources]
    ranks = [read_config(Path(source.path)).rank for source in sources]
    return replace(lora, sources=tuple(sources), max_rank=lora.max_rank or max(LEAST_MAX_RANK, *ranks, 1))


def _with_local_draft(plan: Plan, facts: ModelFacts, args: Args) -> DraftPlan:
    """Return a plan in which the draft model is a folder on this machine. Downloads it if necessary.

    Raises `ConfigurationError` if the draft model does not fit the model.
    """
    draft = plan.draft
    if draft.algorithm == "NEXTN" and draft.path is None:
        draft = replace(draft, path=facts.path)
    if draft.path is None:
        return draft
    weights = args.model.load_format != "dummy"
    path = locate(draft.path, draft.revision, args.model.download_dir, weights=weights)
    draft = replace(draft, path=path)
    check_draft_model(plan, facts, read_draft_facts(draft, facts))
    return draft


async def assemble(plan: Plan, facts: ModelFacts) -> EngineCore:
    """Load the tokenizer and the weights of all replicas concurrently, size the KV pools, and build the core.

    Must be called on the event loop. Raises `ConfigurationError` if an option does not fit the checkpoint, and
    `EngineFailure` if the system lacks a resource (memory, ports, processes). On failure or cancellation, everything
    that was started is released.
    """
    began_s = time.monotonic()
    tokenizer: Tokenizer | None = None

    async def load_tokenizer() -> None:
        nonlocal tokenizer
        if plan.tokenizer.tokenizer_path is not None:
            tokenizer = await anyio.to_thread.run_sync(Tokenizer.load, plan.tokenizer, facts)

    endpoint = plan.observe.trace_endpoint
    # Traces are created before the replicas, so that a wrong endpoint or a missing package is reported immediately.
    traces = RequestTraces(endpoint) if endpoint is not None else None
    replicas: list[Replica] = []
    local_pages: LocalPages = {}
    whisper = plan.media.transcription_model
    try:
        media = await _load_media(plan, facts)
        if media is None and plan.media.enabled:
            plan = replace(plan, media=replace(plan.media, enabled=False, refusal=NOT_LOADED))
        transcriber = await anyio.to_thread.run_sync(Transcriber.load, whisper, plan) if whisper else None
        async with anyio.create_task_group() as loading:
            loading.start_soon(load_tokenizer)
            replicas += await start_replicas(plan, facts, range(plan.parallel.dp_size), local_pages)
    except BaseException as error:
        with anyio.CancelScope(shield=True):
            for replica in replicas:
                await replica.close()
            if traces is not None:
                await anyio.to_thread.run_sync(traces.close)
        cause = first_error(error)
        raise cause from cause.__cause__
    given = plan

    # `core.plan` names the weights that are served now; after a weight update they differ from the weights in `given`.
    async def restart(index: int) -> Replica:
        return await start_replica(replace(given, model=core.plan.model), core.facts, index, local_pages)

    plan = replicas[0].plan
    if not plan.media.enabled:  # media were turned off after loading, because the language model refuses them
        media = None
    if plan.parallel.prefill_replicas:  # replica 0's plan names its own storage; the engine's plan has none
        plan = replace(plan, cache=replace(plan.cache, storage=None, storage_config=given.cache.storage_config))
    logger.info(
        "tool_call_parser=%s (%s), reasoning_parser=%s (%s)",
        plan.tokenizer.tool_call_parser,
        plan.tokenizer.reasons.get("tool_call_parser", ""),
        plan.tokenizer.reasoning_parser,
        plan.tokenizer.reasons.get("reasoning_parser", ""),
    )
    logger.info(
        "max_total_num_tokens=%d, chunked_prefill_size=%s, max_prefill_tokens=%d, max_running_requests=%d, "
        "context_len=%d",
        sum(replica.scheduler.load.num_pages for replica in replicas) * plan.cache.page_size,
        plan.scheduler.chunk_tokens,
        plan.scheduler.max_prefill_tokens,
        plan.scheduler.max_running,
        plan.model.context_length,
    )
    if plan.model.delete_after_loading:
        await anyio.to_thread.run_sync(_delete, plan.model.path)
    start_again = restart if plan.parallel.copies > 1 else None
    core = EngineCore(plan, facts, tokenizer, replicas, start_again, traces, media, transcriber)
    if core.metrics is not None:
        core.metrics.startup_s = time.monotonic() - began_s
    return core


async def _load_media(plan: Plan, facts: ModelFacts) -> MediaPreparer | None:
    """Load the media processor and encoders.

    If they cannot be loaded and the user did not request them, log the reason and return None.
    """
    if not plan.media.enabled:
        return None
    try:
        return await anyio.to_thread.run_sync(MediaPreparer.load, plan, facts)
    except CheckpointError as error:
        if plan.media.required:
            raise
        logger.warning("Images are refused: %s", error)
        return None


def _delete(path: str) -> None:
    try:
        delete(path)
        logger.info("Deleted the checkpoint %s (--delete-ckpt-after-loading).", path)
    except OSError as error:
        logger.warning("The checkpoint %s could not be deleted: %s", path, error)
