"""Outputs with a grammar and drafts equal those without drafts, and the grammar lets right drafts pass."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from serve import Engine
from serve.demo import demo_path

COMMON: dict[str, Any] = {"log_level": "error", "random_seed": 1}
ALWAYS: dict[str, Any] = {"speculative_adaptive": {"enabled": False}}
METHODS: dict[str, dict[str, Any]] = {
    "NGRAM": {"speculative_algorithm": "NGRAM"},
    "STANDALONE": {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": demo_path()},
    "EAGLE3": {"speculative_algorithm": "EAGLE3"},
    "NGRAM,EAGLE3": {"speculative_algorithm": "NGRAM,EAGLE3"},
}
NAMES = {"type": "array", "items": {"enum": ["the red fox", "the blue fox"]}, "minItems": 6, "maxItems": 6}
SCHEMA = {
    "type": "object",
    "properties": {"names": NAMES, "count": {"type": "integer"}, "note": {"type": "string", "maxLength": 20}},
    "required": ["names", "count", "note"],
}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": {"type": "object", "properties": {"a": {"const": 1}}}, "end": "</f>"}],
    "triggers": ["<f>"],
}
GRAMMARS: list[dict[str, Any]] = [
    {"json_schema": json.dumps(SCHEMA)},
    {"regex": "((red|blue|green) fox, ){12}end"},
    {"ebnf": 'root ::= ("x" [0-9] " = 1" [0-9]* ";\\n"){5}'},
    {"choice": ["abcabcabcabcabcabcabcabc", "once once once once once"]},
    {"structural_tag": json.dumps(TAG)},
    {"regex": "(a|b|c| )+", "min_new_tokens": 25},
    {"allowed_token_ids": [263, 264, 265, 300, 301, 302]},
    {"json_schema": json.dumps({"type": "array", "items": {"type": "integer"}}), "frequency_penalty": 0.3},
]
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "no overlap": {"disable_overlap_schedule": True},
    "retracted, pages of 4": {"max_total_tokens": 512, "schedule_conservativeness": 0.0, "page_size": 4},
    "no forced tokens": {"disable_jump_forward": True},
}
PROMPT = "List: the red fox, the blue fox, the red fox, the blue fox, the red fox\nAgain: "


def calls() -> list[dict[str, Any]]:
    """Return the parameters of every grammar, greedy and drawn."""
    greedy = [{"temperature": 0, "max_new_tokens": 48, **grammar} for grammar in GRAMMARS]
    return greedy + [{**params, "temperature": 0.8, "sampling_seed": 5} for params in greedy]


async def answers(**options: Any) -> list[dict[str, Any]]:
    """Return the answers one by one, then those of all requests at once with log-probabilities."""
    async with Engine(**COMMON, **options) as engine:
        alone = [await engine.generate(PROMPT, sampling_params=params) for params in calls()]
        together = [engine.generate(PROMPT, sampling_params=params, return_logprob=True) for params in calls()]
        found = [*alone, *await asyncio.gather(*together)]
        engine.core.check()
        return found


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return [answer["output_ids"] for answer in asyncio.run(answers())]


def check(found: list[dict[str, Any]], plain: list[list[int]]) -> None:
    assert [answer["output_ids"] for answer in found] == plain
    drafted = [
        any("spec_verify_ct" in one["meta_info"] for one in found[i :: len(GRAMMARS)]) for i in range(len(GRAMMARS))
    ]
    assert sum(drafted) >= 5  # some outputs have only forced tokens
    for answer in found[len(found) // 2 :]:
        assert [token for _, token, _ in answer["meta_info"]["output_token_logprobs"]] == answer["output_ids"]


@pytest.mark.parametrize(
    "method",
    ["NGRAM,EAGLE3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("NGRAM", "STANDALONE", "EAGLE3"))],
)
async def test_every_grammar_gives_the_tokens_of_plain_decoding(method: str, plain: list[list[int]]) -> None:
    found = await answers(**METHODS[method], **ALWAYS)
    check(found, plain)
    correct = [answer["meta_info"].get("spec_num_correct_drafts", 0) for answer in found]
    assert sum(count > 3 for count in correct) >= 6


@pytest.mark.slow
@pytest.mark.parametrize("method", ["NGRAM", "NGRAM,EAGLE3"])
@pytest.mark.parametrize("way", [way for way in WAYS if WAYS[way]])
async def test_every_grammar_in_other_ways(way: str, method: str, plain: list[list[int]]) -> None:
    check(await answers(**METHODS[method], **ALWAYS, **WAYS[way]), plain)


@pytest.mark.long
@pytest.mark.parametrize("more", [{}, {"dp_size": 2, "enable_dp_attention": True}], ids=["ranks", "groups"])
async def test_every_grammar_on_two_ranks(more: dict[str, Any]) -> None:
    expected = [answer["output_ids"] for answer in await answers(tp_size=2, **more)]
    check(await answers(**METHODS["NGRAM"], **ALWAYS, tp_size=2, **more), expected)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["xgrammar", "outlines"])
async def test_other_grammar_libraries_give_the_tokens_of_plain_decoding(backend: str) -> None:
    pytest.importorskip(backend if backend == "xgrammar" else "outlines_core")
    expected = [answer["output_ids"] for answer in await answers(grammar_backend=backend)]
    check(await answers(grammar_backend=backend, **METHODS["NGRAM,EAGLE3"], **ALWAYS), expected)
