"""From the arguments to an engine core that can run. The heavy parts go to threads, side by side."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from functools import partial

import anyio
import anyio.to_thread

from ops.machine import Machine
from runtime.actors.engine_core import EngineCore
from runtime.actors.replica import Replica, start_replica, start_replicas
from runtime.actors.tracing import RequestTraces
from runtime.config import Args, without_effect
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import Plan, TokenizerPlan
from runtime.config.resolve import check, resolve
from runtime.errors import first_error
from runtime.models.checkpoint import delete, locate, stored_as
from runtime.models.config import read_facts
from runtime.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger("penstock.core")


def prepare(args: Args, machine: Machine, *, demo_path: str | None = None) -> tuple[Plan, ModelFacts]:
    """Read the checkpoint's configuration and decide all that can be decided before weights are read.

    Torch-free; downloads the checkpoint when it names a Hub id. Raises `ConfigurationError` with every
    refusal at once, `CheckpointError` for files that are no model.
    """
    path = check(args, machine, demo_path=demo_path)
    weights = args.model.load_format != "dummy"
    directory = locate(
        path, args.model.revision, args.model.download_dir, weights=weights, load_format=stored_as(args)
    )
    facts = read_facts(directory, args.model.json_model_override_args, model_impl=args.model.model_impl)
    for sentence in without_effect(args).values():
        logger.warning(sentence)
    plan = resolve(args, machine, facts, demo_path=demo_path)
    if args.schedule.chunked_prefill_size not in (None, -1, plan.scheduler.chunk_tokens):
        logger.info("--chunked-prefill-size: %s.", plan.scheduler.reasons["chunk_tokens"])
    return replace(plan, tokenizer=_with_local_tokenizer(plan.tokenizer, args)), facts


def _with_local_tokenizer(text: TokenizerPlan, args: Args) -> TokenizerPlan:
    if args.text.tokenizer_path is None:
        return text
    directory = locate(args.text.tokenizer_path, text.revision, args.model.download_dir, weights=False)
    return replace(text, tokenizer_path=directory)


async def assemble(plan: Plan, facts: ModelFacts) -> EngineCore:
    """Load the tokenizer and the weights of all replicas at the same time, size the KV pools, and put the core
    together. Call it on the loop.

    Raises `ConfigurationError` for what only the files themselves show, `EngineFailure` for what the system refused.
    Failed or cancelled, it leaves nothing behind.
    """
    began_s = time.monotonic()
    tokenizer: Tokenizer | None = None

    async def load_tokenizer() -> None:
        nonlocal tokenizer
        if plan.tokenizer.tokenizer_path is not None:
            tokenizer = await anyio.to_thread.run_sync(Tokenizer.load, plan.tokenizer, facts)

    endpoint = plan.observe.trace_endpoint
    traces = RequestTraces(endpoint) if endpoint is not None else None  # before what takes long
    replicas: list[Replica] = []
    try:
        async with anyio.create_task_group() as loading:
            loading.start_soon(load_tokenizer)
            replicas += await start_replicas(plan, facts, range(plan.parallel.dp_size))
    except BaseException as error:
        with anyio.CancelScope(shield=True):
            for replica in replicas:
                await anyio.to_thread.run_sync(replica.runner.close)
                if replica.kv_events is not None:
                    await anyio.to_thread.run_sync(replica.kv_events.close)
            if traces is not None:
                await anyio.to_thread.run_sync(traces.close)
        cause = first_error(error)
        raise cause from cause.__cause__
    restart = partial(start_replica, plan, facts) if len(replicas) > 1 else None
    plan = replicas[0].plan
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
        sum(each.scheduler.load.num_pages for each in replicas) * plan.cache.page_size,
        plan.scheduler.chunk_tokens,
        plan.scheduler.max_prefill_tokens,
        plan.scheduler.max_running,
        plan.model.context_length,
    )
    if plan.model.delete_after_loading:
        await anyio.to_thread.run_sync(_delete, plan.model.path)
    core = EngineCore(plan, facts, tokenizer, replicas, restart, traces)
    if core.metrics is not None:
        core.metrics.startup_s = time.monotonic() - began_s
    return core


def _delete(path: str) -> None:
    try:
        delete(path)
        logger.info("Deleted the checkpoint %s (--delete-ckpt-after-loading).", path)
    except OSError as error:
        logger.warning("The checkpoint %s could not be deleted: %s", path, error)
