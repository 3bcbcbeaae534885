"""The rows of a step: budgets, chunks, mixing, admission and deferral."""

from __future__ import annotations

from typing import Any

from fake_runner import Drive, make_plan, make_sequence
from runtime.batch import Batch
from runtime.request import LogprobParams
from runtime.sequence import Sequence


def shapes(drive: Drive, *sequences: Sequence, num_steps: int) -> list[list[int]]:
    """Return the token counts of the rows of the next steps."""
    drive.add(*sequences)
    batches = [drive.step() for _ in range(num_steps)]
    return [batch.counts.tolist() for batch in batches if batch is not None]


def plan(**values: Any) -> Any:
    return make_plan(**values)


def test_a_long_prompt_is_cut_into_chunks():
    drive = Drive(plan(chunk_tokens=8))
    sequence = make_sequence(range(19), max_new_tokens=2)
    assert shapes(drive, sequence, num_steps=4) == [[8], [8], [3], [1]]
    drive.run()
    assert drive.output(sequence) == drive.expected(sequence)


def test_the_last_chunk_may_have_a_smaller_limit():
    drive = Drive(plan(chunk_tokens=16, last_chunk_tokens=8), prefix=False, page_size=4)
    for length, counts in ((8, [8]), (9, [4, 5]), (14, [8, 6]), (16, [8, 8]), (27, [16, 4, 7])):
        sequence = make_sequence(range(length), max_new_tokens=1)
        assert shapes(drive, sequence, num_steps=len(counts)) == [[count] for count in counts]
        drive.run()
        assert drive.output(sequence) == drive.expected(sequence)
    whole = Drive(plan(chunk_tokens=None, last_chunk_tokens=8), prefix=False, page_size=4)
    assert shapes(whole, make_sequence(range(14), max_new_tokens=1), num_steps=1) == [[14]]


def test_only_the_last_chunk_samples():
    drive = Drive(plan(chunk_tokens=8))
    drive.add(make_sequence(range(12)))
    first, second = drive.step(), drive.step()
    assert first is not None
    assert second is not None
    assert first.sampling is None
    assert second.sampling is not None


def test_decode_rows_are_deducted_and_chunks_end_at_a_page():
    drive = Drive(plan(chunk_tokens=8), prefix=False, depth=0)
    assert shapes(drive, make_sequence([1, 2], max_new_tokens=9), num_steps=1) == [[2]]
    assert shapes(drive, make_sequence(range(14)), num_steps=3) == [[1, 4], [1, 4], [1, 6]]


def test_prompts_with_logprobs_are_cut_and_do_not_hold_up_others():
    drive = Drive(plan(chunk_tokens=64, max_running=9), depth=0, page_size=4)
    drive.scheduler.limit_steps(None, None, scored=(12, 8))
    drive.add(make_sequence([1, 2], max_new_tokens=20))
    drive.step()
    scored = [make_sequence(range(i, i + 20), logprobs=LogprobParams(start=0), max_new_tokens=1) for i in (3, 30)]
    late = make_sequence(range(21), logprobs=LogprobParams(start=16), max_new_tokens=1)
    others = make_sequence([9] * 6), late
    assert shapes(drive, *scored, *others, num_steps=3) == [[1, 8, 6, 16], [1, 1, 8], [1, 1, 4, 5]]
    drive.run()
    for sequence in scored:
        [found] = [delta for delta in drive.deltas if delta.request_id == sequence.request.id]
        assert found.prompt_logprobs is not None
        assert [token for _, token in found.prompt_logprobs.chosen] == sequence.ids[:20]


def test_many_decode_rows_leave_prompts_at_least_a_page():
    drive = Drive(plan(chunk_tokens=4, max_running=9), depth=0, page_size=4)
    drive.add(*(make_sequence([i], max_new_tokens=20) for i in range(6)))
    drive.step()
    drive.step()
    drive.add(make_sequence(range(9)))
    batch = drive.step()
    assert batch is not None
    assert batch.counts.tolist() == [1, 1, 1, 1, 1, 1, 4]


def test_short_prompts_share_the_budget_of_a_step():
    drive = Drive(plan(chunk_tokens=8), prefix=False)
    prompts = [make_sequence([i, i, i], max_new_tokens=1) for i in range(4)]
    assert shapes(drive, *prompts, num_steps=2) == [[3, 3], [3, 3]]


def test_the_first_whole_prompt_may_exceed_the_step_budget():
    drive = Drive(plan(chunk_tokens=None, max_prefill_tokens=6), prefix=False)
    long, short, other = (make_sequence(range(n), max_new_tokens=1) for n in (9, 3, 3))
    assert shapes(drive, long, short, other, num_steps=2) == [[9], [3, 3]]


def test_prompts_and_decode_rows_share_no_step_unless_mixed():
    drive = Drive(plan(chunk_tokens=4, mixed=False), prefix=False, depth=0)
    assert shapes(drive, make_sequence([1, 2], max_new_tokens=5), num_steps=2) == [[2], [1]]
    assert shapes(drive, make_sequence(range(8), max_new_tokens=1), num_steps=3) == [[4], [4], [1]]


def test_rows_limit_what_runs():
    drive = Drive(plan(max_running=2), depth=0)
    sequences = [make_sequence([i], max_new_tokens=2) for i in range(3)]
    assert shapes(drive, *sequences, num_steps=3) == [[1, 1], [1, 1], [1]]


def test_admission_keeps_pages_for_the_output_of_those_that_run():
    reserving = Drive(plan(new_token_ratio=1.0), num_pages=30, page_size=1, prefix=False)
    trusting = Drive(plan(new_token_ratio=0, min_new_token_ratio=0), num_pages=30, page_size=1, prefix=False)
    for drive in (reserving, trusting):
        drive.add(make_sequence([1] * 4, max_new_tokens=16), make_sequence([2] * 4, max_new_tokens=16))
        drive.step()
    assert reserving.scheduler.num_running == 1
    assert trusting.scheduler.num_running == 2


def test_what_does_not_fit_is_tried_again_when_somebody_leaves():
    drive = Drive(plan(new_token_ratio=1.0, min_new_token_ratio=1.0), num_pages=24, page_size=1, depth=0)
    drive.add(make_sequence([1] * 4, max_new_tokens=4), make_sequence([2] * 4, max_new_tokens=16))
    drive.step()
    assert drive.scheduler.num_running == 1
    drive.run()
    assert drive.scheduler.num_retracted == 0


def test_a_sequence_that_fills_the_pool_runs_alone():
    drive = Drive(plan(new_token_ratio=1.0), num_pages=4, page_size=4)
    sequence = make_sequence(range(13), max_new_tokens=3)
    drive.add(sequence)
    drive.run()
    assert drive.output(sequence) == drive.expected(sequence)


def test_rows_of_one_step_share_pages_that_it_writes():
    drive = Drive(page_size=4)
    first, second = make_sequence(range(9)), make_sequence([*range(8), 30])
    drive.add(first, second)
    batch = drive.step()
    assert batch is not None
    assert batch.counts.tolist() == [9, 1]
    assert batch.page_table[0, :2].tolist() == batch.page_table[1, :2].tolist()
    drive.run()
    assert drive.output(second) == drive.expected(second)


def test_a_sequence_waits_for_a_prefix_that_another_is_computing():
    drive = Drive(plan(chunk_tokens=10), page_size=4)  # 8 of 10 tokens, which leaves two in each step
    first, same = make_sequence(range(20), max_new_tokens=1), make_sequence(range(20), max_new_tokens=1)
    other = make_sequence([40, 41], max_new_tokens=1)
    drive.add(first, same, other)
    batches = [drive.step() for _ in range(4)]
    rows = [list(batch.sequences) for batch in batches if batch is not None]
    assert rows == [[first, other], [first], [first, same]]
    drive.run()
    assert drive.runner.num_tokens_computed == 20 + 2 + 4
    assert same.num_cached == 16
    assert drive.output(same) == drive.expected(same)


def test_a_sequence_with_another_next_page_does_not_wait():
    drive = Drive(plan(chunk_tokens=12), page_size=4, depth=0)
    first = make_sequence(range(30), max_new_tokens=1)
    other = make_sequence([*range(8), 40, 41], max_new_tokens=1)
    assert shapes(drive, first, other, num_steps=3) == [[12], [12], [6, 2]]


def test_no_prefix_cache_computes_the_same_prompt_again():
    drive = Drive(page_size=4, prefix=False)
    drive.add(make_sequence(range(9)), make_sequence(range(9)))
    batch = drive.step()
    assert batch is not None
    assert batch.counts.tolist() == [9, 9]


def test_a_batch_counts_what_it_is_made_of():
    drive = Drive(page_size=4, depth=0)
    drive.add(make_sequence(range(9), max_new_tokens=5))
    first = drive.step()
    drive.add(make_sequence([*range(8), 9]))
    second = drive.step()
    assert [batch.stats for batch in (first, second) if batch] == [(1, 0, 9, 0, 0), (1, 8, 1, 1, 0)]


def test_a_batch_is_padded_and_numbered():
    batches: list[Batch] = []
    drive = Drive(page_size=4, watch=batches.append)
    drive.add(make_sequence([1, 2], max_new_tokens=3), make_sequence(range(9), max_new_tokens=3))
    drive.run()
    assert [batch.number for batch in batches] == [0, 1, 2]
    table = batches[0].page_table
    assert table.shape == (2, 3)
    assert table[0, 1:].tolist() == [0, 0]
    assert table.dtype == batches[0].starts.dtype == batches[0].sequence_indices.dtype == "int32"
