"""A target and a draft model in one worker: sized together, with one page table, and the results of transformers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny_checkpoints
from ops.machine import Machine
from runtime.actors.assemble import prepare
from runtime.actors.cache_sizes import size_cache
from runtime.batch import UNKNOWN, Batch, Sampling
from runtime.config import Args
from runtime.config.plan import Plan
from runtime.distributed.link import HEAD, decode, encode
from runtime.kv_cache.sizing import pool_bytes
from runtime.request import LogprobParams
from runtime.worker.model_runner import StepExecutor
from runtime.worker.worker import ModelWorker
from runtime.worker.worker_setup import TARGET, ModelSetup, WorkerSetup

NAMES = (TARGET, "draft")
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 99], [13, 14, 15, 3, 40]]
PAGE_SIZE, NUM_NEW, TOP = 4, 6, 5
LITTLE = {"available": 4 << 20, "total": 64 << 20}  # memory of a machine in bytes


@cache
def path(name: str) -> str:
    """Return the paths of both models. They share a vocabulary; the draft has one layer of another size."""
    if name == TARGET:
        return tiny_checkpoints.cached("llama", vocab_size=131, max_position_embeddings=64, head_dim=16)
    more = {"hidden_size": 48, "num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 16}
    return tiny_checkpoints.cached("qwen3", vocab_size=131, max_position_embeddings=64, **more)


def planned(name: str) -> tuple[Plan, ModelSetup]:
    args = Args.of(
        model_path=path(name),
        skip_tokenizer_init=True,
        dtype="float32",
        page_size=PAGE_SIZE,
        max_running_requests=200,
    )
    plan, facts = prepare(args, Machine.probe())
    return plan, ModelSetup(facts, plan.model)


def worker(*names: str) -> tuple[Plan, ModelWorker]:
    plan, _ = planned(TARGET)
    setup = WorkerSetup.of(plan, {name: planned(name)[1] for name in names}, 0, 0)
    return plan, ModelWorker(setup)


def test_most_steps_have_at_most_the_draft_tokens_of_the_plan() -> None:
    """The warm-up runs a step of this size, which must fit into the memory that steps need later."""
    plan, setup = planned(TARGET)
    schedule = replace(plan.scheduler, chunk_tokens=64, max_running=20, max_drafts=4, max_step_drafts=50)
    assert WorkerSetup.of(replace(plan, scheduler=schedule), {TARGET: setup}, 0, 0).step_tokens == 64 + 20 + 50
    schedule = replace(schedule, max_drafts=2)
    assert WorkerSetup.of(replace(plan, scheduler=schedule), {TARGET: setup}, 0, 0).step_tokens == 64 + 20 + 40


def parameter_bytes(name: str) -> int:
    model: Any = AutoModelForCausalLM.from_pretrained(path(name), dtype=torch.float32)
    return sum(parameter.nbytes for parameter in model.parameters())


def test_models_are_sized_together_under_one_limit() -> None:
    plan, both = worker(*NAMES)
    _, alone = worker(TARGET)
    for name in NAMES:
        # Panels of 32 outputs are padded, which is much for these small models.
        assert parameter_bytes(name) <= both.weight_bytes[name] <= 1.2 * parameter_bytes(name)
    sizes = []
    for made in (both, alone):
        weights = made.memory()["weights"]
        assert weights == sum(made.weight_bytes.values())
        own_plan, cache, _, _ = size_cache(plan, made, [{**LITTLE, "weights": weights}], None)
        budget = int(plan.cache.mem_fraction * LITTLE["available"])
        page = pool_bytes(own_plan, made.cache_specs, 1)
        assert cache.num_pages == budget // page
        # each layer has an additional scratch page
        assert made.join(cache, None) == (cache.num_pages + 1) * page
        sizes.append(cache.num_pages)
        made.close()
    assert sizes[0] < sizes[1]


Chosen = tuple[int, list[tuple[float, int]]]  # (token, log-probabilities of the most likely tokens)


def batch_of(number: int, starts: np.ndarray, counts: np.ndarray, ids: np.ndarray) -> Batch:
    rows = np.arange(len(PROMPTS), dtype=np.int32)
    nobody: Any = None
    return Batch(
        number=number,
        sequences=(nobody,) * len(rows),
        starts=starts,
        counts=counts,
        sequence_indices=rows,
        token_ids=ids,
        page_table=np.arange(4 * len(rows), dtype=np.int32).reshape(-1, 4)[:, ::-1].copy(),
        sampling=Sampling(
            np.cumsum(counts, dtype=np.int32) - 1,
            rows,
            greedy=np.ones(len(rows), np.bool_),
            uniform=np.zeros(len(rows), np.float32),
            logprobs=(LogprobParams(top=TOP),) * len(rows),
        ),
    )


def in_turns(executors: dict[str, StepExecutor]) -> dict[str, list[list[Chosen]]]:
    """Return what each model chooses after each prompt, in alternating steps of both models."""
    lengths = np.array([len(prompt) for prompt in PROMPTS], np.int32)
    found: dict[str, list[list[Chosen]]] = {name: [[] for _ in PROMPTS] for name in executors}
    starts, counts = 0 * lengths, lengths
    ids = np.concatenate([np.array(prompt, np.int32) for prompt in PROMPTS])
    for number in range(NUM_NEW):
        for name, executor in executors.items():
            output = executor.run(batch_of(number, starts, counts, ids))()
            for own, tokens, logprobs in zip(found[name], output.tokens, output.logprobs or [], strict=True):
                assert logprobs is not None
                own.append((tokens[0], list(logprobs.top[0] or [])))
        starts, counts, ids = starts + counts, np.ones_like(counts), np.full(len(PROMPTS), UNKNOWN, np.int32)
    return found


def wanted(name: str, prompt: list[int]) -> list[Chosen]:
    """Return the same results from transformers without a cache."""
    model: Any = AutoModelForCausalLM.from_pretrained(path(name), dtype=torch.float32)
    ids, found = list(prompt), []
    with torch.no_grad():
        for _ in range(NUM_NEW):
            top = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1).topk(TOP)
            ids.append(int(top.indices[0]))
            found.append((ids[-1], list(zip(top.values.tolist(), top.indices.tolist(), strict=True))))
    return found


def test_both_compute_what_transformers_does_over_one_page_table() -> None:
    plan, made = worker(*NAMES)
    plan, cache, _, _ = size_cache(plan, made, [{**LITTLE, "weights": made.memory()["weights"]}], None)
    made.join(cache, None)
    executors = {name: made.lead(plan, name) for name in NAMES}
    with pytest.raises(RuntimeError, match="handed over already"):
        made.lead(plan, TARGET)
    found = in_turns(executors)
    for name in NAMES:
        for own, prompt in zip(found[name], PROMPTS, strict=True):
            expected = wanted(name, prompt)
            assert [token for token, _ in own] == [token for token, _ in expected]
            for (_, mine), (_, theirs) in zip(own, expected, strict=True):
                assert [id for _, id in mine] == [id for _, id in theirs]
                assert [value for value, _ in mine] == pytest.approx([value for value, _ in theirs], abs=1e-4)
    assert found[TARGET] != found["draft"]
    for executor in executors.values():
        executor.close()
    made.close()


def test_setups_of_several_models_travel() -> None:
    setup = WorkerSetup.of(planned(TARGET)[0], {name: planned(name)[1] for name in NAMES}, 0, 0)
    content = encode({"setup": setup})
    body = decode(content[HEAD.size :], HEAD.unpack_from(content)[1]).body["setup"]
    assert encode({"setup": WorkerSetup.decode(body, None)}) == content
    elsewhere = WorkerSetup.decode(body, "/elsewhere").models
    assert [elsewhere[name].plan.path for name in NAMES] == ["/elsewhere", path("draft")]
