"""Measured times of steps."""

from __future__ import annotations

from fake_runner import Drive, make_plan, make_sequence
from runtime.actors.step_times import StepTimes


def test_short_prompts_do_not_hide_the_speed_of_long_ones() -> None:
    drive, times = Drive(make_plan(chunk_tokens=512), num_pages=500, page_size=4), StepTimes()
    assert times.mean_prompt_token_s is None
    predicted = list[float]()
    for number, length in enumerate((4, 4, 4, 400, 4)):
        drive.add(make_sequence([number + 9] * length, max_new_tokens=1, seed=number))
        batch = drive.step()
        assert batch is not None
        times.note(batch, 0.1 + 0.001 * batch.stats.num_prompt_tokens)  # a step of 400 tokens takes 0.5 s
        assert times.mean_prompt_token_s is not None
        predicted.append(times.mean_prompt_token_s * 400)
    assert max(predicted) < 1
    assert predicted[-1] > 0.5
    assert (times.prompt_token_s or 0) * 400 > 5
