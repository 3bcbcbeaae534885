"""Placements: slots of experts, and the choice among copies."""

from __future__ import annotations

import pytest

from runtime.experts.placement import Placement, in_order, placed


def test_experts_in_order_and_copies_after_them() -> None:
    placement = in_order(6, 2, 2)
    assert placement.experts == (0, 1, 2, 3, 4, 5, 0, 1)
    assert placement.of_rank(1) == (4, 5, 0, 1)
    assert placement.slots[0] == [0, 6]


def test_a_rank_uses_its_own_copy_and_others_take_turns() -> None:
    placement = Placement((0, 1, 0, 2, 0, 3, 1, 2), 4, 4)
    fixed = placement.fixed_slots
    assert fixed[:3, 0].tolist() == [0, 2, 4]  # these ranks have a copy
    assert fixed[3, 0] in (0, 2, 4)
    for rank in range(4):
        assert [placement.experts[slot] for slot in fixed[rank]] == [0, 1, 2, 3]


@pytest.mark.parametrize("experts", [(0, 1, 2), (0, 1, 1, 0), (0, 1, 2, 3)])
def test_wrong_tables_are_refused(experts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="cannot be divided|must name each"):
        placed(experts, 3, 2)
