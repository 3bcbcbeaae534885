"""DRY's penalties equal the algorithm as its author published it, and serve in a real engine."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest

from runtime.constraint import HostData, Output
from runtime.repetition import Breakers, DryPenalties
from runtime.sampling_params import SamplingParams
from serve import Engine, InvalidRequest


def published(ids: list[int], breakers: set[int], multiplier: float, base: float, allowed: int) -> dict[int, float]:
    """https://github.com/oobabooga/text-generation-webui/pull/5677, with plain lists."""
    last = ids[-1]
    if last in breakers:
        return {}
    match_lengths: dict[int, int] = {}
    for i in range(len(ids) - 1):
        if ids[i] != last or ids[i + 1] in breakers:
            continue
        length = 1
        while i - length >= 0 and ids[i - length] == ids[-(length + 1)] and ids[-(length + 1)] not in breakers:
            length += 1
        match_lengths[ids[i + 1]] = max(length, match_lengths.get(ids[i + 1], 0))
    return {t: min(multiplier * base ** (n - allowed), 1e6) for t, n in match_lengths.items() if n >= allowed}


def after(dry: DryPenalties, ids: list[int], num_prompt: int, num_before: int) -> dict[int, float]:
    data = HostData()
    dry.host_data_after(0, Output(ids, num_prompt, num_before, len(ids) - num_prompt), data)
    assert data.is_there
    return {} if data.biases is None else dict(zip(data.biases[0].tolist(), (-data.biases[1]).tolist()))


@pytest.mark.parametrize("seed", range(12))
def test_penalties_are_the_published_ones(seed: int) -> None:
    draw = random.Random(seed)
    window, allowed = draw.choice([5, 17, 40, -1]), draw.choice([1, 2, 4])
    params = SamplingParams(dry_multiplier=0.8, dry_allowed_length=allowed, dry_penalty_last_n=window)
    breakers = {0} if seed % 2 else set()
    dry = DryPenalties(params, frozenset(breakers), None)
    ids = [draw.randrange(4) for _ in range(draw.randrange(1, 60))]
    num_prompt, told = len(ids), 0
    for _ in range(120):
        expected = published(ids[-window:] if window > 0 else ids, breakers, 0.8, 1.75, allowed)
        assert after(dry, ids, num_prompt, told) == pytest.approx(expected)
        told = len(ids) - num_prompt
        ids += [draw.randrange(4) for _ in range(draw.randrange(1, 3))]


def test_a_hostile_repetition_is_fast_and_finite() -> None:
    dry = DryPenalties(SamplingParams(dry_multiplier=100, dry_base=100), frozenset(), None)
    ids = [7] * 20_000
    penalties = after(dry, ids, len(ids), 0)
    assert penalties == {7: 1e6}
    assert np.isfinite(list(penalties.values())).all()


def test_breakers_are_tokens_with_the_text_and_the_last_token_of_it() -> None:
    texts = {0: b"a", 1: b"\n", 2: b"x\n\n", 3: b"ab", 4: b"b", 5: "é".encode()}
    breakers = Breakers(texts, 6, lambda text: [0, 4] if text == "ab" else [])
    assert breakers.ids(("\n",)) == {1, 2}
    assert breakers.ids(("ab", "é")) == {3, 4, 5}


@pytest.fixture
async def engine() -> Any:
    async with Engine(random_seed=1) as running:
        yield running


async def test_engine_breaks_a_loop_alone_and_in_a_batch(engine: Engine) -> None:
    """A bias makes a greedy loop; DRY breaks it, with a grammar too, and the text is the same in a batch."""
    [loop] = (await engine.generate("x", {"max_new_tokens": 1, "temperature": 0}))["output_ids"]
    stuck = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True, "logit_bias": {str(loop): 30}}
    dry = {**stuck, "dry_multiplier": 40, "dry_sequence_breakers": []}
    plain, broken = await engine.generate("x", stuck), await engine.generate("x", dry)
    assert plain["output_ids"] == [loop] * 24
    ids = broken["output_ids"]
    assert ids[:3] == [loop] * 3 != ids[1:4]
    batch = await engine.generate(["x", "x", "y"], [dry, stuck, dry])
    assert [batch[0]["output_ids"], batch[1]["output_ids"]] == [ids, plain["output_ids"]]
    pattern = {**dry, "regex": "(a|b){24}", "logit_bias": {}}
    text, plain_text = [
        (await engine.generate("x", params))["text"] for params in (pattern, {**pattern, "dry_multiplier": 0})
    ]
    assert set(text) | set(plain_text) <= {"a", "b"}
    assert text != plain_text


async def test_the_event_loop_does_not_look_for_breakers(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    ids = Breakers.ids

    def noted(self: Breakers, texts: tuple[str, ...]) -> frozenset[int]:
        threads.append(threading.get_ident())
        return ids(self, texts)

    monkeypatch.setattr(Breakers, "ids", noted)
    await engine.generate("x", {"max_new_tokens": 2, "dry_multiplier": 1})
    assert threads
    assert threading.get_ident() not in threads


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"dry_base": 0.5}, "dry_base"),
        ({"dry_penalty_last_n": 9000}, "dry_penalty_last_n"),
        ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers"),
        ({"dry_sequence_breakers": ["a"] * 17}, "dry_sequence_breakers"),
    ],
)
def test_limits_are_named(params: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(dry_multiplier=1, **params)
    assert refused.value.param == named
