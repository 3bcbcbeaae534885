"""For every order of events, every page is accounted for, outputs equal those computed alone, and all requests end."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from any_order import AnyOrder, RecordedOrder, StoredOrder
from runtime.errors import InvalidRequest
from runtime.request import Request, SessionParams

NUM_STEPS = 100_000

AnyOrder.TestCase.settings = settings(max_examples=150, stateful_step_count=50)
TestAnyOrder = AnyOrder.TestCase

StoredOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=50)
TestStoredOrder = StoredOrder.TestCase

RecordedOrder.TestCase.settings = settings(max_examples=50, stateful_step_count=40)
TestRecordedOrder = RecordedOrder.TestCase


def test_replace_forgets_only_requests_that_continue_the_named_one():
    """The request that began later and ended earlier stays, because it continues nothing."""
    plan = {"max_running": 8, "max_prefill_tokens": 100, "policy": "fcfs", "chunk_tokens": None, "mixed": False}
    storage = {"num_host_pages": 0, "num_tier_pages": 0, "write_policy": "write_through", "storage": None}
    sizes = {"page_size": 1, "num_tokens": 64, "window": None, "windowed_share": 0.0, "num_states": 0, "step_pages": 1}
    steps = {"prefix": True, "depth": 0, "tokens_per_step": 1, "ratio": 0.0, "reserved": 4096, "max_drafts": 0}
    state = AnyOrder()
    state.start(pinnable_share=0.0, **plan, **storage, **sizes, **steps)
    name = state.session_names[0]
    turn = {"prompt": [1], "offset": 0, "drop_output": False}
    try:
        state.add_to_session(which=0, max_new_tokens=6, replace=False, **turn)
        state.add_to_session(which=0, max_new_tokens=1, replace=False, **turn)
        state.step(num_steps=2)
        state.end_turns()
        assert list(state.turns[name]) == ["1 0"]
        state.run_a_while(fault=None)
        state.end_turns()
        assert list(state.turns[name]) == ["1 0", "0 0"]
        state.add_to_session(which=4, max_new_tokens=1, replace=False, **turn)  # continues the first request
        state.run_a_while(fault=None)
        state.end_turns()
        assert list(state.turns[name]) == ["1 0", "0 0", "2 4"]
        state.add_to_session(which=4, max_new_tokens=1, replace=True, **turn)
        assert list(state.turns[name]) == ["1 0", "0 0"]
        forgotten = Request(session=SessionParams(name, "2 4"))
        with pytest.raises(InvalidRequest, match="has no request '2 4'"):
            state.sessions.check(forgotten)
        state.add_to_session(which=2, max_new_tokens=1, replace=False, **turn)  # continues "1 0"
    finally:
        state.teardown()


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("machine", [AnyOrder, StoredOrder])
def test_a_hundred_thousand_steps(machine: type[AnyOrder]):
    many = settings(
        max_examples=500,
        stateful_step_count=50,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    end = AnyOrder.num_steps + NUM_STEPS
    while AnyOrder.num_steps < end:
        run_state_machine_as_test(machine, settings=many)
