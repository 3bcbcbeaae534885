"""With a target for the time between tokens, mixed steps compute as many prompt tokens as fit into it."""

from __future__ import annotations

from typing import Any

import pytest

from fake_runner import Drive, make_plan, make_sequence
from greedy import GREEDY, model_path, prompts, reference
from ops.machine import Machine
from runtime.actors.step_times import StepTimes
from runtime.batch import Batch
from runtime.config import Args
from runtime.config.resolve import resolve
from runtime.errors import ConfigurationError
from runtime.scheduler.budget import PromptBudget
from serve import Engine
from small_facts import FACTS

DECODE_S, TOKEN_S = 0.010, 0.0005  # simulated time of a decode step, and of each prompt token


def step_s(batch: Batch) -> float:
    return DECODE_S + TOKEN_S * batch.stats.num_prompt_tokens


def simulated(target_s: float | None) -> tuple[list[float], list[int]]:
    """Run streams beside arriving long prompts. Return the times of steps with decode rows, and all output lengths."""
    drive = Drive(make_plan(chunk_tokens=512), num_pages=2000, page_size=4)
    times, found = StepTimes(), list[float]()
    streams = [make_sequence([number], max_new_tokens=200, seed=number) for number in range(4)]
    for stream in streams:
        drive.add(stream)
    sequences = list(streams)
    for number in range(400):
        if number % 40 == 20:
            sequences.append(make_sequence([number % 7 + 9] * 300, max_new_tokens=5, seed=number))
            drive.add(sequences[-1])
        batch = drive.step()
        if batch is None:
            break
        times.note(batch, step_s(batch))
        if target_s is not None:
            drive.scheduler.limit_mixed_steps(times.tokens_within(target_s))
        if batch.stats.num_decode_rows:
            found.append(step_s(batch))
    drive.run()
    assert all(drive.output(sequence) == drive.expected(sequence) for sequence in sequences)
    return found, [len(drive.output(sequence)) for sequence in sequences]


def test_steps_keep_to_the_target_after_the_first_measurement():
    without, _ = simulated(None)
    assert max(without) > 0.1
    with_target, lengths = simulated(0.040)
    late = [seconds for seconds in with_target if seconds > 0.0401]
    assert len(late) <= 1  # the first prompt, before its speed is known
    assert any(seconds > 0.03 for seconds in with_target)  # and uses the time
    assert lengths[4:] == [5] * (len(lengths) - 4)


def test_a_target_below_a_decode_step_still_lets_prompts_continue():
    with_target, lengths = simulated(0.001)
    assert sorted(with_target)[-2] <= DECODE_S + 4 * TOKEN_S + 1e-9
    assert lengths[4:] == [5] * (len(lengths) - 4)


def test_a_hard_limit_cuts_prompts_down_to_a_page():
    assert PromptBudget(make_plan(chunk_tokens=100), 4, 2, hard_limit=30).grant(0, 80) == 28
    assert PromptBudget(make_plan(chunk_tokens=100), 4, 2, hard_limit=0).grant(0, 80) == 4
    assert PromptBudget(make_plan(chunk_tokens=100), 4, 2, hard_limit=1000).grant(0, 200) == 96


@pytest.mark.parametrize("options", [{"chunked_prefill_size": -1}, {"enable_mixed_chunk": False}])
def test_a_target_without_cut_prompts_is_refused(options: dict[str, Any]):
    args = Args.of(model_path="/models/small", target_inter_token_latency=40.0, **options)
    with pytest.raises(ConfigurationError, match="--target-inter-token-latency"):
        resolve(args, Machine.named("cpu"), FACTS)


async def test_the_engine_limits_mixed_steps():
    options = {"skip_tokenizer_init": True, "random_seed": 1, "max_total_tokens": 4096, "page_size": 4}
    async with Engine(model_path("llama"), target_inter_token_latency=0.001, **options) as engine:
        for _ in range(2):
            answers = await engine.generate(input_ids=prompts(), sampling_params=GREEDY)
            assert [answer["output_ids"] for answer in answers] == reference("llama")
        assert engine.core.schedulers[0].scheduler._builder.mixed_limit == 0
