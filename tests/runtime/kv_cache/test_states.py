"""State slots of sequences with draft tokens: a row may continue after any accepted token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fake_runner import make_plan, make_sequence
from runtime.errors import ConfigurationError
from runtime.kv_cache.states import StateKind
from runtime.layers.recurrent import StateSpec


@pytest.mark.parametrize("max_drafts", [0, 1, 3, 8])
def test_the_states_after_all_tokens_of_a_row_are_in_different_slots(max_drafts: int) -> None:
    kind = StateKind({}, 1 + 4 * (max_drafts + 3), num_pages=64, page_size=64, max_drafts=max_drafts)
    sequence, start, known = make_sequence([5] * 7), 0, {0: 0}
    kind.enter(sequence)
    for accepted in [None, *range(max_drafts + 1), 0, max_drafts]:
        count = 7 if accepted is None else 1 + max_drafts
        sequence.num_drafted = 0 if accepted is None else max_drafts
        arrays = kind.step_arrays([sequence], np.array([start]), np.array([count]), np.zeros((1, 1), np.int32))
        read, *_ = reads = arrays["spans"][:, 0].tolist()
        assert read == known[start]
        writes = arrays["spans"][:, 1].tolist()
        assert reads[1:] == writes[:-1]
        assert len({read, *writes}) == 1 + len(writes)  # so that the row can also be computed again
        known = dict(zip(range(start + count - len(writes) + 1, start + count + 1), writes, strict=True)) | {
            start: read
        }
        start += count if accepted is None else 1 + accepted
    with pytest.raises(RuntimeError, match="is gone"):
        kind.step_arrays([sequence], np.array([start + 20]), np.array([1]), np.zeros((1, 1), np.int32))


def test_a_configured_number_of_states_must_suffice_for_one_request() -> None:
    plan: Any = SimpleNamespace(cache=SimpleNamespace(max_states=4), scheduler=make_plan(max_drafts=3))
    specs = {0: StateSpec((3, 8), (2, 4, 4), "float32")}
    with pytest.raises(ConfigurationError, match="takes 5 states; set at least 5"):
        StateKind.num_units(specs, plan, 100)
    plan.cache.max_states = 5
    assert StateKind.num_units(specs, plan, 100) == 1 + 5


def test_a_snapshot_after_rejected_tokens_is_dropped() -> None:
    """The next row may have many forced tokens, and then writes a snapshot only at the end of its last page."""
    kind = StateKind({}, 40, num_pages=64, page_size=4, max_drafts=3)
    sequence, table = make_sequence([5] * 2), np.zeros((1, 4), np.int32)
    kind.enter(sequence)
    sequence.pages, sequence.num_drafted = [7, 8, 9, 10], 3
    kind.step_arrays([sequence], np.array([0]), np.array([4]), table)
    assert kind.resumable([7], 1) == 1
    sequence.num_drafted = 0  # only the first token was accepted
    kind.step_arrays([sequence], np.array([1]), np.array([12]), table)
    assert kind.resumable([7], 1) == 0
    assert kind.resumable([7, 8, 9], 3) == 3
    kind.check([sequence], [])
