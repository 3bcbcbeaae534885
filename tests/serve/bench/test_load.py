from __future__ import annotations

import argparse
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from runtime.errors import ConfigurationError, StepFailed
from serve import Engine
from serve.bench import latency, offline
from serve.bench.load import generate_arguments, model_vocabulary, parse
from serve.bench.workload import Prompt, RandomLengths, Vocabulary, random_prompts


class ScriptedEngine(Engine):
    """A fake engine that answers one token at a time."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.running = self.peak = 0

    def answer(self, ids: list[int], num: int) -> dict[str, Any]:
        meta = {"prompt_tokens": len(ids), "completion_tokens": num, "cached_tokens": 1}
        return {"text": "a" * num, "output_ids": [7], "meta_info": meta}

    async def generate(
        self, prompt: str | None = None, sampling_params: Mapping[str, Any] | None = None, **more: Any
    ) -> dict[str, Any]:
        *_, last = [answer async for answer in self.stream(prompt, sampling_params, **more)]
        return last

    async def stream(
        self, prompt: str | None = None, sampling_params: Mapping[str, Any] | None = None, **more: Any
    ) -> AsyncIterator[dict[str, Any]]:
        sampling = dict(sampling_params or {})
        self.asked.append({"prompt": prompt, "sampling_params": sampling, **more})
        self.running += 1
        self.peak = max(self.peak, self.running)
        for num in range(1, sampling["max_new_tokens"] + 1):
            await anyio.lowlevel.checkpoint()
            yield self.answer(more["input_ids"], num)
        self.running -= 1


class BrokenEngine(ScriptedEngine):
    async def generate(self, *_: Any, **more: Any) -> dict[str, Any]:
        raise StepFailed("The forward pass failed.")


PROMPTS = random_prompts(
    RandomLengths(input_tokens=6, output_tokens=4, range_ratio=1.0),
    5,
    1,
    Vocabulary.of_size(90),
    as_text=False,
)


async def test_throughput_asks_all_prompts_at_once_and_counts_their_tokens() -> None:
    engine = ScriptedEngine()
    outcomes, duration_s = await offline.throughput(engine, PROMPTS)
    assert engine.peak == len(PROMPTS)
    assert [asked["input_ids"] for asked in engine.asked] == [list(prompt.ids or ()) for prompt in PROMPTS]
    assert [(one.prompt_tokens, one.output_tokens, one.cached_tokens) for one in outcomes] == [(6, 4, 1)] * 5
    assert all(0 < one.e2e_s <= duration_s for one in outcomes)


async def test_throughput_raises_what_the_engine_raises() -> None:
    with pytest.raises(ExceptionGroup) as raised:
        await offline.throughput(BrokenEngine(), PROMPTS)
    assert raised.group_contains(StepFailed)


async def test_a_timed_batch_counts_its_tokens_and_splits_its_time() -> None:
    timed = await latency.time_batch(ScriptedEngine(), PROMPTS)
    assert (timed.prompt_tokens, timed.output_tokens) == (30, 20)
    assert timed.prefill_s > 0
    assert timed.decode_token_s == pytest.approx(timed.decode_s / 3)
    assert timed.tokens_per_s == pytest.approx(50 / (timed.prefill_s + timed.decode_s))


def test_every_repetition_gets_prompts_of_its_own() -> None:
    options = latency.parser().parse_args(["--batch-size", "3", "--input-len", "8", "--repetitions", "4"])
    batches = latency.draw_batches(options, Vocabulary.of_size(1000))
    assert [len(batch) for batch in batches] == [3] * 5
    assert len({prompt.ids for batch in batches for prompt in batch}) == 15
    assert {prompt.prompt_tokens for batch in batches for prompt in batch} == {8}


def test_asking_is_greedy_and_as_long_as_wanted() -> None:
    sampling = {"temperature": 0.0, "max_new_tokens": 3, "ignore_eos": True}
    text = Prompt(text="hi", prompt_tokens=1, output_tokens=3)
    assert generate_arguments(text) == {"prompt": "hi", "sampling_params": sampling}
    assert generate_arguments(text, ignore_eos=False)["sampling_params"]["ignore_eos"] is False


def test_messages_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="not messages"):
        generate_arguments(Prompt(messages=({"role": "user"},), prompt_tokens=None, output_tokens=1))


def test_options_that_the_benchmark_does_not_know_are_the_engines() -> None:
    words = ["--num-prompts", "3", "--model-path", "m", "--page-size", "16"]
    options, args = parse(offline.parser(), words)
    assert isinstance(options, argparse.Namespace)
    assert options.num_prompts == 3
    assert args.keywords() == {"model_path": "m", "page_size": 16}


def test_options_that_nobody_knows_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="no-such"):
        parse(offline.parser(), ["--no-such-option", "1"])


@pytest.mark.parametrize("config", [{"vocab_size": 77}, {"text_config": {"vocab_size": 77}}])
def test_a_local_model_names_its_vocabulary(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    known = model_vocabulary(str(tmp_path))
    assert known is not None
    assert len(known.ids) == 77
    assert model_vocabulary("org/name") is None


def test_a_latency_of_one_token_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--output-len"):
        latency.main(["--output-len", "1", "--vocab-size", "10"])
