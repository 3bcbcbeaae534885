"""All sequences are recomputed after the model's weights change, and read no earlier KV."""

from __future__ import annotations

from typing import Any

import pytest

import fake_runner


@pytest.mark.parametrize(
    "caches",
    [{}, {"window": 6}, {"num_states": 24}, {"num_pages": 14}],
    ids=["pages", "window", "states", "tight"],
)
@pytest.mark.parametrize("every", [1, 3])
def test_recomputed_sequences_read_nothing_from_before(every: int, caches: dict[str, Any]) -> None:
    drive = fake_runner.Drive(**caches)
    prompts = [range(3, 3 + length) for length in (5, 17, 9, 2)]
    sequences = [fake_runner.make_sequence(prompt, max_new_tokens=10, seed=seed) for seed, prompt in enumerate(prompts)]
    drive.add(*sequences[:2])
    for number in range(12):
        if number == 4:
            drive.add(*sequences[2:])
        drive.step()
        if number % every == 0:
            while drive.runner.num_in_flight:
                drive.apply()
            drive.scheduler.recompute()
            drive.scheduler.check()
            assert drive.scheduler.load.num_used_pages == drive.scheduler.load.num_evictable_pages == 0
            drive.runner.drop()  # after this, reading a page before it is written again fails
    drive.run()
    for sequence in sequences:
        assert drive.output(sequence) == drive.expected(sequence)
