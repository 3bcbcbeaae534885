"""A sequence from the queue to its last Delta."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fake_runner import Drive, make_plan, make_sequence, reference_embedding
from runtime.batch import UNKNOWN, Batch
from runtime.errors import ContextOverflow, EngineFailure, Overloaded
from runtime.request import Finish, LogprobParams, Usage
from runtime.scheduler.apply import RowFailed

GONE = Finish("abort", message="gone")


def last_finish(drive: Drive) -> Finish | None:
    return drive.deltas[-1].finish


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_outputs_do_not_depend_on_the_steps_in_flight(depth: int):
    drive = Drive(depth=depth)
    sequences = [make_sequence([i, 3, 5], max_new_tokens=9, seed=i) for i in range(5)]
    drive.add(*sequences)
    drive.run()
    assert [drive.output(s) for s in sequences] == [drive.expected(s) for s in sequences]


def test_one_delta_per_sequence_and_step_with_its_usage():
    drive = Drive(depth=0)
    sequence = make_sequence([1, 2, 3], max_new_tokens=3)
    drive.add(sequence)
    drive.run()
    assert [delta.usage[:3] for delta in drive.deltas] == [(3, 1, 0), (3, 2, 0), (3, 3, 0)]
    assert [len(delta.ids) for delta in drive.deltas] == [1, 1, 1]
    assert last_finish(drive) == Finish("length", length=3)


def test_first_tokens_come_before_the_last_prompt_is_computed():
    drive = Drive(depth=0)
    drive.scheduler.limit_steps(20, 8)
    sequences = [make_sequence(range(i, i + 12), max_new_tokens=6) for i in range(5)]
    drive.add(*sequences)
    drive.step()
    assert [sequence.num_output for sequence in sequences] == [1, 1, 0, 0, 0]
    drive.step()  # fewer prompts fit next to these two
    assert [sequence.num_output for sequence in sequences] == [2, 2, 1, 0, 0]
    drive.step()
    assert [sequence.num_output for sequence in sequences] == [3, 3, 2, 1, 0]
    drive.run()
    assert [drive.output(s) for s in sequences] == [drive.expected(s) for s in sequences]


@pytest.mark.parametrize("tokens_per_step", [2, 3, 5])
def test_several_tokens_of_a_step_are_those_of_several_steps(tokens_per_step: int):
    drive = Drive(depth=0, page_size=2)
    drive.runner.tokens_per_step = tokens_per_step
    sequences = [make_sequence([i, 3, 5], max_new_tokens=11, seed=i) for i in range(3)]
    drive.add(*sequences)
    drive.run()
    assert [drive.output(s) for s in sequences] == [drive.expected(s) for s in sequences]
    assert [len(delta.ids) for delta in drive.deltas[:3]] == [tokens_per_step] * 3
    assert last_finish(drive) == Finish("length", length=11)


def test_tokens_behind_a_stop_are_dropped_with_their_logprobs():
    drive = Drive(depth=0)
    drive.runner.tokens_per_step = 5
    output = drive.expected(make_sequence([1, 2, 3], max_new_tokens=8))
    stop = output[2]
    sequence = make_sequence([1, 2, 3], max_new_tokens=8, stop_ids=[stop], logprobs=LogprobParams())
    drive.add(sequence)
    drive.run()
    (delta,) = drive.deltas
    assert (delta.ids, delta.finish) == (output[:3], Finish("stop", matched=stop))
    assert delta.usage.output == 3
    assert delta.logprobs is not None
    assert delta.logprobs.chosen == [(-float(token), token) for token in output[:3]]


def test_several_tokens_of_a_sequence_in_another_step_are_refused():
    drive = Drive(depth=1)
    drive.runner.tokens_per_step = 2
    drive.add(make_sequence([1, 2, 3], max_new_tokens=8))
    with pytest.raises(RowFailed) as caught:
        drive.run()
    assert isinstance(caught.value.__cause__, EngineFailure)
    assert "several tokens" in caught.value.__cause__.message


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_stop_token_is_delivered_and_the_overrun_dropped(depth: int):
    drive = Drive(depth=depth)
    free = make_sequence([1, 2, 3], max_new_tokens=8)
    output = drive.expected(free)
    stop = output[2]
    sequence = make_sequence([1, 2, 3], max_new_tokens=8, stop_ids=[stop])
    drive.add(sequence)
    drive.run()
    assert drive.output(sequence) == output[: output.index(stop) + 1]
    assert last_finish(drive) == Finish("stop", matched=stop)


def test_nothing_is_computed_beyond_the_length_limit():
    drive = Drive(depth=3)
    drive.add(make_sequence([1, 2, 3], max_new_tokens=4))
    drive.run()
    assert drive.runner.num_tokens_computed == 3 + 3  # the last output token needs no KV


def test_a_decode_row_of_a_pending_token_names_a_place():
    batches: list[Batch] = []
    drive = Drive(depth=1, watch=batches.append)
    drive.add(make_sequence([1, 2, 3], max_new_tokens=3))
    drive.run()
    assert [batch.token_ids.tolist() for batch in batches] == [[1, 2, 3], [UNKNOWN], [UNKNOWN]]
    assert [batch.starts.tolist() for batch in batches] == [[0], [3], [4]]


def test_no_output_wanted_computes_the_prompt_and_ends():
    drive = Drive()
    sequence = make_sequence([1, 2, 3, 4, 5], max_new_tokens=0, logprobs=LogprobParams(start=2))
    drive.add(sequence)
    batch = drive.step()
    assert batch is not None
    assert batch.sampling is None
    drive.run()
    (delta,) = drive.deltas
    assert (delta.ids, delta.finish) == ([], Finish("length", length=0))
    assert delta.prompt_logprobs is not None
    assert delta.prompt_logprobs.chosen == [(None, 3), (-4.0, 4), (-5.0, 5)]


@pytest.mark.parametrize("chunk_tokens", [None, 4])
def test_an_embedding_ends_its_request_without_a_token(chunk_tokens: int | None):
    drive = Drive(make_plan(chunk_tokens=chunk_tokens))
    wanting, talking = make_sequence(range(11), wants_embedding=True), make_sequence([3, 4], max_new_tokens=3)
    drive.add(wanting, talking)
    batches = [drive.step() for _ in range(4)]
    assert [batch.embedding_rows is not None for batch in batches if batch].count(True) == 1
    drive.run()
    (delta,) = [delta for delta in drive.deltas if delta.request_id == wanting.request.id]
    assert (delta.ids, delta.finish, delta.usage) == ([], Finish("stop"), Usage(11, 0, 0))
    assert delta.embedding == reference_embedding(wanting)
    assert drive.output(talking) == drive.expected(talking)


def test_an_embedding_uses_a_cached_prefix_and_computes_its_last_token():
    drive = Drive(page_size=1)
    for length, num_computed in ((9, 9), (9, 1), (12, 3)):
        before = drive.runner.num_tokens_computed
        sequence = make_sequence(range(length), wants_embedding=True)
        drive.add(sequence)
        drive.run()
        assert drive.runner.num_tokens_computed - before == num_computed
        assert drive.deltas[-1].embedding == reference_embedding(sequence)


def test_a_missing_embedding_is_our_failure(monkeypatch: pytest.MonkeyPatch):
    drive = Drive(depth=0)
    monkeypatch.setattr(drive.runner, "_embed", lambda *step: None)
    drive.add(make_sequence([1, 2], wants_embedding=True))
    with pytest.raises(RowFailed) as caught:
        drive.step()
    assert isinstance(caught.value.__cause__, EngineFailure)
    assert "no embedding" in caught.value.__cause__.message


def test_a_failed_embedding_row_ends_only_its_request():
    drive = Drive(page_size=1)
    good, bad = (make_sequence([i, 5, 6], wants_embedding=True) for i in (1, 2))
    drive.runner.failed_requests.add(bad.request.id)
    drive.add(good, bad)
    drive.run()
    found = {delta.request_id: delta for delta in drive.deltas}
    assert found[good.request.id].embedding == reference_embedding(good)
    assert (found[bad.request.id].finish or GONE).kind == "abort"
    assert found[bad.request.id].embedding is None


def test_prompt_logprobs_come_once_with_the_first_output_across_chunks():
    drive = Drive(make_plan(chunk_tokens=4))
    sequence = make_sequence(range(11), logprobs=LogprobParams(start=0, top=1))
    drive.add(sequence)
    drive.run()
    assert [delta.prompt_logprobs is not None for delta in drive.deltas] == [True, False, False, False]
    found = drive.deltas[0].prompt_logprobs
    assert found is not None
    assert found.chosen == [(None, 0), *((-float(i), i) for i in range(1, 11))]
    assert found.top[:2] == [None, [(-1.0, 1)]]
    assert drive.deltas[0].logprobs is not None


def test_choices_of_a_prompt_compute_it_once():
    drive = Drive()
    prompt = list(range(12))
    first = make_sequence(prompt, n=3, max_new_tokens=2)
    others = [make_sequence(prompt, index=i, seed=i, request=first.request) for i in (1, 2)]
    drive.add(first, *others)
    batch = drive.step()
    assert batch is not None
    assert batch.counts.tolist() == [12, 4, 4]  # all but the page with the last token
    drive.run()
    assert [drive.output(s) for s in (first, *others)] == [drive.expected(s) for s in (first, *others)]
    assert [s.num_cached for s in (first, *others)] == [0, 8, 8]


def test_a_finished_sequence_leaves_its_prefix_with_its_output():
    drive = Drive(page_size=1)
    first = make_sequence([1, 2, 3], max_new_tokens=4)
    drive.add(first)
    drive.run()
    second = make_sequence([1, 2, 3, *drive.output(first), 9], max_new_tokens=2)
    drive.add(second)
    drive.run()
    assert second.num_cached == 6  # the KV of the last output token was never computed
    assert drive.deltas[-1].usage.cached == 6
    assert drive.output(second) == drive.expected(second)


def test_a_full_queue_refuses_the_whole_request():
    drive = Drive(make_plan(max_queued=2, max_running=1))
    drive.add(make_sequence([1]))  # it takes the free row, so it does not count
    drive.add(make_sequence([2]), make_sequence([3]))
    with pytest.raises(Overloaded, match="queue is full"):
        drive.add(make_sequence([4]), make_sequence([5]))
    assert drive.scheduler.num_waiting == 3
    drive.scheduler.fill()
    assert (drive.scheduler.num_running, drive.scheduler.num_waiting) == (1, 2)
    with pytest.raises(Overloaded, match="queue is full"):
        drive.add(make_sequence([4]))


def test_a_queue_of_many_tokens_is_full_too():
    drive = Drive(make_plan(max_queued_tokens=10, max_running=1))
    long, short = make_sequence(range(20)), make_sequence([3] * 6)
    drive.add(long)  # the queue is empty
    with pytest.raises(Overloaded, match="too many tokens"):
        drive.add(short)
    drive.step()
    drive.add(short)
    drive.add(make_sequence([4] * 4))
    with pytest.raises(Overloaded, match="too many tokens"):
        drive.add(make_sequence([5]))
    of_a_call = make_sequence([5])
    of_a_call.request = replace(of_a_call.request, follows=True)
    drive.add(of_a_call)  # after the first prompt of the same call, which was accepted
    drive.scheduler.abort([short, of_a_call], Finish("abort"))
    drive.add(make_sequence([5] * 6))
    drive.run()
    drive.add(make_sequence(range(20)))


def test_a_prompt_that_fits_nowhere_is_refused():
    drive = Drive(num_pages=4, page_size=4, context_length=15)
    with pytest.raises(ContextOverflow, match="15 tokens; at most 15"):
        drive.add(make_sequence([1] * 15))
    drive.add(make_sequence([1] * 15, max_new_tokens=0))
    drive.add(make_sequence([1] * 14, max_new_tokens=9))
    assert len(drive.run()) == 2


def test_the_output_is_limited_to_what_the_pool_holds():
    drive = Drive(num_pages=3, page_size=4)
    sequence = make_sequence([1, 2, 3], max_new_tokens=None)
    drive.add(sequence)
    drive.run()
    assert last_finish(drive) == Finish("length", length=9)
    assert drive.output(sequence) == drive.expected(sequence)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4])
def test_an_abort_at_any_moment_ends_all_choices_and_frees_their_pages(num_steps: int):
    drive = Drive(make_plan(chunk_tokens=4), prefix=False)
    first = make_sequence(range(10), n=2, max_new_tokens=9)
    second = make_sequence(range(10), index=1, request=first.request)
    drive.add(first, second)
    for _ in range(num_steps):
        drive.step()
    deltas = drive.scheduler.abort([first, second], GONE)
    drive.scheduler.check()
    assert [(delta.index, delta.finish) for delta in deltas] == [(0, GONE), (1, GONE)]
    assert drive.cache.num_free == drive.cache.num_pages
    num_before = len(drive.deltas)
    drive.run()
    assert len(drive.deltas) == num_before  # tokens in flight are dropped
    assert drive.scheduler.abort([first, second], GONE) == []


def test_a_choice_that_met_a_stop_string_ends_silently():
    drive = Drive()
    first = make_sequence([1, 2, 3], n=2, max_new_tokens=9)
    second = make_sequence([1, 2, 3], index=1, seed=1, request=first.request)
    drive.add(first, second)
    for _ in range(3):
        drive.step()
    drive.scheduler.end(first)
    drive.scheduler.end(first)  # the sequence is known already
    drive.scheduler.check()
    num_known = len(drive.output(first))
    drive.run()
    assert len(drive.output(first)) == num_known == 2
    assert drive.output(second) == drive.expected(second)


def test_a_failed_row_ends_only_its_sequence_and_is_not_cached():
    drive = Drive(page_size=1)
    good, bad = make_sequence([1, 2, 3]), make_sequence([4, 5, 6])
    drive.runner.failed_requests.add(bad.request.id)
    drive.add(good, bad)
    drive.run()
    (delta,) = [delta for delta in drive.deltas if delta.request_id == bad.request.id]
    assert delta.finish is not None
    assert delta.finish.kind == "abort"
    assert drive.output(good) == drive.expected(good)
    assert drive.cache.match_length(make_sequence([4, 5, 6, 7])) == 0
    assert drive.cache.match_length(make_sequence([1, 2, 3, 7])) == 3


def failing(drive: Drive, poisonous: set[int]) -> tuple[list[int], list[int]]:
    """Run to the end while steps with these requests fail. Return the failed requests, and the rows of the failed
    steps.
    """
    lost: list[int] = []
    rows: list[int] = []
    for _ in range(500):
        batch = drive.scheduler.fill()
        drive.scheduler.check()
        if batch is None:
            return lost, rows
        if any(sequence.request.id in poisonous for sequence in batch.sequences):
            drive.runner.drop()
            rows.append(len(batch.sequences))
            lost += drive.scheduler.fail([batch])
            drive.scheduler.check()
            assert drive.cache.num_free == drive.cache.num_pages
        else:
            drive.runner.launch(batch)
            drive.apply()
    raise AssertionError("it never ends")


def test_a_failed_step_loses_only_the_request_that_fails_alone_too():
    drive = Drive(make_plan(max_running=6, chunk_tokens=4), depth=0)
    asked = [make_sequence([i, *range(7)], max_new_tokens=5) for i in range(9)]
    drive.add(*asked[:5])
    for _ in range(8):
        drive.step()
    drive.add(*asked[5:])
    bad = asked[3].request.id
    lost, rows = failing(drive, {bad})
    assert (lost, rows) == ([bad], [3, 2, 1])
    for sequence in asked:
        if sequence is not asked[3]:
            assert drive.output(sequence) == drive.expected(sequence)


def test_a_failed_step_takes_the_other_choices_of_its_requests_along():
    drive = Drive(make_plan(max_running=1), depth=0)
    first = make_sequence([1, 2], n=2)
    second = make_sequence([1, 2], index=1, request=first.request)
    drive.add(first, second)
    assert failing(drive, {first.request.id}) == ([first.request.id], [1, 1])
    assert drive.scheduler.num_waiting == drive.scheduler.num_running == 0


def test_requests_that_fail_only_together_are_given_up_at_the_third_time():
    drive = Drive(depth=0)
    pair = [make_sequence([i, 2], max_new_tokens=20) for i in range(2)]
    drive.add(*pair)
    num_failed = 0
    for _ in range(100):
        batch = drive.scheduler.fill()
        if batch is None:
            break
        if len(batch.sequences) == 2:
            num_failed += 1
            drive.scheduler.fail([batch])
        else:
            drive.runner.launch(batch)
            drive.apply()
    assert num_failed == 3
    assert all(sequence.finish is not None for sequence in pair)


def test_whoever_is_tried_apart_and_leaves_holds_up_nobody():
    drive = Drive(depth=0)
    first, second = make_sequence([1, 2]), make_sequence([3, 4])
    drive.add(first, second)
    batch = drive.scheduler.fill()
    assert batch is not None
    assert drive.scheduler.fail([batch]) == []
    drive.scheduler.abort([first], Finish("abort"))
    drive.run()
    assert drive.output(second) == drive.expected(second)


def test_steps_are_applied_in_order():
    drive = Drive()
    drive.add(make_sequence([1, 2, 3]))
    first, second = drive.scheduler.fill(), drive.scheduler.fill()
    assert first is not None
    assert second is not None
    drive.runner.launch(first)
    _, output = drive.runner.finish_oldest()
    with pytest.raises(EngineFailure, match="Step 1 was applied when step 0 was due"):
        drive.scheduler.apply(second, output)


def test_flushing_waits_until_all_is_quiet():
    drive = Drive()
    drive.add(make_sequence(range(9)))
    assert not drive.scheduler.flush()
    drive.run()
    assert drive.cache.num_evictable > 0
    assert drive.scheduler.flush()
    assert drive.cache.num_free == drive.cache.num_pages


def test_the_load_counts_what_is_held():
    drive = Drive(make_plan(max_running=1), num_pages=8, page_size=4)
    drive.add(make_sequence(range(8)), make_sequence(range(8)))
    drive.step()
    load = drive.scheduler.load
    assert (load.num_waiting, load.num_running, load.num_used_pages) == (1, 1, 2)
    assert load.token_usage == 0.25
    drive.run()
    assert drive.scheduler.load.num_used_pages == 0


def test_an_idle_schedule_has_nothing_to_fill():
    drive = Drive()
    assert drive.scheduler.fill() is None
    drive.add(make_sequence([1], max_new_tokens=1))
    assert drive.scheduler.fill() is not None
    assert drive.scheduler.fill() is None  # no batch until the step in flight is applied
