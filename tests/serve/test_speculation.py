"""Outputs with drafts equal those of plain decoding, and drafts are accepted if text repeats."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import tiny_models
from lora_adapters import adapter
from runtime.batch import Batch
from runtime.errors import ConfigurationError
from runtime.worker.model_runner import ModelRunner
from serve import Engine
from serve.demo import demo_path

ALWAYS: dict[str, Any] = {"speculative_adaptive": {"enabled": False}}  # drafts do not depend on measured times
NGRAM: dict[str, Any] = {"speculative_algorithm": "NGRAM", **ALWAYS}
DEMO = Path(demo_path() or "")
LINES = [f"{number}. The red fox number {number} runs over the hill." for number in range(10)]
EDIT = "Repeat this list exactly:\n" + "\n".join(LINES) + "\n\nAgain:\n" + LINES[0] + "\n1. The red"
PROMPTS = [EDIT, "Once upon a time", "a b c d a b c d a b", EDIT[60:], "x"]
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True},
    {"temperature": 0, "max_new_tokens": 40, "stop": ["fox"]},
    {"temperature": 0.7, "max_new_tokens": 40, "sampling_seed": 3},
    {"temperature": 0, "max_new_tokens": 30, "frequency_penalty": 0.5},
    {"temperature": 0.4, "max_new_tokens": 30, "repetition_penalty": 1.1, "min_new_tokens": 20, "sampling_seed": 9},
    {"temperature": 0, "max_new_tokens": 2},
]
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "page size 1": {"page_size": 1},
    "page size 16, chunks of 16": {"page_size": 16, "chunked_prefill_size": 16},
    "no overlap": {"disable_overlap_schedule": True},
    "retracted": {"max_total_tokens": 1024, "schedule_conservativeness": 0.0, "page_size": 16},
}
IDS = "output_ids"


async def answers(**options: Any) -> list[dict[str, Any]]:
    """Return the answers to each prompt with each set of parameters: one by one, then all at once with cached
    prefixes.
    """
    async with Engine(log_level="error", random_seed=1, **options) as engine:
        calls = [(prompt, params) for prompt in PROMPTS for params in PARAMS]
        alone = [await engine.generate(prompt, sampling_params=params) for prompt, params in calls]
        together = [engine.generate(prompt, sampling_params=params) for prompt, params in calls]
        return [*alone, *await asyncio.gather(*together)]


def rows_with_unknown_starts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that receives the number of rows after drafts in flight of every batch."""
    found: list[int] = []
    launch = ModelRunner.launch

    def launched(runner: ModelRunner, batch: Batch) -> Any:
        found.append(0 if batch.unknown_starts is None else int(batch.unknown_starts.sum()))
        return launch(runner, batch)

    monkeypatch.setattr(ModelRunner, "launch", launched)
    return found


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Options for drafts by the demo model without its last layer, which agrees with it at times."""
    folder = tmp_path_factory.mktemp("draft")
    config = json.loads((DEMO / "config.json").read_text())
    config["num_hidden_layers"] -= 1
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor for path in DEMO.glob("*.safetensors") for name, tensor in load_file(path).items()}
    last = f"model.layers.{config['num_hidden_layers']}."
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(last)}
    assert len(kept) < len(tensors)
    save_file(kept, folder / "model.safetensors")
    return {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(folder), **ALWAYS}


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return [answer[IDS] for answer in asyncio.run(answers())]


@pytest.mark.parametrize("way", WAYS)
async def test_tokens_are_those_of_plain_decoding(way: str, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch):
    num_unknown = rows_with_unknown_starts(monkeypatch)
    found = await answers(**NGRAM, **WAYS[way])
    assert [answer[IDS] for answer in found] == plain
    assert (sum(num_unknown) > 5) == (way != "no overlap")
    checked = [answer["meta_info"] for answer in found if "spec_verify_ct" in answer["meta_info"]]
    assert max(meta["spec_accept_length"] for meta in checked) > 2
    penalised = [answer["meta_info"] for answer in (*found[3 :: len(PARAMS)], *found[4 :: len(PARAMS)])]
    assert any(meta.get("spec_num_correct_drafts", 0) for meta in penalised)


@pytest.mark.parametrize("way", WAYS)
async def test_tokens_with_a_draft_model_are_those_of_plain_decoding(
    way: str, draft: dict[str, Any], plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_unknown = rows_with_unknown_starts(monkeypatch)
    found = await answers(**draft, **WAYS[way])
    assert [answer[IDS] for answer in found] == plain
    assert (sum(num_unknown) > 5) == (way != "no overlap")
    lengths = [answer["meta_info"].get("spec_accept_length", 1) for answer in found]
    assert 1.2 < max(lengths) < 5


@pytest.mark.parametrize("way", ["default", "retracted"])
async def test_tokens_with_lookup_before_a_draft_model_are_those_of_plain_decoding(
    way: str, draft: dict[str, Any], plain: list[list[int]]
) -> None:
    found = await answers(**{**draft, "speculative_algorithm": "NGRAM,STANDALONE"}, **WAYS[way])
    assert [answer[IDS] for answer in found] == plain
    lengths = [answer["meta_info"].get("spec_accept_length", 1) for answer in found]
    assert max(lengths) > 2


@pytest.mark.parametrize("method", ["NGRAM", "NGRAM,STANDALONE"])
async def test_drafts_by_measured_times_do_not_change_tokens(
    method: str, draft: dict[str, Any], plain: list[list[int]]
) -> None:
    path = {"speculative_draft_model_path": draft["speculative_draft_model_path"]} if "," in method else {}
    found = await answers(speculative_algorithm=method, **path)
    assert [answer[IDS] for answer in found] == plain


async def test_the_demo_models_own_head_proposes(plain: list[list[int]]) -> None:
    """Its head ships with it, and is right more often than not on what the model was trained for."""
    question = "<|im_start|>user\nWhat does --page-size do?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    found = await answers(speculative_algorithm="EAGLE3", **ALWAYS)
    assert [answer[IDS] for answer in found] == plain
    async with Engine(log_level="error", speculative_algorithm="NGRAM,EAGLE3", **ALWAYS) as engine:
        answer = await engine.generate(question, sampling_params={"temperature": 0})
    assert answer["meta_info"]["spec_accept_length"] > 1.5


async def test_a_draft_model_like_the_target_is_always_right(plain: list[list[int]]) -> None:
    """Its drafts come from a KV cache of its own, with cached prefixes and after chunks too."""
    own = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(DEMO), **ALWAYS}
    found = await answers(**own, speculative_num_steps=3, chunked_prefill_size=16)
    assert [answer[IDS] for answer in found] == plain
    drawn = [answer["meta_info"] for answer in found[2 : len(found) // 2 : len(PARAMS)]]
    alone = drawn + [answer["meta_info"] for answer in found[: len(found) // 2 : len(PARAMS)]]
    assert all(meta["spec_accept_length"] > 3.7 for meta in alone)  # the last step may have fewer drafts


async def test_a_request_may_limit_its_drafts(draft: dict[str, Any]) -> None:
    async with Engine(log_level="error", random_seed=1, enable_metrics=True, **draft) as engine:
        found = [
            (await engine.generate(EDIT, sampling_params={**PARAMS[0], "speculative": asked}))["meta_info"]
            for asked in (True, 1, 0, False)
        ]
        load = engine.core.schedulers[0].scheduler.load
    assert [meta.get("spec_verify_ct", 0) > 0 for meta in found] == [True, True, False, False]
    usual, single = found[:2]
    assert single["spec_num_proposed_drafts"] == single["spec_verify_ct"]
    assert single["spec_accept_rate"] == single["spec_num_correct_drafts"] / single["spec_num_proposed_drafts"]
    assert sum(usual["spec_correct_drafts_histogram"]) == usual["spec_verify_ct"]
    assert load.drafts.verified == usual["spec_verify_ct"] + single["spec_verify_ct"]


async def test_grammars_penalties_and_adapters_share_steps_with_drafts(draft: dict[str, Any]) -> None:
    greedy = {"temperature": 0, "max_new_tokens": 40}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    calls: list[dict[str, Any]] = [
        {"sampling_params": {**greedy, "json_schema": json.dumps(schema)}},
        {"sampling_params": {**greedy, "presence_penalty": 1.0, "min_new_tokens": 30}},
        {"sampling_params": greedy, "lora_path": "a"},
        {"sampling_params": greedy},
        {"sampling_params": {**greedy, "temperature": 1.0, "sampling_seed": 4, "n": 3}},
    ]
    found = []
    for options in ({}, draft):
        async with Engine(log_level="error", lora_paths=[f"a={adapter(str(DEMO), 1)}"], **options) as engine:
            answers = await asyncio.gather(*(engine.generate(EDIT, **call) for call in calls))
            flat = [one for answer in answers for one in (answer if isinstance(answer, list) else [answer])]
            found.append([answer[IDS] for answer in flat])
            engine.core.check()
    assert found[0] == found[1]
    assert found[0][2] != found[0][3]  # the adapter changes the text


async def test_a_model_with_other_tokens_is_refused() -> None:
    other = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": tiny_models.cached()}
    with pytest.raises(ConfigurationError, match="its vocabulary has"):
        await Engine(log_level="error", **other).start()


async def test_streams_bring_the_same_tokens(plain: list[list[int]]):
    async with Engine(log_level="error", random_seed=1, **NGRAM) as engine:
        pieces = [piece async for piece in engine.stream(EDIT, sampling_params=PARAMS[0])]
    assert [token_id for piece in pieces for token_id in piece[IDS]] == plain[0]
    assert len(pieces) < len(plain[0])


@pytest.mark.slow
async def test_steps_computed_operation_by_operation_give_the_same_tokens():
    eager = {"attention_backend": "torch_native", "dtype": "float32"}
    found, expected = await answers(**NGRAM, **eager), await answers(**eager)
    assert [answer[IDS] for answer in found] == [answer[IDS] for answer in expected]


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks",
    [
        {"tp_size": 2},
        {"pp_size": 2},
        pytest.param({"tp_size": 2, "pp_size": 2}, marks=pytest.mark.long),
    ],
    ids=str,
)
async def test_several_ranks_give_the_tokens_of_plain_decoding(
    ranks: dict[str, int], draft: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft model is on rank 0 alone, which sends its proposals to the ranks that embed them with it."""
    monkeypatch.setitem(globals(), "PROMPTS", PROMPTS[2:4])
    monkeypatch.setitem(globals(), "PARAMS", [PARAMS[0], PARAMS[2], PARAMS[3]])
    num_unknown = rows_with_unknown_starts(monkeypatch)
    expected = [answer[IDS] for answer in await answers(**ranks)]
    found = await answers(**{**draft, "speculative_algorithm": "NGRAM,STANDALONE"}, **ranks)
    assert [answer[IDS] for answer in found] == expected
    assert any(answer["meta_info"].get("spec_num_correct_drafts", 0) > 3 for answer in found)
    assert bool(sum(num_unknown)) == ("pp_size" not in ranks)


@pytest.mark.parametrize("method", ["NGRAM", "STANDALONE"])
async def test_logprobs_and_biases_are_those_of_plain_decoding(method: str, draft: dict[str, Any]) -> None:
    """Rows with and without log-probabilities share steps, and both have drafts."""
    params = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
    biased = {**params, "logit_bias": {"275": 1.5}, "temperature": 0.5, "sampling_seed": 5}
    found = []
    for options in ({}, NGRAM if method == "NGRAM" else draft):
        async with Engine(log_level="error", random_seed=1, **options) as engine:
            calls = [
                engine.generate(PROMPTS[2], sampling_params=params),
                engine.generate(PROMPTS[2], sampling_params=biased, return_logprob=True),
                engine.generate(
                    EDIT, sampling_params=params, return_logprob=True, top_logprobs_num=2, logprob_start_len=9
                ),
            ]
            found.append(await asyncio.gather(*calls))
    plain, drafted = found
    assert [answer[IDS] for answer in plain] == [answer[IDS] for answer in drafted]
    assert sum(answer["meta_info"].get("spec_num_correct_drafts", 0) > 0 for answer in drafted) >= 2
    for one, other in zip(plain[1:], drafted[1:], strict=True):
        for name in ("output_token_logprobs", "input_token_logprobs"):
            expected, given = one["meta_info"][name], other["meta_info"][name]
            assert [token for _, token, _ in expected] == [token for _, token, _ in given]
            values = [
                (first, second) for (first, *_), (second, *_) in zip(expected, given, strict=True) if first is not None
            ]
            assert all(first == pytest.approx(second, abs=2e-2) for first, second in values)
    tops = [answer[2]["meta_info"]["output_top_logprobs"] for answer in found]
    assert len(tops[0]) == len(tops[1]) == 60
    assert all(len(pairs) == 2 for pairs in tops[1])
