"""In a pipeline, batches in flight have equal sizes and do not wait for each other's tokens."""

from __future__ import annotations

import pytest

import fake_runner
from runtime.batch import UNKNOWN, Batch


def drive(num_stages: int, watch, **plan: object) -> fake_runner.Drive:
    made = fake_runner.make_plan(micro_batches=num_stages, overlap=False, **plan)
    return fake_runner.Drive(made, depth=num_stages - 1, watch=watch)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_every_token_of_a_micro_batch_is_known(num_stages: int):
    batches: list[Batch] = []
    run = drive(num_stages, batches.append)
    sequences = [fake_runner.make_sequence(range(3, 6 + n), max_new_tokens=9, seed=n) for n in range(6)]
    run.add(*sequences)
    run.run()
    for sequence in sequences:
        assert run.output(sequence) == run.expected(sequence)
    for batch in batches:
        assert UNKNOWN not in batch.token_ids


def test_running_sequences_are_divided_evenly():
    batches: list[Batch] = []
    run = drive(2, batches.append)
    run.add(*(fake_runner.make_sequence(range(3, 8), max_new_tokens=20, seed=n) for n in range(6)))
    run.run()
    steady = [len(batch.sequences) for batch in batches[3:20]]
    assert set(steady) == {3}


def test_largest_micro_batch_is_kept_to():
    batches: list[Batch] = []
    run = drive(2, batches.append, max_micro_batch=2)
    run.add(*(fake_runner.make_sequence(range(3, 8), max_new_tokens=5, seed=n) for n in range(6)))
    run.run()
    assert max(len(batch.sequences) for batch in batches) == 2
