"""For every order of events, every page is accounted for, outputs equal those computed alone, and all requests end."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from any_order import AnyOrder, RecordedOrder, StoredOrder

NUM_STEPS = 100_000

AnyOrder.TestCase.settings = settings(max_examples=150, stateful_step_count=50)
TestAnyOrder = AnyOrder.TestCase

StoredOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=50)
TestStoredOrder = StoredOrder.TestCase

RecordedOrder.TestCase.settings = settings(max_examples=50, stateful_step_count=40)
TestRecordedOrder = RecordedOrder.TestCase


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
