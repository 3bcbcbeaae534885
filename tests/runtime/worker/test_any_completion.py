"""Steps on a late device: for every order of its streams, the tokens equal those of a prompt device."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import late_steps
from fake_device import LateDevice, Overwritten, Waited
from runtime.batch import Batch
from runtime.worker.step_inputs import Staging

Prompts = list[tuple[list[int], int]]

PROMPTS: Prompts = [([3 + i, 9, 4 + 3 * i, 7, 5 + i][: 1 + i % 5], 3 + 2 * i) for i in range(9)]
prompts = st.lists(
    st.tuples(st.lists(st.integers(0, 60), min_size=1, max_size=9), st.integers(1, 12)),
    min_size=1,
    max_size=7,
)
orders = st.builds(LateDevice, st.builds(Random, st.integers(0, 2**32)), st.sampled_from([0.0, 0.3, 0.9]))


@settings(max_examples=15)
@given(prompts=prompts, device=orders, depth=st.integers(0, 2))
def test_any_legal_order_of_completions_gives_the_same_tokens(prompts: Prompts, device: LateDevice, depth: int):
    assert late_steps.outputs(prompts, device=device, depth=depth) == late_steps.outputs(prompts, depth=depth)


@settings(max_examples=15)
@given(
    prompts=prompts,
    device=orders,
    depth=st.integers(0, 2),
    sizes=st.sampled_from([(4,), (1, 2, 4), (2, 3)]),
    capture_every=st.integers(1, 6),
)
def test_graphs_captured_at_any_time_give_the_same_tokens(
    prompts: Prompts, device: LateDevice, depth: int, sizes: tuple[int, ...], capture_every: int
):
    found = late_steps.outputs(prompts, device=device, depth=depth, sizes=sizes, capture_every=capture_every)
    assert found == late_steps.outputs(prompts, depth=depth)


@settings(max_examples=15)
@given(
    prompts=prompts,
    device=orders,
    depth=st.integers(0, 2),
    sizes=st.sampled_from([(), (1, 2, 4)]),
)
def test_drafts_change_no_token_in_any_legal_order(
    prompts: Prompts, device: LateDevice, depth: int, sizes: tuple[int, ...]
):
    expected = late_steps.outputs(prompts, depth=depth)
    assert late_steps.outputs(prompts, device=device, depth=depth, sizes=sizes, drafts=expected) == expected


def test_graphs_are_replayed_beside_steps_with_drafts():
    expected, drafted = late_steps.outputs(PROMPTS), []
    device = LateDevice(Random(0))
    found = late_steps.outputs(
        PROMPTS,
        device=device,
        sizes=(1, 2, 4),
        drafts=expected,
        watch=lambda batch: drafted.append(batch.drafts is not None),
    )
    assert found == expected
    assert set(drafted) == {True, False}


# Greedy rows whose drafts copy the future output, and rows without drafts.
WITH_DRAFTS: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 0.0, "logit_bias": {3: 0.1}})
LONG: Prompts = [(prompt, 20 + new) for prompt, new in PROMPTS]


def outputs_with_drafts(device: LateDevice | None, **options: Any) -> tuple[list[list[int]], int]:
    """Return the outputs, and the number of rows whose start only the device knew."""
    num_unknown = 0

    def count(batch: Batch) -> None:
        nonlocal num_unknown
        if batch.unknown_starts is not None:
            num_unknown += int(batch.unknown_starts.sum())

    options = {"ways": WITH_DRAFTS, "num_pages": 64, "watch": count} | options
    return late_steps.outputs(LONG, device=device, **options), num_unknown


@pytest.mark.parametrize("sizes", [(), (4,), (1, 2, 4)])
@pytest.mark.parametrize("num_pages", [24, 64])
def test_rows_that_follow_drafts_in_flight_give_the_same_tokens(sizes: tuple[int, ...], num_pages: int):
    plain, _ = outputs_with_drafts(None)
    on_host, num_on_host = outputs_with_drafts(None, drafts=plain, num_pages=num_pages)
    assert on_host == plain
    assert num_on_host > 10
    for seed in range(3):
        device = LateDevice(Random(seed), haste=seed / 3)
        found, num_unknown = outputs_with_drafts(
            device, drafts=plain, sizes=sizes, num_pages=num_pages, depth=1 + seed % 2
        )
        assert found == plain
        assert num_unknown > 10


def test_steps_run_late_and_copies_are_made():
    device = LateDevice(Random(0), haste=0)
    assert late_steps.outputs(PROMPTS, device=device) == late_steps.outputs(PROMPTS)
    assert device.num_copies > 20


@pytest.mark.parametrize("sizes", [(), (4,)])
def test_a_step_makes_one_copy_to_the_device(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch):
    """One copy holds its inputs and its sampling arrays, whether or not it is replayed."""
    device = LateDevice(Random(0))
    uploads: list[int] = []
    upload = device.upload
    monkeypatch.setattr(device, "upload", lambda host: uploads.append(len(host)) or upload(host))
    num_steps = 0

    def count(steps: late_steps.Steps) -> None:
        launch = steps.launch

        def launched(batch: Any) -> None:
            nonlocal num_steps
            num_steps += 1
            before = len(uploads)
            launch(batch)
            assert len(uploads) - before == 1

        monkeypatch.setattr(steps, "launch", launched)

    late_steps.outputs(PROMPTS, device=device, sizes=sizes, capture_every=1, change=count)
    assert num_steps > 20


# --- proof that the tests can fail ---


@pytest.mark.parametrize("is_late", [False, True])
def test_an_upper_bound_instead_of_a_length_is_noticed(is_late: bool, monkeypatch: pytest.MonkeyPatch):
    plain, _ = outputs_with_drafts(None)
    if is_late:
        monkeypatch.setattr("runtime.worker.step_inputs._take_lengths", lambda *given: None)
    else:
        monkeypatch.setattr("runtime.worker.model_runner.with_exact_starts", lambda batch, lengths: batch)
        monkeypatch.setattr("runtime.worker.step_inputs._take_lengths", lambda *given: None)
    found, _ = outputs_with_drafts(LateDevice(Random(0)) if is_late else None, drafts=plain)
    assert found != plain


def tries(**options: Any) -> list[Any]:
    """Return the results of many random orders: tokens, or the error."""
    found = []
    for seed in range(5):
        try:
            found.append(late_steps.outputs(PROMPTS, device=LateDevice(Random(seed), 0.2), **options))
        except (AssertionError, IndexError) as error:
            found.append(error)
    return found


def test_buffer_that_is_written_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Staging, "_wait_until_read", lambda self: None)
    monkeypatch.setattr(Staging, "NUM_BUFFERS", 1)
    assert any(isinstance(found, Overwritten) for found in tries(depth=2))


def test_buffers_that_do_not_wait_are_noticed_however_many_take_turns(monkeypatch: pytest.MonkeyPatch):
    """With haste 0 a copy runs only when a result is awaited. Three launches later is too late."""
    monkeypatch.setattr(Staging, "_wait_until_read", lambda self: None)
    with pytest.raises(Overwritten):
        late_steps.outputs(PROMPTS, device=LateDevice(Random(0), haste=0), depth=4)


def test_forward_that_does_not_wait_for_its_inputs_is_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(LateDevice, "_waits", staticmethod(lambda work: False))
    expected = late_steps.outputs(PROMPTS)
    with suppress(RuntimeError, IndexError):  # of an operation, because missing inputs are zeros
        assert any(found != expected for found in tries(depth=0))  # no earlier step keeps the forward stream busy


def test_result_that_is_read_before_it_is_there_is_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fake_device.LateEvent.wait", lambda self: None)
    expected = late_steps.outputs(PROMPTS)
    assert any(found != expected for found in tries())


@pytest.mark.parametrize("wait", ["tolist", "item", "numpy", "bool", "mask"])
def test_waiting_for_the_device_while_launching_is_noticed(wait: str):
    device = LateDevice(Random(0))
    there, _ = device.upload(device.pinned(1))
    waits = {
        "tolist": lambda: there.tolist(),
        "item": lambda: there.item(),
        "numpy": lambda: there.numpy(),
        "bool": lambda: bool(there.sum() > 0),
        "mask": lambda: there[there > 0],
    }
    with device.forward(), pytest.raises(Waited):
        waits[wait]()
