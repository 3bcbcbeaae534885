from __future__ import annotations

from typing import Any

import numpy as np

from fake_runner import Drive, make_plan, make_sequence
from runtime.batch import Batch, Sampling, uniform_numbers
from runtime.request import LogprobParams
from runtime.sampling_params import ROW_ARRAYS
from runtime.scheduler import budget
from runtime.sequence import Sequence


def samplings(*sequences: Sequence, depth: int = 1, plan: Any = None, **pool: Any) -> list[Sampling]:
    """Run sequences to their end, and return the sampling arrays of every step."""
    found: list[Sampling] = []

    def watch(batch: Batch) -> None:
        if batch.sampling is not None:
            found.append(batch.sampling)

    drive = Drive(plan, depth=depth, watch=watch, **pool)
    drive.add(*sequences)
    drive.run()
    return found


def test_uniform_numbers_are_those_of_splitmix64():
    # Reference: the third output of SplitMix64 seeded with 1234567 is 9817491932198370423.
    expected = np.float32((9817491932198370423 >> 40) / 2**24)
    assert uniform_numbers(np.array([1234567], np.uint64), np.array([2]))[0] == expected


def test_uniform_numbers_cover_the_unit_interval_evenly():
    numbers = uniform_numbers(np.arange(100, dtype=np.uint64).repeat(1000), np.tile(np.arange(1000), 100))
    assert numbers.dtype == np.float32
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert abs(counts - 5000).max() < 350


def test_random_choices_depend_on_seed_and_position_only():
    def numbers_of(sequence: Sequence, *others: Sequence) -> list[float]:
        found = samplings(sequence, *others)
        return [float(step.uniform[0]) for step in found][: sequence.max_tokens - sequence.num_prompt]

    alone = numbers_of(make_sequence([1, 2, 3], seed=5))
    longer_prompt = numbers_of(make_sequence([1, 2, 3, 4], seed=5), make_sequence([7], seed=1))
    assert alone == longer_prompt
    assert len(set(alone)) == 4
    assert numbers_of(make_sequence([1, 2, 3], seed=6)) != alone


def test_parameters_are_gathered_by_row():
    first, *_ = samplings(
        make_sequence([1], temperature=0.5, top_k=7, top_p=0.9, min_p=0.25),
        make_sequence([2], temperature=0.0),
        make_sequence([3], top_k=1),
    )
    assert first.greedy.tolist() == [False, True, True]
    params = {name: array.tolist() for name, array in first.params.items()}
    assert params == {  # greedy rows have neutral values, which avoid division by zero
        "temperature": [0.5, 1.0, 1.0],
        "top_k": [7, 2**30, 2**30],
        "top_p": [np.float32(0.9), 1.0, 1.0],
        "min_p": [0.25, 0.0, 0.0],
    }
    assert {name: array.dtype for name, array in first.params.items()} == {
        name: ROW_ARRAYS[name].dtype for name in params
    }
    assert first.bias is first.penalties is first.logprobs is None


def test_parameters_that_are_neutral_for_all_who_run_are_left_out():
    short = make_sequence([1], top_k=7, max_new_tokens=1)
    found = samplings(short, make_sequence([2], min_p=0.5, max_new_tokens=4))
    names = [sorted(step.params) for step in found]
    assert names == [["min_p", "top_k"]] * 2 + [["min_p"]] * 2  # one more step is in flight when the sequence ends
    assert not any(step.params for step in samplings(make_sequence([1]), make_sequence([2], temperature=0.0)))


def test_a_seed_of_64_bits_fits():
    first, *_ = samplings(make_sequence([1], seed=2**64 - 1), make_sequence([1], seed=-1))
    assert first.uniform[0] == first.uniform[1]


def test_stop_ids_are_forbidden_until_the_minimum_is_reached():
    found = samplings(make_sequence([1], stop_ids=[4, 5], min_new_tokens=2, max_new_tokens=4), depth=2)
    forbidden = [[] if step.bias is None else sorted(step.bias.token_ids.tolist()) for step in found]
    assert forbidden[:3] == [[4, 5], [4, 5], []]
    assert found[0].bias is not None
    assert np.isneginf(found[0].bias.values).all()


def test_biases_name_their_row_and_yield_to_prohibition():
    plain = make_sequence([1])
    biased = make_sequence([2], logit_bias={3: 1.5, 4: -2.0}, stop_ids=[4], min_new_tokens=1)
    first, *_ = samplings(plain, biased)
    assert first.bias is not None
    assert first.bias.rows.tolist() == [1, 1]
    assert dict(zip(first.bias.token_ids.tolist(), first.bias.values.tolist())) == {3: 1.5, 4: -np.inf}


def test_penalties_start_with_a_fresh_sequence_index_once():
    plain = make_sequence([1])
    penalised = make_sequence([2, 3], frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=1.5)
    first, second, *_ = samplings(plain, penalised)
    assert first.penalties is not None
    assert second.penalties is not None
    assert first.penalties.rows.tolist() == [1]
    assert {name: array.tolist() for name, array in first.params.items()} == {
        "frequency_penalty": [0.0, 0.5],
        "presence_penalty": [0.0, 0.25],
        "repetition_penalty": [1.0, 1.5],
    }
    ((sequence_index, prompt, output),) = first.penalties.fresh
    assert (sequence_index, prompt.tolist(), output.tolist()) == (
        first.penalties.sequence_indices[0],
        [2, 3],
        [],
    )
    assert second.penalties.fresh == ()


def test_a_retracted_sequence_brings_its_output_to_its_new_row(monkeypatch: Any):
    monkeypatch.setattr(budget, "RESERVED_OUTPUT_TOKENS", 1)
    plan = make_plan(new_token_ratio=0.0, min_new_token_ratio=0.0)
    sequences = [make_sequence([i] * 4, max_new_tokens=9, frequency_penalty=0.5) for i in range(2)]
    found = samplings(*sequences, plan=plan, num_pages=14, page_size=1)
    fresh = [entry for step in found if step.penalties is not None for entry in step.penalties.fresh]
    assert len(fresh) == 3
    again = fresh[2]
    assert again.prompt_ids.tolist() == [1] * 4
    assert again.output_ids.tolist() == sequences[1].ids[4 : 4 + len(again.output_ids)]
    assert len(again.output_ids) > 0


def test_logprobs_are_asked_for_rows_that_want_them():
    wanted = LogprobParams(top=2)
    first, *_ = samplings(make_sequence([1]), make_sequence([2], logprobs=wanted))
    assert first.logprobs == (None, wanted)
