from __future__ import annotations

from typing import Any

import pytest

from runtime.mesh.rank_info import AXES, RankInfo


def lines(axis: str, **sizes: Any) -> list[list[int]]:
    """Return the ranks of each line along an axis, in order."""
    found: dict[int, list[int]] = {}
    for rank in range(RankInfo(**sizes).world_size):
        at = RankInfo(rank=rank, **sizes).coordinate(axis)
        line = found.setdefault(at.group, [-1] * at.size)
        assert line[at.rank] == -1
        line[at.rank] = rank
    return [found[line] for line in sorted(found)]


def test_lines_of_tensor_and_pipeline_parallelism() -> None:
    sizes: dict[str, Any] = {"tp_size": 2, "pp_size": 2}
    assert lines("tp", **sizes) == [[0, 1], [2, 3]]
    assert lines("pp", **sizes) == [[0, 2], [1, 3]]
    assert lines("dp", **sizes) == lines("ep", **sizes) == [[0], [1], [2], [3]]
    assert [RankInfo(rank=rank, **sizes).stage for rank in range(4)] == [0, 0, 1, 1]


def test_experts_are_spread_over_the_ranks_of_a_stage() -> None:
    sizes: dict[str, Any] = {"tp_size": 2, "dp_size": 2, "pp_size": 2}
    assert lines("dp", **sizes) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert lines("ep", **sizes, ep_size=4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert lines("ep", **sizes, ep_size=2) == [[0, 2], [1, 3], [4, 6], [5, 7]]


@pytest.mark.parametrize("axis", AXES)
def test_lines_of_an_axis_cover_every_rank_once(axis: str) -> None:
    found = lines(axis, tp_size=3, dp_size=2, pp_size=2, ep_size=6)
    assert sorted(rank for line in found for rank in line) == list(range(12))


def test_experts_must_have_equal_numbers_of_ranks() -> None:
    with pytest.raises(ValueError, match="ep_size 3 does not divide the 4 ranks"):
        RankInfo(tp_size=4, ep_size=3)
