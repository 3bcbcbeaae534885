"""Generations as objects give what one request gives, however they are cut, forked and rewound."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny_models
from runtime.errors import InvalidRequest
from serve import Engine, SyncEngine
from serve.python import generation, templates

PROMPT = "Once upon a time there was a small engine that lived beside a long river"
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with Engine(tiny_models.cached(), page_size=4) as engine:
        yield engine


async def test_pieces_of_a_generation_are_one_request(engine: Engine) -> None:
    whole = await engine.generate(PROMPT, {**GREEDY, "max_new_tokens": 24})
    g = engine.open(PROMPT, GREEDY)
    first = await g.generate(8)
    tokens = []
    async for token in g.tokens(100):
        tokens.append(token)
        if len(tokens) == 9:
            break
    rest = await g.generate(7)
    assert g.ids[g.num_prompt :] == whole.output_ids
    assert g.text == whole.text
    assert first + "".join(token.text for token in tokens) + rest == whole.text
    assert g.num_cached > g.num_prompt


async def test_leaving_the_loop_frees_the_request_and_keeps_what_was_yielded(engine: Engine) -> None:
    g = engine.open(PROMPT, GREEDY, max_new_tokens=1000)
    async for _ in g:
        break
    assert len(g.ids) == g.num_prompt + 1
    while engine.status().num_requests:
        await asyncio.sleep(0)
    assert engine.status().num_used_pages == 0


async def test_forks_share_the_pages_of_their_prompt(engine: Engine) -> None:
    whole = await engine.generate(PROMPT, {**GREEDY, "max_new_tokens": 6})
    engine.flush_cache()
    g = engine.open(PROMPT, GREEDY)
    forks = g.fork(8)
    texts = await asyncio.gather(*(fork.generate(6) for fork in forks))
    assert {*texts} == {whole.text}
    assert len(g.ids) == g.num_prompt
    shared = (g.num_prompt - 1) // 4 * 4  # the last token is always computed
    assert sorted(fork.num_cached for fork in forks)[1:] == [shared] * 7


async def test_forks_with_a_seed_draw_differently_and_again_the_same(engine: Engine) -> None:
    async def draw() -> list[str]:
        forks = engine.open(PROMPT, temperature=1.0, seed=3, ignore_eos=True).fork(3)
        return [await fork.generate(8) for fork in forks]

    texts = await draw()
    assert len({*texts}) == 3
    assert await draw() == texts


async def test_rewind_and_append_are_those_of_the_tokens(engine: Engine) -> None:
    g = engine.open(PROMPT, GREEDY)
    await g.generate(10)
    ids = list(g.ids)
    g.rewind(4)
    await g.generate(4)
    assert g.ids == ids
    g.rewind(10)
    g.append(" The end")
    alone = await engine.generate(input_ids=g.ids, sampling_params={**GREEDY, "max_new_tokens": 5})
    await g.generate(5)
    assert g.ids[-5:] == alone.output_ids
    with pytest.raises(InvalidRequest, match="rewind"):
        g.rewind(len(g.ids))


async def test_scores_are_those_of_transformers(engine: Engine) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_models.cached(), dtype=torch.float32)
    g = engine.open(PROMPT)
    choices = [" cat", " dog and a mouse", " river"]
    expected = {}
    for choice in choices:
        ids = engine.tokenizer.encode(choice, add_special_tokens=False)
        with torch.no_grad():
            logits = model(torch.tensor([[*g.ids, *ids]])).logits[0]
        logprobs = logits.log_softmax(-1)[len(g.ids) - 1 : -1].gather(1, torch.tensor(ids)[:, None])[:, 0]
        expected[choice] = logprobs
        score = await g.score(choice)
        assert score.logprob == pytest.approx(float(logprobs.sum()), abs=0.02)
        assert score.per_token == pytest.approx(float(logprobs.mean()), abs=0.02)
        assert [token.id for token in score.tokens] == ids
    by_sum = await g.select(choices, method="sum", append=False)
    assert by_sum == max(choices, key=lambda choice: float(expected[choice].sum()))
    assert by_sum.scores == {choice: pytest.approx(float(expected[choice].sum()), abs=0.02) for choice in choices}
    by_token = await g.select(choices)
    assert by_token == max(choices, key=lambda choice: float(expected[choice].mean()))
    assert g.text == by_token


async def test_greedy_choice_is_what_greedy_generation_writes(engine: Engine) -> None:
    g = engine.open(PROMPT, GREEDY)
    [written, _] = g.fork(2)
    await written.generate(4)
    right = engine.tokenizer.decode(written.ids[-4:])
    choices = [right, "zzzz", " qqqq"]
    chosen = await g.select(choices, method="greedy")
    if engine.tokenizer.encode(right, add_special_tokens=False) == written.ids[-4:]:
        assert chosen == right
    assert sum(chosen.scores.values()) == 1


async def test_unconditional_scores_are_differences(engine: Engine) -> None:
    g = engine.open(PROMPT)
    chosen = await g.select([" cat", " dog"], method="unconditional_likelihood_normalized", append=False)
    bos = engine.tokenizer.bos_token_id
    alone = engine.open([bos] if bos is not None else PROMPT)
    if bos is not None:
        for choice, value in chosen.scores.items():
            difference = (await g.score(choice)).per_token - (await alone.score(choice)).per_token
            assert value == pytest.approx(difference, abs=0.02)


async def test_stop_string_leaves_the_text_before_it(engine: Engine) -> None:
    whole = (await engine.generate(PROMPT, {**GREEDY, "max_new_tokens": 30})).text
    stop = whole[10:13]
    g = engine.open(PROMPT, GREEDY, stop=stop, max_new_tokens=30)
    text = await g.generate()
    assert text == g.text == whole[: whole.index(stop)]
    assert g.finished
    streamed = engine.open(PROMPT, GREEDY, stop=stop, max_new_tokens=30)
    assert "".join([token.text async for token in streamed]) == text == streamed.text
    assert streamed.finished


async def test_saved_generation_goes_on(engine: Engine, tmp_path: Path) -> None:
    g = engine.open(PROMPT, GREEDY)
    await g.generate(5)
    g.save(tmp_path / "g.json")
    loaded = engine.load(tmp_path / "g.json")
    assert await loaded.generate(5) == await g.generate(5)
    assert engine.load(g.save()).ids == g.ids
    for wrong in ({"ids": [1]}, {"format": g.save()["format"]}, {**g.save(), "ids": ["x"]}):
        with pytest.raises(InvalidRequest, match="saved"):
            engine.load(wrong)


async def test_healing_draws_the_last_token_again(engine: Engine) -> None:
    tokenizer = engine.tokenizer
    g = engine.open("Once upon a ti", GREEDY, heal=True)
    old = tokenizer.token_text(g.ids[-1])
    before = g.ids[:-1]
    await g.generate(4)
    assert g.ids[: len(before)] == before
    assert tokenizer.token_text(g.ids[len(before)]).startswith(old)
    text = tokenizer.decode(g.ids)
    assert text.startswith("Once upon a ti")


async def test_a_tool_keeps_the_pages_of_its_generation_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "TOUCH_S", 0.001)  # shorter than a request
    async with Engine(tiny_models.cached(), page_size=4, max_total_tokens=400) as engine:
        g = engine.open(PROMPT, GREEDY)
        await g.generate(4)

        async def flood() -> str:
            for number in range(12):  # together three times as many tokens as the cache has
                await engine.generate(f"{number} " * 30, {**GREEDY, "max_new_tokens": 2})
                await asyncio.sleep(0.01)  # lets the touches run, however slow the machine is
            return "rain"

        weather = await g.tool(flood())
        g.append(f" {weather}")
        await g.generate(2)
        assert g.num_cached >= (g.num_prompt // 4 - 1) * 4


async def test_one_call_at_a_time(engine: Engine) -> None:
    g = engine.open(PROMPT, GREEDY)
    running = asyncio.create_task(g.generate(20))
    await asyncio.sleep(0)
    with pytest.raises(InvalidRequest, match="fork"):
        await g.generate(1)
    await running
    with pytest.raises(InvalidRequest, match="one output"):
        await engine.open(PROMPT, n=2).generate()
    with pytest.raises(InvalidRequest, match="at least one"):
        await g.select([])


async def test_repeated_parameters_are_checked_each_time(engine: Engine) -> None:
    g = engine.open(PROMPT, GREEDY, stop=["no such text"])
    one = await g.generate(1)
    fork = engine.open(PROMPT, GREEDY, stop=["no such text"])
    assert await fork.generate(1) == one
    assert len(engine.templates) == 1
    for wrong in (True, 1.5):  # neither may use the template of 1
        with pytest.raises(InvalidRequest, match="max_new_tokens"):
            await g.generate(wrong)  # pyright: ignore[reportArgumentType]
    assert len(await engine.open(PROMPT, GREEDY, max_new_tokens=1, return_logprob=True).generate()) == len(one)
    assert await engine.open(PROMPT, GREEDY, max_new_tokens=1, stop=one).generate() == ""
    g.ids.append("a")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidRequest):
        await g.generate(1)
    fields: list[dict[str, Any]] = [{"log_metrics": True}, {"timeout_s": 60}]
    for field in fields:
        engine.open(PROMPT, GREEDY, **field)._request(None, {})
        with pytest.raises(InvalidRequest):  # a request's field is not a sampling parameter
            engine.open(PROMPT, {**GREEDY, **field})._request(None, {})
    for number in range(100):
        engine.open(PROMPT, GREEDY, max_new_tokens=number)._request(None, {})
    assert len(engine.templates) == templates.MAX_TEMPLATES


async def test_a_loop_over_a_generation_that_changes_ends_with_an_error(engine: Engine) -> None:
    g = engine.open(PROMPT, GREEDY)

    async def read() -> None:
        async for _ in g:
            g.append(" dog")

    with pytest.raises(InvalidRequest, match="new loop"):
        await read()
    await g.generate(1)


def test_generations_without_await() -> None:
    with SyncEngine(tiny_models.cached()) as engine:
        whole = engine.generate(PROMPT, {**GREEDY, "max_new_tokens": 12})
        g = engine.open(PROMPT, GREEDY, max_new_tokens=6)
        text = "".join(token.text for token in g)
        one, two = g.fork(2)
        assert text + one.generate() == whole.text == text + two.generate()
        one.rewind(6)
        one.append(two.ids[-6:])
        assert one.text == two.text == whole.text
        assert one.select([" a", " b"]) in (" a", " b")
        assert one.score(" a").logprob < 0
        assert engine.load(one.save()).ids == one.ids
        assert one.tool(lambda: len(one)) == len(one.ids)
        assert one.full_text.endswith(one.text)
        with pytest.raises(ZeroDivisionError):
            one.tool(lambda: 1 // 0)
