"""From what the user said to a core that can run. The heavy parts go to threads, side by side."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from ops.machine import GIB, Machine
from runtime.actors.core import Core
from runtime.args import Args, without_effect
from runtime.cache.prefix import PrefixCache
from runtime.facts import ModelFacts
from runtime.models.checkpoint import locate
from runtime.models.config import read_facts
from runtime.plan import Plan, TextPlan
from runtime.resolve import check, max_running, resolve, size_pool
from runtime.schedule.schedule import Schedule
from runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ops.select import Kernels
    from runtime.cache.pool import KVPool
    from runtime.models.decoder import Decoder

logger = logging.getLogger("penstock.core")


def prepare(args: Args, machine: Machine, *, demo_path: str | None = None) -> tuple[Plan, ModelFacts]:
    """Read the checkpoint's configuration and decide all that can be decided before weights are read.

    Torch-free; downloads the checkpoint when it names a Hub id. Raises `ConfigurationError` with every
    refusal at once, `CheckpointError` for files that are no model.
    """
    path = check(args, machine, demo_path=demo_path)
    weights = args.model.load_format != "dummy"
    directory = locate(path, args.model.revision, args.model.download_dir, weights=weights)
    facts = read_facts(directory, args.model.json_model_override_args)
    for sentence in without_effect(args).values():
        logger.warning(sentence)
    plan = resolve(args, machine, facts, demo_path=demo_path)
    return replace(plan, text=_with_local_tokenizer(plan.text, args)), facts


def _with_local_tokenizer(text: TextPlan, args: Args) -> TextPlan:
    if args.text.tokenizer_path is None:
        return text
    directory = locate(args.text.tokenizer_path, text.revision, args.model.download_dir, weights=False)
    return replace(text, tokenizer_path=directory)


async def assemble(plan: Plan, facts: ModelFacts) -> Core:
    """Load the tokenizer and the weights, size the KV pool, and put the core together. Call it on the loop.

    Raises `ConfigurationError` for what only the files themselves show.
    """
    tokenizer: Tokenizer | None = None

    async def load_tokenizer() -> None:
        nonlocal tokenizer
        if plan.text.tokenizer_path is not None:
            tokenizer = await anyio.to_thread.run_sync(Tokenizer.load, plan.text, facts)

    try:
        async with anyio.create_task_group() as loading:
            loading.start_soon(load_tokenizer)
            model = await anyio.to_thread.run_sync(_load_model, plan, facts)
    except ExceptionGroup as group:
        raise _first(group) from None
    pages = _size(plan, facts, model)
    pool = await anyio.to_thread.run_sync(_make_pool, plan, facts, pages)
    plan = replace(plan, schedule=replace(plan.schedule, max_running=max_running(plan, pages)))
    logger.info(
        "max_total_num_tokens=%d, chunked_prefill_size=%s, max_prefill_tokens=%d, max_running_requests=%d, "
        "context_len=%d",
        pages * plan.cache.page_size,
        plan.schedule.chunk_tokens,
        plan.schedule.max_prefill_tokens,
        plan.schedule.max_running,
        plan.model.context_length,
    )
    return _core(plan, facts, tokenizer, model, pool)


def _load_model(plan: Plan, facts: ModelFacts) -> Decoder:
    from runtime.models.loader import load_model

    began = time.monotonic()
    model = load_model(facts, plan.model, _kernels(plan))
    logger.info(
        "Load weight end. type=%s, dtype=%s, mem usage=%.2f GB, %.1f s",
        facts.architecture,
        plan.model.dtype,
        _weight_bytes(model) / GIB,
        time.monotonic() - began,
    )
    return model


def _kernels(plan: Plan) -> Kernels:
    from ops.select import select

    chosen = plan.kernels
    splits = {
        "num_kv_splits": chosen.triton_attention_num_kv_splits,
        "split_tile_tokens": chosen.triton_attention_split_tile_size,
    }
    return select(chosen.choices, {"with_triton": splits})


def _weight_bytes(model: Decoder) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def _size(plan: Plan, facts: ModelFacts, model: Decoder) -> int:
    """Pages of the KV pool, now that the weights are in place."""
    if plan.model.device == "cpu":
        machine = Machine.probe()
        available, total = machine.available_bytes, machine.total_bytes
    else:
        import torch

        available, total = torch.cuda.mem_get_info(torch.device(plan.model.device))
    pages, because = size_pool(
        plan, facts, available_bytes=available, total_bytes=total, weight_bytes=_weight_bytes(model)
    )
    logger.info("The KV cache gets %d pages of %d tokens: %s.", pages, plan.cache.page_size, because)
    return pages


def _make_pool(plan: Plan, facts: ModelFacts, pages: int) -> KVPool:
    import torch

    from runtime.cache.pool import KVPool

    pool = KVPool(
        facts.num_layers,
        pages,
        plan.cache.page_size,
        facts.num_kv_heads,
        facts.head_dim,
        getattr(torch, plan.cache.kv_dtype),
        plan.model.device,
    )
    logger.info(
        "KV Cache is allocated. #tokens: %d, %.2f GB", pages * plan.cache.page_size, pool.nbytes / GIB
    )
    return pool


def _core(plan: Plan, facts: ModelFacts, tokenizer: Tokenizer | None, model: Decoder, pool: KVPool) -> Core:
    import torch

    from runtime.execute.runner import ModelRunner
    from runtime.execute.sampler import Sampler

    device = torch.device(plan.model.device)
    num_slots = plan.schedule.max_running
    schedule = Schedule(
        plan.schedule,
        PrefixCache(pool.num_pages, plan.cache.page_size, enabled=plan.cache.prefix_cache),
        vocab_size=facts.vocab_size,
        context_length=plan.model.context_length,
    )
    kernels = _kernels(plan)
    sampler = Sampler(
        facts.vocab_size,
        num_slots,
        device,
        choose=kernels.choose,
        penalize=kernels.penalize,
        score=kernels.score,
    )
    runner = ModelRunner(model, pool, sampler, num_slots=num_slots, device=plan.model.device)
    return Core(plan, facts, tokenizer, schedule, runner)


def _first(group: BaseExceptionGroup) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
