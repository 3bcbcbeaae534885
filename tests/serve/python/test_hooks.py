from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny_models
from serve import Engine, EngineFailure, InvalidRequest, PenstockError, http_server
from serve.python.hooks import StepEvent, TokenEvent

PROMPT = "Once upon a time"
GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with Engine(tiny_models.cached()) as engine:
        yield engine


async def test_logits_are_those_of_the_model_and_may_be_changed(engine: Engine) -> None:
    plain = await engine.generate(PROMPT, GREEDY)
    seen: list[tuple[list[int], torch.Tensor]] = []

    def forbid(ids: list[int], logits: Any) -> None:
        seen.append((ids, logits.clone()))
        logits[plain.output_ids[0]] = -1e9

    other = await engine.generate(PROMPT, GREEDY, on_logits=forbid)
    assert plain.output_ids[0] not in other.output_ids
    model = AutoModelForCausalLM.from_pretrained(tiny_models.cached(), dtype=torch.float32)
    assert [len(ids) for ids, _ in seen] == list(range(len(seen[0][0]), len(seen[0][0]) + 6))
    for ids, logits in seen:
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits[0, -1]
        torch.testing.assert_close(logits, expected, atol=0.05, rtol=0.05)


async def test_returned_logits_replace_the_models_own(engine: Engine) -> None:
    def only(ids: list[int], logits: Any) -> Any:
        return torch.zeros_like(logits).index_fill_(0, torch.tensor([65]), 10.0)

    answers = await engine.generate([PROMPT, "x"], GREEDY, on_logits=only)
    assert [answer.output_ids for answer in answers] == [[65] * 6] * 2
    assert [piece async for piece in engine.stream(PROMPT, GREEDY, on_logits=only)][-1].output_ids[-1] == 65
    g = engine.open(PROMPT, GREEDY, on_logits=only)
    await g.generate(2)
    assert g.fork()[0].ids[-2:] == [65, 65]


async def test_a_hook_of_the_engine_is_called_for_every_request(engine: Engine) -> None:
    plain = await engine.generate(PROMPT, GREEDY)

    def only_65(ids: list[int], logits: Any) -> Any:
        return torch.full_like(logits, -1e9).index_fill_(0, torch.tensor([65]), 0.0)

    calls: list[int] = []
    end = engine.on_logits(only_65)
    with pytest.raises(InvalidRequest, match="already"):
        engine.on_logits(only_65)
    async with http_server(engine) as server, httpx.AsyncClient(base_url=server.url) as client:
        answer = await client.post("/generate", json={"text": PROMPT, "sampling_params": GREEDY})
    assert answer.json()["output_ids"] == [65] * 6
    own = await engine.generate(PROMPT, GREEDY, on_logits=lambda ids, logits: calls.append(int(logits.argmax())))
    assert own.output_ids == calls == [65] * 6
    assert await engine.open(PROMPT, GREEDY).generate() == own.text
    pieces = engine.stream(PROMPT, {**GREEDY, "max_new_tokens": 12})
    assert (await anext(pieces)).output_ids[0] == 65
    end()
    assert [i async for piece in pieces for i in piece.output_ids][-6:] != [65] * 6  # it ends for running requests too
    assert (await engine.generate(PROMPT, GREEDY)).output_ids == plain.output_ids
    with pytest.raises(InvalidRequest, match="function"):
        engine.on_logits(3)  # pyright: ignore[reportArgumentType]


async def test_a_hook_and_a_grammar_both_hold(engine: Engine) -> None:
    def prefer(ids: list[int], logits: Any) -> None:
        logits[engine.tokenizer.convert_tokens_to_ids("b")] += 1e3

    sampling = {**GREEDY, "regex": "[abc]{3}", "ignore_eos": False}
    assert (await engine.generate(PROMPT, sampling, on_logits=prefer)).text == "bbb"
    allowed = {**GREEDY, "allowed_token_ids": [66, 67]}
    answer = await engine.generate(PROMPT, allowed, on_logits=lambda ids, logits: -logits)
    assert {*answer.output_ids} <= {66, 67}


async def test_a_hook_that_fails_ends_its_own_request(engine: Engine) -> None:
    def fail(ids: list[int], logits: Any) -> None:
        raise ValueError("mine")

    try:
        answer = await engine.generate(PROMPT, GREEDY, on_logits=fail)
        assert answer.finish_reason == "abort"
    except (EngineFailure, PenstockError):
        pass
    assert (await engine.generate(PROMPT, GREEDY)).output_ids
    with pytest.raises(InvalidRequest, match="on_logits"):
        await engine.generate(PROMPT, GREEDY, on_logits=3)  # pyright: ignore[reportArgumentType, reportCallIssue]


async def test_requests_without_hooks_get_no_host_data(engine: Engine) -> None:
    """A hook costs only the steps that its request is in."""
    plain = await engine.generate(PROMPT, GREEDY)
    both = [
        engine.generate(PROMPT, GREEDY),
        engine.generate(PROMPT, GREEDY, on_logits=lambda ids, logits: None),
    ]
    for call in both:
        assert (await call).output_ids == plain.output_ids


async def test_tokens_of_a_call_and_of_all(engine: Engine) -> None:
    events: list[TokenEvent] = []
    every: list[TokenEvent] = []
    end = engine.on_token(every.append)
    answer = await engine.generate(PROMPT, GREEDY, on_token=events.append, rid="mine")
    other = await engine.generate("x", GREEDY, rid="other")
    end()
    await engine.generate("x", GREEDY)
    assert [i for event in events for i in event.ids] == answer.output_ids
    assert "".join(event.text for event in events) == answer.text
    assert events[-1].finish_reason == "length"
    assert [i for event in every if event.rid == "other" for i in event.ids] == other.output_ids
    assert {event.rid for event in every} == {"mine", "other"}


async def test_steps_are_counted_and_a_failing_function_is_dropped(engine: Engine) -> None:
    steps: list[StepEvent] = []
    end = engine.on_step(steps.append)
    with pytest.raises(InvalidRequest, match="already"):
        engine.on_step(print)
    answer = await engine.generate(PROMPT, GREEDY)
    end()
    assert sum(step.num_prompt_tokens for step in steps) == answer.meta_info.prompt_tokens
    assert sum(step.num_new_tokens for step in steps) == 6

    def fail(step: StepEvent) -> None:
        raise ValueError

    engine.on_step(fail)
    assert (await engine.generate(PROMPT, GREEDY)).output_ids == answer.output_ids
    engine.on_step(steps.append)
