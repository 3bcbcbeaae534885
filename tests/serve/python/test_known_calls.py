"""What users of vLLM and SGLang type first, as they type it: only the import is another."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock
import tiny_encoders
from penstock import LLM, Engine, InvalidRequest, SamplingParams, StructuredOutputsParams, SyncEngine
from runtime.config import options
from runtime.errors import EngineClosed
from runtime.sampling_params import parameters
from serve.python.results import Generated

PROMPTS = ["Hello, my name is", "The capital of France is", "The future of AI is"]
GREEDY = {"temperature": 0, "max_new_tokens": 8}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=512, seed=0) as llm:
        yield llm


@pytest.fixture(scope="module")
def engine(llm: LLM) -> SyncEngine:
    return llm.engine


# --- vLLM: examples of its documentation for offline inference, with `llm` for `LLM(model=...)` ---


def test_vllm_basic(llm: LLM) -> None:
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    outputs = llm.generate(PROMPTS, sampling_params)
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        assert output.prompt == prompt
        assert isinstance(output.outputs[0].text, str)
        assert 0 < len(output.outputs[0].token_ids) <= 16
        assert output.finished


def test_vllm_outputs_are_the_engines_own(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    alone = [llm.engine.generate(prompt, GREEDY) for prompt in PROMPTS]
    assert [output.outputs[0].text for output in outputs] == [answer.text for answer in alone]
    assert [output.outputs[0].token_ids for output in outputs] == [answer.output_ids for answer in alone]
    assert outputs[0].prompt_token_ids == llm.get_tokenizer().encode(PROMPTS[0])


def test_vllm_token_prompts(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(PROMPTS[1])
    greedy = SamplingParams(temperature=0, max_tokens=4)
    texts = [
        llm.generate(prompt, greedy, use_tqdm=False)[0].outputs[0].text
        for prompt in (PROMPTS[1], {"prompt": PROMPTS[1]}, {"prompt_token_ids": ids}, [ids])
    ]
    assert len({*texts}) == 1


def test_vllm_n_and_best_of_several(llm: LLM) -> None:
    [output] = llm.generate("Once", SamplingParams(n=3, temperature=2, seed=5, max_tokens=24), use_tqdm=False)
    assert [each.index for each in output.outputs] == [0, 1, 2]
    assert len({tuple(each.token_ids) for each in output.outputs}) == 3


def test_vllm_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1)
    [output] = llm.generate(PROMPTS[0], params, use_tqdm=False)
    [completion] = output.outputs
    assert completion.logprobs is not None
    assert output.prompt_logprobs is not None
    for token_id, entries in zip(completion.token_ids, completion.logprobs, strict=True):
        assert entries is not None
        assert entries[token_id].rank == 1
        assert entries[token_id].logprob == max(each.logprob for each in entries.values())
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    total = sum(entries[token_id].logprob for token_id, entries in pairs if entries is not None)
    assert completion.cumulative_logprob == pytest.approx(total)


def test_vllm_one_sampling_params_per_prompt(llm: LLM) -> None:
    every = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (1, 2, 3)]
    outputs = llm.generate(PROMPTS, every, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3]


def test_vllm_structured_outputs(llm: LLM) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["Positive", "Negative"]))
    [output] = llm.generate("Classify this sentiment: wonderful!", params, use_tqdm=False)
    assert output.outputs[0].text in ("Positive", "Negative")
    params = SamplingParams(structured_outputs={"regex": r"\w+@\w+\.com"}, stop=["\n"])
    assert llm.generate("An address", params, use_tqdm=False)[0].outputs[0].text


def test_vllm_chat(llm: LLM) -> None:
    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "What is 2 + 3?"},
    ]
    [output] = llm.chat(conversation, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    answer = llm.engine.chat(conversation, temperature=0, max_tokens=8)
    assert output.outputs[0].text.strip() == answer.choices[0].message.content.strip()
    assert len(llm.chat([conversation, conversation], use_tqdm=False)) == 2


def test_vllm_embed(llm: LLM) -> None:
    outputs = llm.embed(PROMPTS)
    assert outputs[0].outputs.embedding == llm.engine.encode(PROMPTS[0]).embedding
    assert np.linalg.norm(outputs[1].outputs.embedding) == pytest.approx(1, abs=1e-3)


def test_vllm_score(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="rank"):  # its vocabulary has no single tokens for "yes" and "no"
        llm.score("What is a cat?", ["A cat is an animal.", "Paris."])


def test_vllm_classify_is_refused_by_a_model_without_labels(llm: LLM) -> None:
    with pytest.raises(InvalidRequest):
        llm.classify("What is a cat?")


# --- SGLang: examples of its offline engine ---


def test_sglang_batch(engine: SyncEngine) -> None:
    outputs = engine.generate(PROMPTS, {"temperature": 0.8, "top_p": 0.95, "max_new_tokens": 8})
    for number, output in enumerate(outputs):
        assert output["text"] == output.text
        assert output["index"] == number


def test_sglang_stream(engine: SyncEngine) -> None:
    whole = engine.generate(PROMPTS[0], GREEDY)
    chunks = [chunk["text"] for chunk in engine.generate(PROMPTS[0], GREEDY, stream=True)]
    assert chunks[-1] == whole["text"]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(chunks))


def test_sglang_async(engine: SyncEngine) -> None:
    async def main() -> tuple[Any, Any, list[Any]]:
        outputs = await engine.async_generate(PROMPTS, GREEDY)
        generator = await engine.async_generate(PROMPTS[0], GREEDY, stream=True)
        return outputs, await engine.async_encode("x"), [chunk async for chunk in generator]

    outputs, vector, chunks = asyncio.run(main())
    assert outputs[0].text == chunks[-1].text
    assert vector.embedding


def test_sglang_async_with_its_own_loop_running(engine: SyncEngine) -> None:
    async def main() -> Any:
        return engine.generate(PROMPTS[0], GREEDY)  # synchronous, under a running loop

    assert asyncio.run(main()).text == engine.generate(PROMPTS[0], GREEDY).text


def test_sglang_input_ids(engine: SyncEngine) -> None:
    ids = engine.get_tokenizer().encode(PROMPTS[0])
    expected = engine.generate(PROMPTS[0], GREEDY).output_ids
    given = (ids, np.array(ids), torch.tensor(ids), np.array(ids, np.int32))
    for each in given:
        assert engine.generate(input_ids=each, sampling_params=GREEDY).output_ids == expected
        assert engine.generate(each, GREEDY).output_ids == expected
    for batch in (np.array([ids, ids]), torch.tensor([ids, ids])):
        assert [answer.output_ids for answer in engine.generate(input_ids=batch, sampling_params=GREEDY)] == [
            expected
        ] * 2


def test_sglang_logprobs(engine: SyncEngine) -> None:
    answer = engine.generate(PROMPTS[0], GREEDY, return_logprob=True, return_text_in_logprobs=True)
    assert [token.id for token in answer.token_logprobs] == answer.output_ids
    assert "".join(token.text or "" for token in answer.token_logprobs).startswith(answer.text[:3])


def test_sglang_regex_and_schema(engine: SyncEngine) -> None:
    assert engine.generate("Year:", {"regex": "[0-9]{4}", "max_new_tokens": 8}).text.isdigit()


def test_sglang_server_info_and_flush(engine: SyncEngine) -> None:
    info = engine.get_server_info()
    assert info["context_length"] == 512
    assert info.internal_states[0]["num_running"] == 0
    assert engine.flush_cache() is True


def test_sglang_score(engine: SyncEngine) -> None:
    scores = engine.score("Is it", ["blue?", "red?"], label_token_ids=[5, 6], apply_softmax=True)
    assert [sum(each) for each in scores] == [pytest.approx(1), pytest.approx(1)]


def test_sglang_shutdown() -> None:
    engine = SyncEngine()
    assert engine.generate("Once", GREEDY).text  # starts by itself
    engine.shutdown()
    with pytest.raises(EngineClosed, match="closed"):
        engine.generate("Once")


# --- Penstock's own forms ---


def test_sampling_parameters_as_keywords(engine: SyncEngine) -> None:
    expected = engine.generate("Once upon a time", GREEDY).text
    assert engine.generate("Once upon a time", temperature=0, max_tokens=8).text == expected
    assert engine.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=8)).text == expected
    assert engine.generate("Once upon a time", {"max_tokens": 8}, temperature=0).text == expected


@pytest.mark.parametrize(
    ("call", "advice"),
    [
        (lambda engine: engine.generate("x", max_new_token=3), "max_new_tokens"),
        (lambda engine: engine.chat("x", temprature=3), "temperature"),
        (lambda engine: SamplingParams(min_pp=0.5), "min_p"),
        (lambda engine: SamplingParams(max_tokens=4, max_new_tokens=4), "same parameter"),
    ],
)
def test_a_wrong_name_is_answered_with_the_right_one(engine: SyncEngine, call: Any, advice: str) -> None:
    with pytest.raises(InvalidRequest, match=advice):
        call(engine)


def test_wrong_values_of_sampling_params_are_refused_where_they_are_written() -> None:
    with pytest.raises(InvalidRequest, match="temperature"):
        SamplingParams(temperature=-1)
    params = SamplingParams(max_tokens=4, stop="x", logit_bias={3: 1.0})
    assert params == {"max_new_tokens": 4, "stop": "x", "logit_bias": {3: 1.0}}
    assert (params.max_tokens, params.top_p, params.clone()) == (4, 1.0, params)


def test_stream_of_several_prompts_has_the_texts_of_each(engine: SyncEngine) -> None:
    texts = dict.fromkeys(range(3), "")
    for piece in engine.stream(PROMPTS, GREEDY):
        texts[piece.index] += piece.delta
    assert [*texts.values()] == [answer.text for answer in engine.generate(PROMPTS, GREEDY)]


def test_leaving_a_stream_of_several_prompts_ends_all(engine: SyncEngine) -> None:
    for _ in engine.stream(PROMPTS, {"max_new_tokens": 400, "ignore_eos": True}):
        break
    while engine.status().num_requests:
        pass
    assert engine.status().num_used_pages == 0


def test_account_of_a_request(engine: SyncEngine) -> None:
    engine.flush_cache()
    prompt = "Once upon a time there was a cat that lived beside a river. " * 3
    cold, warm = (engine.generate(prompt, GREEDY) for _ in range(2))
    assert cold.account is not None
    assert warm.account is not None
    assert cold.account.computed_tokens == cold.meta_info.prompt_tokens + 7
    assert warm.account.cached_tokens == warm.meta_info.cached_tokens > 0
    assert min(cold.account) >= 0
    assert cold.account.page_seconds > 0


def test_results_look_like_text_and_escape_it(engine: SyncEngine) -> None:
    answer = engine.generate("<script>", GREEDY, return_logprob=True, return_text_in_logprobs=True)
    assert "background" in answer._repr_html_()
    answers = engine.generate(["<script>", "b"], GREEDY)
    assert "<script>" not in answers._repr_html_()
    values = {"text": "<b>", "output_ids": [1], "meta_info": {**answer.meta_info}}
    values["meta_info"]["output_token_logprobs"] = [[-0.5, 1, "<b>"]]
    assert "<b>" not in Generated(values)._repr_html_()


def test_names_of_the_package_and_what_completes() -> None:
    assert {"Engine", "SyncEngine", "LLM", "SamplingParams", "lang"} <= {*dir(penstock)}
    names = inspect.signature(Engine).parameters
    assert {option.name for option in options()} == {*names}
    assert {*inspect.signature(SyncEngine).parameters} == {*names}
    assert {parameter.name for parameter in parameters()} <= {*inspect.signature(SamplingParams).parameters}
    assert "Keep so many of the likeliest tokens" in (SamplingParams.__doc__ or "")


def test_a_call_of_an_engine_that_was_not_started_says_what_to_do() -> None:
    with pytest.raises(EngineClosed, match="SyncEngine"):
        _ = Engine().generate("Once")


async def test_awaitable_stream_of_the_async_engine() -> None:
    async with Engine() as engine:
        whole = await engine.generate("Once", GREEDY)
        assert [piece async for piece in engine.generate("Once", GREEDY, stream=True)][-1].text == whole.text
        stream = await engine.async_generate("Once", GREEDY, stream=True)
        assert [piece async for piece in stream][-1].text == whole.text
        assert engine.tokenizer.decode(engine.tokenizer.encode("Once")) == "Once"
        prompt = engine.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
        assert "Hi" in prompt


def test_streams_refuse_what_they_cannot_do(engine: SyncEngine) -> None:
    with pytest.raises(InvalidRequest, match="stream"):
        next(engine.stream("Once", stream=False))
    with pytest.raises(InvalidRequest, match="incremental"):
        engine.generate("Once", incremental=True)


def test_progress_counts_the_prompts(engine: SyncEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.generate(PROMPTS, GREEDY, progress=True)
    assert "3/3" in capsys.readouterr().err


def test_vllm_score_and_classify_of_encoders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_encoders.save(tmp_path / "pairs", "bert", num_labels=1)
    tiny_encoders.save_tokenizer(tmp_path / "pairs")
    with LLM(str(tmp_path / "pairs")) as llm:
        scores = [output.outputs.score for output in llm.score("w3 w4", ["w5", "w6 w7"])]
        ranked = sorted(llm.engine.rerank("w3 w4", ["w5", "w6 w7"]), key=lambda each: each.index)
        expected = [each.score for each in ranked]
        many = [output.outputs.score for output in llm.score("w3 w4", ["w5", "w6 w7"] * 513, use_tqdm=True)]
    assert scores == expected
    assert many[-2:] == pytest.approx(expected, abs=1e-5)
    assert "1026/1026" in capsys.readouterr().err
    tiny_encoders.save(tmp_path / "labels", "roberta", num_labels=3)
    tiny_encoders.save_tokenizer(tmp_path / "labels")
    with LLM(str(tmp_path / "labels")) as llm:
        [output, _] = llm.classify(["w3 w4", "w5"])
        assert output.outputs.num_classes == 3
        assert sum(output.outputs.probs) == pytest.approx(1, abs=1e-3)
