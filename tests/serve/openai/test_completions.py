"""/v1/completions with the official client."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import openai
import pytest

import fake_core
from runtime.config.chat_templates import MIDDLE_TEMPLATES
from served_core import Serve, Served


async def complete(served: Served, **options: Any) -> Any:
    given = {"model": fake_core.MODEL, "prompt": "Hello", "max_tokens": 200, **options}
    return await served.openai.completions.create(**given)


async def test_prompt_is_continued(served: Served) -> None:
    answer = await complete(served)
    assert answer.object == "text_completion"
    assert answer.choices[0].text == fake_core.TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert served.core.submitted[0].add_special_tokens is True


async def test_sixteen_tokens_are_the_default(served: Served) -> None:
    answer = await served.post("/v1/completions", prompt="Hello")
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["model"] == fake_core.MODEL
    await served.post("/v1/completions", prompt="Hello", max_tokens=None)
    assert served.core.submitted[1].sampling.max_new_tokens is None


@pytest.mark.parametrize(
    ("prompt", "count"), [("a", 1), (["a", "b"], 2), ([5, 6], 1), ([[5], [6], [7, 8]], 3), (["a"], 1)]
)
async def test_prompts_come_in_four_forms(served: Served, prompt: Any, count: int) -> None:
    answer = await complete(served, prompt=prompt, n=2)
    assert [choice.index for choice in answer.choices] == list(range(2 * count))
    assert len(served.core.submitted) == count


async def test_stream_put_together_is_the_whole_answer(served: Served) -> None:
    texts = {0: "", 1: "", 2: "", 3: ""}
    finishes = {}
    async for chunk in await complete(served, prompt=["a", "b"], n=2, stream=True):
        [choice] = chunk.choices
        texts[choice.index] += choice.text
        if choice.finish_reason:
            finishes[choice.index] = choice.finish_reason
    assert texts == dict.fromkeys(range(4), fake_core.TEXT)
    assert finishes == dict.fromkeys(range(4), "stop")


async def test_usage_sums_over_prompts(served: Served) -> None:
    one = await complete(served, prompt="Hello", max_tokens=4)
    many = await complete(served, prompt=["Hello", "Hello"], n=3, max_tokens=4)
    assert many.usage.prompt_tokens == 2 * one.usage.prompt_tokens
    assert many.usage.completion_tokens == 6 * 4
    stream = await complete(
        served,
        prompt=["Hello", "Hello"],
        n=3,
        max_tokens=4,
        stream=True,
        stream_options={"include_usage": True},
    )
    *_, last = [chunk async for chunk in stream]
    assert last.usage == many.usage


async def test_echo_repeats_the_prompt(served: Served) -> None:
    assert (await complete(served, echo=True)).choices[0].text == "Hello" + fake_core.TEXT
    ids = served.core.tokenizer.encode_batch(["Hello"])[0]
    assert (await complete(served, prompt=ids, echo=True)).choices[0].text == "Hello" + fake_core.TEXT
    stream = await complete(served, echo=True, n=2, stream=True)
    texts = {0: "", 1: ""}
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == dict.fromkeys((0, 1), "Hello" + fake_core.TEXT)


@pytest.mark.parametrize("token_id", [-5, 10**6])
async def test_ids_without_a_text_are_not_echoed(served: Served, token_id: int) -> None:
    with pytest.raises(openai.BadRequestError, match="Token ids must be in") as caught:
        await complete(served, prompt=[1, token_id], echo=True)
    assert caught.value.param == "prompt"


async def test_echo_alone_scores_the_prompt(served: Served) -> None:
    # sglang.bench_serving sends such requests
    nothing = await complete(served, prompt="Hello you", max_tokens=0)
    assert (nothing.choices[0].text, nothing.choices[0].finish_reason) == ("", "length")
    answer = await complete(served, prompt="Hello you", echo=True, logprobs=1, max_tokens=0)
    [choice] = answer.choices
    assert choice.text == "Hello you"
    assert "".join(choice.logprobs.tokens) == "Hello you"
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.top_logprobs[0] is None
    assert answer.usage.completion_tokens == 0


async def test_offsets_find_the_tokens_in_the_text(served: Served) -> None:
    choice = (await complete(served, prompt="Größe", echo=True, logprobs=2)).choices[0]
    logprobs = choice.logprobs
    placed = list(zip(logprobs.text_offset, logprobs.tokens))
    # the last token ends the text
    whole = [(offset, token) for offset, token in placed[:-1] if "\ufffd" not in token]
    assert len(whole) > 20
    for offset, token in whole:
        assert choice.text[offset : offset + len(token)] == token
    assert logprobs.text_offset == sorted(logprobs.text_offset)
    assert choice.text[logprobs.text_offset[-2]] == "."


async def test_streamed_logprobs_are_those_of_the_whole_answer(served: Served) -> None:
    whole = (await complete(served, echo=True, logprobs=1)).choices[0].logprobs
    found: dict[str, list[Any]] = {"text_offset": [], "tokens": [], "token_logprobs": [], "top_logprobs": []}
    async for chunk in await complete(served, echo=True, logprobs=1, stream=True):
        if chunk.choices[0].logprobs:
            for name, items in found.items():
                items.extend(getattr(chunk.choices[0].logprobs, name))
    assert found == {name: getattr(whole, name) for name in found}


async def test_logprobs_name_the_chosen_token_beside_the_best(served: Served) -> None:
    logprobs = (await complete(served, logprobs=2, max_tokens=1)).choices[0].logprobs
    assert logprobs.tokens == ["On"]
    assert logprobs.top_logprobs[0]["On"] == -0.25
    assert len(logprobs.top_logprobs[0]) == 2
    assert (await complete(served, logprobs=0, max_tokens=1)).choices[0].logprobs.top_logprobs == [{"On": -0.25}]


async def test_usage_in_every_event_needs_usage_at_all(served: Served) -> None:
    options = {"include_usage": False, "continuous_usage_stats": True}
    stream = await complete(served, stream=True, max_tokens=3, stream_options=options)
    assert [event.usage async for event in stream] == [None] * 3


async def test_logprobs_may_name_tokens_by_their_ids(served: Served) -> None:
    asked = {"max_tokens": 1, "extra_body": {"return_tokens_as_token_ids": True}}
    logprobs = (await complete(served, logprobs=1, **asked)).choices[0].logprobs
    [token_id] = served.core.tokenizer.encode_batch(["On"], add_special_tokens=False)[0]
    assert logprobs.tokens == [f"token_id:{token_id}"]
    assert logprobs.top_logprobs == [{f"token_id:{token_id}": -0.25}]


async def test_end_of_a_long_prompt_may_be_kept(served: Served) -> None:
    await complete(served, max_tokens=1, extra_body={"truncate_prompt_tokens": 3, "add_special_tokens": False})
    [request] = served.core.submitted
    assert (request.keep_last, request.add_special_tokens) == (3, False)
    for options, param in (
        ({"extra_body": {"truncate_prompt_tokens": 0}}, "truncate_prompt_tokens"),
        ({"extra_body": {"truncate_prompt_tokens": 3}, "echo": True}, "truncate_prompt_tokens"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            await complete(served, **options)
        assert caught.value.param == param


async def test_metaspace_offsets_begin_at_the_shown_text(serve: Serve, tmp_path: Any) -> None:
    tokenizer = fake_core.load_tokenizer(tmp_path, "metaspace")
    served = await serve(fake_core.FakeCore(tokenizer, text="Once upon"))
    choice = (await complete(served, prompt="the", echo=True, logprobs=1)).choices[0]
    placed = zip(choice.logprobs.text_offset, choice.logprobs.tokens)
    for offset, token in list(placed)[:-1]:
        shown = token.lstrip() if offset == 0 else token
        assert choice.text[offset : offset + len(shown)] == shown


async def test_rid_names_the_answer(served: Served) -> None:
    answer = await complete(served, prompt=["a", "b"], extra_body={"rid": "job"})
    assert answer.id == "job"
    assert [request.label for request in served.core.submitted] == ["job_0", "job_1"]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt.1"),
        ({"prompt": ["a", 5]}, "prompt.1"),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a"] * 2000}, "prompt"),
        ({"prompt": ["a"] * 1000, "n": 100}, "n"),
        ({"prompt": "long " * 600}, "prompt"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"logprobs": 1000}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"extra_body": {"rid": ["a", "b"]}}, "rid"),
        ({"extra_body": {"top_k": -2}}, "top_k"),
        ({"extra_body": {"json_schema": 3}}, "json_schema"),
        ({"extra_body": {"response_format": {"type": "xml"}}}, "response_format.type"),
        ({"extra_body": {"structured_outputs": {"json": {}, "regex": "a"}}}, "structured_outputs"),
    ],
)
async def test_wrong_parameter_is_named(served: Served, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await complete(served, **options)
    assert caught.value.param == param


async def test_best_of_n_is_n(served: Served) -> None:
    assert len((await complete(served, n=2, best_of=2)).choices) == 2


async def test_completions_without_a_tokenizer_are_refused(serve: Serve) -> None:
    served = await serve(fake_core.FakeCore(None))
    with pytest.raises(openai.BadRequestError, match="use /generate with input_ids"):
        await complete(served, prompt=[1, 2])


async def test_a_suffix_asks_for_what_stands_before_it(serve: Serve) -> None:
    served = await serve()
    ask = {"prompt": ["def f(", "a"], "suffix": "): pass", "max_tokens": 1}
    refused = await served.http.post("/v1/completions", json=ask)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "suffix")
    assert "--completion-template" in refused.text
    plan = served.core.plan
    served.core.plan = replace(plan, tokenizer=replace(plan.tokenizer, middle=MIDDLE_TEMPLATES["qwen_coder"]))
    await served.post("/v1/completions", **ask)
    assert [request.text for request in served.core.submitted] == [
        f"<|fim_prefix|>{prompt}<|fim_suffix|>): pass<|fim_middle|>" for prompt in ask["prompt"]
    ]
    # Kilobytes that would become 17 MB of prompts.
    too_much = {
        "prompt": ["a"] * 1024,
        "suffix": "b" * 17_000,
    }
    for wrong in ({"prompt": [5, 6]}, {"echo": True}, too_much):
        refused = await served.http.post("/v1/completions", json={**ask, **wrong})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "suffix")
