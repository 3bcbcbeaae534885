"""Retraction takes the pages of a sequence, without changing its output."""

from __future__ import annotations

from collections import Counter

import pytest

from fake_runner import Drive, make_plan, make_sequence
from runtime.kv_cache.prefix_cache import PrefixCache
from runtime.request import Adapter, Finish, Request
from runtime.sampling_params import SamplingParams
from runtime.scheduler import budget
from runtime.sequence import Sequence


@pytest.fixture
def trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return a plan whose admission reserves almost nothing, as if every output ended immediately."""
    monkeypatch.setattr(budget, "RESERVED_OUTPUT_TOKENS", 1)


def crowd(*shapes: tuple[int, int]) -> list[Sequence]:
    """Return sequences with these lengths of prompt and output."""
    return [make_sequence([i] * n, max_new_tokens=m, seed=i) for i, (n, m) in enumerate(shapes)]


def tight(num_pages: int, *, depth: int = 1, page_size: int = 1, **plan: object) -> Drive:
    return Drive(
        make_plan(new_token_ratio=0.0, min_new_token_ratio=0.0, **plan),
        num_pages=num_pages,
        page_size=page_size,
        depth=depth,
        prefix=False,
    )


@pytest.mark.usefixtures("trusting")
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("page_size", [1, 4])
def test_outputs_survive_retraction(depth: int, page_size: int):
    drive = tight(40 // page_size, depth=depth, page_size=page_size)
    sequences = crowd((4, 20), (4, 20), (4, 20), (4, 20))
    drive.add(*sequences)
    drive.run()
    assert drive.scheduler.num_retracted > 0
    assert [drive.output(s) for s in sequences] == [drive.expected(s) for s in sequences]


@pytest.mark.usefixtures("trusting")
def test_who_has_least_output_goes_first():
    drive = tight(16, depth=0)
    old, young = crowd((3, 12), (3, 12))
    drive.add(old)
    drive.step()
    drive.step()
    drive.add(young)
    while not drive.scheduler.num_retracted:
        drive.step()
    assert (old.sequence_index >= 0, young.sequence_index >= 0) == (True, False)


@pytest.mark.usefixtures("trusting")
def test_among_equals_the_longest_prompt_goes_first():
    drive = tight(14, depth=0)
    long, short = crowd((5, 9), (2, 9))
    drive.add(long, short)
    while not drive.scheduler.num_retracted:
        drive.step()
    assert (long.sequence_index >= 0, short.sequence_index >= 0) == (False, True)


@pytest.mark.usefixtures("trusting")
def test_the_retracted_return_before_newcomers():
    drive = tight(14, depth=0)
    long, short, new = crowd((5, 9), (2, 9), (1, 3))
    drive.add(long, short)
    while not drive.scheduler.num_retracted:
        drive.step()
    drive.add(new)
    drive.run()
    finished = [delta.request_id for delta in drive.deltas if delta.finish]
    assert finished.index(short.request.id) == 0
    first = {id: next(i for i, d in enumerate(drive.deltas) if d.request_id == id) for id in finished}
    assert first[new.request.id] > max(first[long.request.id], first[short.request.id])
    assert drive.output(long) == drive.expected(long)


@pytest.mark.usefixtures("trusting")
def test_a_pending_token_of_a_retracted_sequence_still_arrives():
    drive = tight(14, depth=2)
    long, short = crowd((5, 9), (2, 9))
    drive.add(long, short)
    while not drive.scheduler.num_retracted:
        drive.step()
    assert long.num_pending > 0
    num_known = len(long.ids)
    drive.scheduler.abort([short], Finish("abort"))
    drive.step()  # there is room now, but its last tokens are not known yet
    assert long.sequence_index < 0
    drive.run()
    assert len(long.ids) > num_known
    assert drive.output(long) == drive.expected(long)


@pytest.mark.usefixtures("trusting")
def test_a_retraction_lifts_the_reservation():
    drive = tight(14, depth=0)
    drive.add(*crowd((5, 9), (2, 9)))
    assert drive.scheduler.load.new_token_ratio == 0.0
    while not drive.scheduler.num_retracted:
        drive.step()
    assert drive.scheduler.load.new_token_ratio > 0.5


def test_unused_prefixes_are_evicted_before_anybody_is_retracted():
    drive = Drive(make_plan(), num_pages=16, page_size=1)
    for i in range(4):
        drive.add(make_sequence([i] * 6, max_new_tokens=6))
        drive.run()
    assert drive.scheduler.num_retracted == 0
    assert drive.cache.num_available == 16


@pytest.mark.usefixtures("trusting")
def test_two_long_prompts_that_cannot_both_stay_are_finished_in_turn():
    drive = tight(20, depth=1, chunk_tokens=4)
    sequences = crowd((15, 3), (15, 3))
    drive.add(*sequences)
    drive.run()
    assert [drive.output(s) for s in sequences] == [drive.expected(s) for s in sequences]


@pytest.mark.usefixtures("trusting")
def test_what_a_retracted_sequence_computed_is_found_again():
    drive = Drive(make_plan(new_token_ratio=0.0, min_new_token_ratio=0.0), num_pages=14, page_size=1, depth=0)
    long, short = crowd((5, 9), (2, 9))
    drive.add(long, short)
    while not drive.scheduler.num_retracted:
        drive.step()
    drive.scheduler.abort([short], Finish("abort"))
    before = drive.runner.num_tokens_computed
    drive.run()
    num_decoded = 9 - (len(long.ids) - long.num_prompt)
    assert drive.runner.num_tokens_computed - before < long.num_prompt + 9 + num_decoded
    assert drive.output(long) == drive.expected(long)


@pytest.mark.usefixtures("trusting")
def test_known_tokens_go_on_with_the_pages_of_a_decode_row_that_retracted_itself():
    ratios = {"new_token_ratio": 0.0, "min_new_token_ratio": 0.0}
    plan = make_plan(max_running=3, chunk_tokens=4, max_prefill_tokens=4, mixed=False, **ratios)
    drive = Drive(plan, num_pages=14, page_size=1, depth=0, vocab_size=5)
    drive.add(make_sequence([0] * 3, max_new_tokens=0))
    drive.run()
    drive.runner.tokens_per_step = 3
    short = [make_sequence([0] * 4, max_new_tokens=8, seed=seed) for seed in (0, 1)]
    sequences = [*short, make_sequence([0] * 4, max_new_tokens=13, namespace="adapter")]
    drive.add(*sequences)
    drive.run(max_steps=60)
    assert drive.scheduler.num_retracted > 0
    assert [drive.output(s) for s in sequences] == [drive.expected(s) for s in sequences]


def preempting(urgencies: list[int], *, num_pages: int = 64, **plan: object) -> tuple[Drive, list[Sequence]]:
    """Add sequences with these urgencies one after another, and run all to their end."""
    drive = Drive(make_plan(priorities=True, **plan), num_pages=num_pages, page_size=1)
    sequences = [make_sequence([i] * 4, max_new_tokens=8, seed=i, urgency=each) for i, each in enumerate(urgencies)]
    for sequence in sequences:
        drive.add(sequence)
        drive.step()
    drive.run()
    assert [drive.output(s) for s in sequences] == [drive.expected(s) for s in sequences]
    return drive, sequences


def test_the_urgent_interrupt_those_that_are_far_less_so():
    for limit in ({"max_running": 2}, {"num_pages": 25}):  # rows, pages
        drive, (first, second, urgent) = preempting([0, 5, 16], **limit)
        ends = [delta.request_id for delta in drive.deltas if delta.finish is not None]
        assert ends == [second.request.id, urgent.request.id, first.request.id]
        assert drive.scheduler.num_retracted == 1
        assert preempting([0, 5, 10], **limit)[0].scheduler.num_retracted == 0


def test_nobody_is_interrupted_for_a_sequence_that_waits_for_stored_pages(monkeypatch: pytest.MonkeyPatch):
    drive = Drive(make_plan(priorities=True, max_running=1), num_pages=64, page_size=1)
    drive.add(make_sequence([1] * 4, max_new_tokens=8))
    drive.step()
    urgent = make_sequence([2] * 4, max_new_tokens=2, urgency=100)
    monkeypatch.setattr(PrefixCache, "held", property(lambda cache: {urgent}))
    drive.add(urgent)
    drive.step()
    assert drive.scheduler.num_retracted == 0
    monkeypatch.undo()
    drive.step()
    assert drive.scheduler.num_retracted == 1
    drive.run()


def test_nobody_is_interrupted_where_that_would_not_make_enough_room():
    drive = Drive(make_plan(priorities=True), num_pages=40, page_size=1)
    large, small = make_sequence([1] * 20, max_new_tokens=9, urgency=50), make_sequence([2] * 4, urgency=0)
    drive.add(large, small)
    drive.step()
    drive.add(make_sequence([3] * 20, max_new_tokens=9, urgency=20))
    drive.run()
    assert drive.scheduler.num_retracted == 0


def of(owner: str, num_prompt: int, num_output: int, *, seed: int = 0, urgency: int = 0) -> Sequence:
    """Return a sequence of a client."""
    ids = tuple([seed % 5] * num_prompt)
    request = Request(ids=ids, owner=owner, sampling=SamplingParams(max_new_tokens=num_output, seed=seed))
    return make_sequence(ids, request=request, max_new_tokens=num_output, seed=seed, urgency=urgency)


@pytest.mark.parametrize("limit", [{"max_running": 4}, {"num_pages": 4 * 36}])  # rows, pages
def test_a_client_with_all_rows_or_pages_gives_one_to_another_client(limit: dict[str, int]):
    num_pages = limit.pop("num_pages", 400)
    drive = Drive(make_plan(**limit), num_pages=num_pages, page_size=1)
    heavy = [of("heavy", 4, 30, seed=seed) for seed in range(8)]
    drive.add(*heavy)
    for _ in range(4):
        drive.step()
    num_before = len(drive.deltas)
    lights = []
    for seed in range(3):  # one after another, while the heavy client's requests run and wait
        lights.append(of("light", 2, 3, seed=seed))
        drive.add(lights[-1])
        while lights[-1].finish is None:
            drive.step()
    ends = [delta.request_id for delta in drive.deltas if delta.finish is not None]
    assert ends == [each.request.id for each in lights]  # before any request of the heavy client
    assert len(drive.deltas) - num_before > 3 * 3 * 2  # the other rows went on
    assert 1 <= drive.scheduler.num_retracted <= 3  # at most one for each
    drive.run()
    assert [drive.output(each) for each in heavy + lights] == [drive.expected(each) for each in heavy + lights]


def test_clients_share_the_rows_and_end_no_request_of_each_other():
    drive = Drive(make_plan(max_running=6), num_pages=400, page_size=1)
    sequences = [of("a", 3, 20, seed=seed) for seed in range(12)]
    drive.add(*sequences)
    drive.step()
    for client in ("b", "c"):
        sequences += [of(client, 3, 20, seed=seed) for seed in range(12)]
        drive.add(*sequences[-12:])
    drive.step()
    for _ in range(4):
        drive.step()
    running = Counter(each.request.owner for each in sequences if each.sequence_index >= 0)
    assert running == {"a": 2, "b": 2, "c": 2}
    assert drive.scheduler.num_retracted == 4
    drive.run()
    assert drive.scheduler.num_retracted == 4  # nothing is retracted in turns
    assert [drive.output(each) for each in sequences] == [drive.expected(each) for each in sequences]


def test_clients_share_the_rows_by_their_weights():
    drive = Drive(make_plan(max_running=8, owner_weights={"b": 3.0}), num_pages=400, page_size=1)
    sequences = [of("a", 3, 20, seed=seed) for seed in range(12)]
    drive.add(*sequences)
    drive.step()
    sequences += [of("b", 3, 20, seed=seed) for seed in range(12)]
    drive.add(*sequences[-12:])
    for _ in range(9):
        drive.step()
    assert Counter(each.request.owner for each in sequences if each.sequence_index >= 0) == {"a": 2, "b": 6}
    assert drive.scheduler.num_retracted == 6
    drive.run()
    assert drive.scheduler.num_retracted == 6  # clients do not retract each other in turn
    assert [drive.output(each) for each in sequences] == [drive.expected(each) for each in sequences]


def test_waiting_clients_enter_by_their_weights():
    drive = Drive(make_plan(max_running=4, owner_weights={"b": 3.0}), num_pages=400, page_size=1)
    sequences = [of(client, 3, 20, seed=seed) for client in "ab" for seed in range(8)]
    drive.add(*sequences)
    drive.step()
    assert Counter(each.request.owner for each in sequences if each.sequence_index >= 0) == {"a": 1, "b": 3}
    drive.run()
    assert drive.scheduler.num_retracted == 0


def test_a_running_request_of_each_client_is_not_retracted_for_others():
    drive = Drive(make_plan(max_running=2), num_pages=400, page_size=1)
    sequences = [of(client, 3, 9) for client in "abcd"]
    drive.add(*sequences)
    drive.run()
    assert drive.scheduler.num_retracted == 0


def test_a_more_urgent_request_is_not_retracted_for_another_client():
    drive = Drive(make_plan(max_running=2, priorities=True), num_pages=400, page_size=1)
    urgent = [of("a", 3, 9, seed=seed, urgency=5) for seed in range(2)]
    drive.add(*urgent)
    drive.step()
    drive.add(of("b", 3, 2))
    drive.run()
    assert drive.scheduler.num_retracted == 0


def test_no_row_is_freed_for_a_client_whose_adapter_has_no_slot():
    drive = Drive(make_plan(max_running=3, adapter_slots=1), num_pages=400, page_size=1)
    first, second = (Adapter(index, f"adapter {index}", "") for index in (1, 2))
    heavy = [make_sequence([1] * 3, max_new_tokens=20, adapter=first), *(of("", 3, 20) for _ in range(6))]
    drive.add(*heavy)
    drive.step()
    light = make_sequence([2] * 3, max_new_tokens=2, adapter=second, owner="light")
    drive.add(light)
    drive.run()
    assert drive.scheduler.num_retracted <= 1
    assert all(drive.output(each) == drive.expected(each) for each in [*heavy, light])


@pytest.mark.parametrize("of_adapter", [0, 50])
def test_the_urgent_interrupt_those_whose_adapter_has_the_slot_that_they_need(of_adapter: int):
    """One slot is used by a sequence of urgency `of_adapter`; a sequence without an adapter has most of the pages."""
    drive = Drive(make_plan(priorities=True, adapter_slots=1), num_pages=44, page_size=1)
    first, second = (Adapter(index, f"adapter {index}", "") for index in (1, 2))
    small = make_sequence([1] * 3, max_new_tokens=8, adapter=first, urgency=of_adapter)
    large = make_sequence([2] * 12, max_new_tokens=18)
    drive.add(small, large)
    drive.step()
    urgent = make_sequence([3] * 20, max_new_tokens=2, adapter=second, urgency=50)
    drive.add(urgent)
    drive.run(max_steps=60)
    assert drive.scheduler.num_retracted == (2 if of_adapter == 0 else 1)
    ends = [delta.request_id for delta in drive.deltas if delta.finish is not None]
    assert ends.index(urgent.request.id) == (0 if of_adapter == 0 else 1)
    assert all(drive.output(each) == drive.expected(each) for each in (small, large, urgent))
