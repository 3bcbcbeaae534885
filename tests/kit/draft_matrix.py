"""Compares decoding with drafts to plain decoding: for a family and a method, in all ways to compute a request.

Random drafts are almost never right. `known_drafts` therefore replaces most proposals of draft models and heads by the
tokens of plain decoding, so that runs of all lengths are accepted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import pytest

import lora_adapters
import tiny_models
from draft_heads import NEXTN, TinyHead
from runtime.batch import Batch
from runtime.errors import ConfigurationError
from runtime.speculative.ngram import NgramDrafter
from runtime.worker.draft_entries import drafted_by_model
from runtime.worker.host_drafter import HostDrafter
from runtime.worker.model_runner import StepExecutor
from serve import Engine

Known = Mapping[tuple[int, ...], list[int]]  # prompt ids -> the ids of plain decoding
ONE_CHAIN = "one chain of drafts"  # in the message that refuses a tree
TREES = {
    "NGRAM": {"speculative_ngram_max_bfs_breadth": 3, "speculative_ngram_min_bfs_breadth": 2},
    "STANDALONE": {"speculative_eagle_topk": 3, "speculative_num_steps": 3},
    "EAGLE3": {"speculative_eagle_topk": 3, "speculative_num_steps": 3},
}
METHODS = (
    "NGRAM", "NGRAM tree", "STANDALONE", "STANDALONE tree", "EAGLE", "EAGLE3", "EAGLE3 tree", "NEXTN",
    "NGRAM,STANDALONE", "NGRAM,EAGLE3",
)  # fmt: skip
NEXTN_KINDS = {"deepseek_v3": "NEXTN deepseek_v3", "glm4_moe": "NEXTN glm4_moe", "qwen3_next": "NEXTN qwen3_next"}
NEXTN_KINDS |= {"qwen2": "NEXTN mimo"}
assert set(NEXTN_KINDS.values()) == NEXTN.keys()
WITH_ADAPTER = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "deepseek_v3", "mixtral", "qwen3_next", "gpt_oss")
HEAD = {"head_dim": 16}  # a size that the C++ kernels support, so that steps run in CPU graphs, as usual
LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
RANKS = ("tp_size", "pp_size", "dp_size", "enable_dp_attention")
# Chunked prompts, cached prefixes at every page of 4, and a pool so small that sequences are retracted.
TIGHT: dict[str, Any] = {
    "chunked_prefill_size": 16, "page_size": 4, "max_total_tokens": 208, "schedule_conservativeness": 0.0,
}  # fmt: skip
_FOLDER = TemporaryDirectory(prefix="penstock-draft-matrix-")


class Found(NamedTuple):
    """The result of one family and method."""

    different: list[str]  # "way: call" of each output that differs from plain decoding
    accepted: int  # number of accepted drafts
    retracted: int  # number of retractions
    num_outputs: int  # number of compared outputs
    in_graph: bool  # whether the served model's steps ran in the CPU graph


@contextmanager
def known_drafts(known: Known) -> Iterator[None]:
    """Replace three of four ids that draft models and heads propose on rank 0 by those of plain decoding.

    In a tree, half of the others have the right id among their alternatives. Prompt lookup proposes the tokens of plain
    decoding, most of them with an error, half of the times when it finds nothing.
    """
    sequences: dict[int, Any] = {}  # by sequence index, of the step that is computed
    with pytest.MonkeyPatch.context() as patch:
        step = StepExecutor._propose

        def noted(executor: StepExecutor, batch: Batch) -> tuple[Batch, Batch]:
            sequences.update(zip(batch.sequence_indices.tolist(), batch.sequences, strict=False))
            return step(executor, batch)

        patch.setattr(StepExecutor, "_propose", noted)
        patch.setattr(HostDrafter, "propose", _corrected(HostDrafter.propose, sequences, known))
        patch.setattr(NgramDrafter, "propose", _found(NgramDrafter.propose, known))
        yield


def _found(propose: Any, known: Known) -> Any:
    """Return a prompt lookup that knows the output where it finds nothing."""
    outputs = {prompt[0]: [*prompt, *ids] for prompt, ids in known.items()}

    def found(drafter: NgramDrafter, ids: list[int], num_pending: int, limit: int) -> list[int]:
        own = propose(drafter, ids, num_pending, limit)
        first = len(ids) + num_pending
        chance = crc32(f"{first} {ids[:2]}".encode()) % 16
        if own or chance > 8:
            return own
        right = outputs.get(ids[0], [])[first : first + min(limit, 6)]
        return [token + (number == chance) for number, token in enumerate(right)]

    return found


def _corrected(propose: Any, sequences: Mapping[int, Any], known: Known) -> Any:
    def corrected(drafter: Any, batch: Batch, last_tokens: Any) -> Batch:
        found = propose(drafter, batch, last_tokens)
        firsts = batch.counts.cumsum() - batch.counts
        for row, count in zip(*(each.tolist() for each in drafted_by_model(batch)), strict=True):
            sequence = sequences[int(batch.sequence_indices[row])]
            prompt = tuple(sequence.ids[: sequence.num_prompt])
            right = [*prompt, *known.get(prompt, ())]
            for number in range(1, count + 1):
                position = int(batch.starts[row]) + number
                if position >= len(right):
                    break
                chance = crc32(f"{position} {prompt}".encode()) % 8
                if chance < 6:
                    found.token_ids[firsts[row] + number] = right[position]
                elif chance == 6 and drafter.alternatives and drafter.alternatives[number - 1][1].size:
                    rows, likeliest = drafter.alternatives[number - 1]
                    if right[position] not in likeliest[rows == row]:
                        likeliest[np.flatnonzero(rows == row), 1] = right[position]
        return found

    return corrected


def calls(path: str, vocab_size: int) -> dict[str, dict[str, Any]]:
    """Return requests by name. Each has a prompt of its own, from which `known_drafts` knows its output."""
    greedy: dict[str, Any] = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    drawn = {**greedy, "temperature": 0.9, "sampling_seed": 7}
    three = {str(token): 99 for token in (11, 12, 13)}  # random outputs of three ids repeat their n-grams
    params: dict[str, dict[str, Any]] = {
        "one token": greedy,
        "greedy": greedy,
        "long": {**greedy, "max_new_tokens": 60},
        "repeats": greedy,
        "penalty": {**greedy, "frequency_penalty": 0.6, "repetition_penalty": 1.1},
        "drawn": drawn,
        "of three": {**drawn, "max_new_tokens": 48, "logit_bias": three},
        "grammar": {**greedy, "regex": "((red|blue) fox, )+"},
        "drawn grammar": {**drawn, "regex": "[a-e ]+", "min_new_tokens": 12},
        "stop": {"temperature": 0, "max_new_tokens": 30, "stop": ["e", "a"], "min_new_tokens": 3},
    }
    sizes = (1, 17, 33, 40, 9, 16, 12, 10, 21, 7)
    found: dict[str, dict[str, Any]] = {}
    for number, ((name, own), size) in enumerate(zip(params.items(), sizes, strict=True)):
        period = 5 if name in ("repeats", "grammar") else 1000
        ids = [20 + number, *(3 + (7 * (i % period) + number * i % 11) % (vocab_size - 3) for i in range(1, size))]
        found[name] = {"input_ids": ids, "sampling_params": own}
    if Path(path).name.split("-")[0] in WITH_ADAPTER:
        found["adapter"] = {"input_ids": [40, *range(50, 64)], "sampling_params": greedy, "lora_path": "a"}
    return found


async def outputs(engine: Engine, requests: Mapping[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the answers to the requests in each way: alone, cached, at once with a warm and with a cold cache."""

    async def alone() -> list[dict[str, Any]]:
        return [await engine.generate(**request) for request in requests.values()]

    async def together() -> list[dict[str, Any]]:
        return list(await asyncio.gather(*(engine.generate(**request) for request in requests.values())))

    found = {"alone": await alone(), "cached": await alone(), "together": await together()}
    engine.flush_cache()
    found["together, cold"] = await together()
    engine.core.check()
    return found


@cache
def plain(path: str, **ranks: int) -> tuple[dict[str, dict[str, Any]], dict[str, list[int]]]:
    """Return requests for this model, and the ids of plain decoding: one request at a time, default options."""

    async def answers() -> dict[str, list[int]]:
        async with Engine(path, log_level="error", random_seed=1, **ranks, **_adapters(requests, path)) as engine:
            return {name: (await engine.generate(**request))["output_ids"] for name, request in requests.items()}

    requests = calls(path, 100)
    if "enable_dp_attention" in ranks:  # attention groups take no adapters
        requests.pop("adapter", None)
    return requests, asyncio.run(answers())


def _adapters(requests: Mapping[str, Any], path: str) -> dict[str, Any]:
    return (
        {"lora_paths": [f"a={lora_adapters.adapter(path, 3, targets=lora_adapters.linear_layers(path))}"]}
        if "adapter" in requests
        else {}
    )


def compare(family: str, method: str, **options: Any) -> Found | None:
    """Compare a family with drafts of this method to plain decoding. Return None if it takes no tree."""
    name, is_tree = method.removesuffix(" tree"), method.endswith(" tree")
    path, own = _model(family, name)
    requests, expected = plain(path, **{name: options[name] for name in RANKS if name in options})
    own |= {"speculative_algorithm": name, "speculative_adaptive": {"enabled": False}, **TIGHT, **options}
    own |= _adapters(requests, path) | (TREES[name] if is_tree else {})
    known = {tuple(request["input_ids"]): expected[each] for each, request in requests.items()}

    async def answers() -> tuple[dict[str, list[dict[str, Any]]], int, bool]:
        async with Engine(path, log_level="error", random_seed=1, **own) as engine:
            found = await outputs(engine, requests)
            runner: Any = engine.core.schedulers[0].runner
            graph = getattr(getattr(runner, "_executor", None), "_cpu_graph", None)
            return found, engine.status().num_retracted, graph is not None

    with known_drafts(known):
        try:
            found, retracted, in_graph = asyncio.run(answers())
        except ConfigurationError as error:
            if is_tree and ONE_CHAIN in str(error):
                return None
            raise
    different = [
        f"{way}: {call}"
        for way, each in found.items()
        for call, answer in zip(requests, each, strict=True)
        if answer["output_ids"] != expected[call]
    ]
    metas = [answer["meta_info"] for each in found.values() for answer in each]
    accepted = sum(meta.get("spec_num_correct_drafts", 0) for meta in metas)
    return Found(different, accepted, retracted, len(metas), in_graph)


def methods(family: str) -> tuple[str, ...]:
    """Return the methods that this family can have."""
    return tuple(method for method in METHODS if method != "NEXTN" or family in NEXTN_KINDS)


def _model(family: str, method: str) -> tuple[str, dict[str, Any]]:
    """Return the path of a model, and the options that name its draft model or head."""
    if method == "NEXTN":
        return str(_head(NEXTN_KINDS[family]).target), {}
    path, model = tiny_models.cached(family, "byte_bpe", **_shape(family)), method.split(",")[-1]
    if model == "STANDALONE":
        return path, {"speculative_draft_model_path": tiny_models.cached("llama", "byte_bpe", **HEAD)}
    if model in ("EAGLE", "EAGLE3"):
        kind = "EAGLE llama" if model == "EAGLE" else "EAGLE3 small vocabulary"
        return path, {"speculative_draft_model_path": str(_head(kind, _size(path)).head)}
    return path, {}


@cache
def _head(kind: str, size: int = 32) -> TinyHead:
    folder = Path(_FOLDER.name) / f"{kind} {size}".replace(" ", "-")
    folder.mkdir()
    return TinyHead(folder, kind, hidden_size=size, **_shape(NEXTN.get(kind, "llama")))


def _shape(family: str) -> dict[str, int]:
    return {**HEAD, **LATENT} if family in ("deepseek_v2", "deepseek_v3", "minicpm3") else HEAD


def _size(path: str) -> int:
    from runtime.loading.facts import read_facts

    return read_facts(path).hidden_size
