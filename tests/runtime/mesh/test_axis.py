"""Every collective of an axis, with gloo, between ranks in threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ranks_on_gloo import on_ranks
from runtime.mesh.axis import Axis
from runtime.mesh.mesh import Mesh
from runtime.mesh.rank_info import AXES, Coordinate, RankInfo

pytestmark = pytest.mark.filterwarnings("error")
SIZES = [(2, 3), (0, 2), (1, 4, 2), (3, 0, 0)]  # number of rows of each rank


def on_axis(folder: Path, size: int, work: Callable[[Axis], Any], name: str = "tp") -> list[Any]:
    sizes: dict[str, Any] = {f"{name}_size": size}
    infos = [RankInfo(rank=rank, **sizes) for rank in range(size)]
    return on_ranks(folder, infos, lambda mesh: work(mesh.axis(name)))


def part(rank: int, rows: int) -> Tensor:
    return torch.arange(rows * 2, dtype=torch.float32).reshape(rows, 2) + 100 * rank


def equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected))


@pytest.mark.parametrize("size", [2, 3])
def test_all_reduce_sums_in_place(tmp_path: Path, size: int) -> None:
    def work(axis: Axis) -> Tensor:
        x = part(axis.rank, 3)
        assert axis.all_reduce(x) is x
        return x

    expected = torch.stack([part(rank, 3) for rank in range(size)]).sum(0)
    assert equal(on_axis(tmp_path, size, work), [expected] * size)


@pytest.mark.parametrize("sizes", SIZES)
def test_all_gather_joins_parts_of_any_size(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    parts = [part(rank, rows) for rank, rows in enumerate(sizes)]
    found = on_axis(tmp_path, len(sizes), lambda axis: axis.all_gather(parts[axis.rank], sizes))
    assert equal(found, [torch.cat(parts)] * len(sizes))


@pytest.mark.parametrize("size", [2, 3])
def test_equal_parts_need_no_sizes(tmp_path: Path, size: int) -> None:
    parts = [part(rank, 2) for rank in range(size)]

    def work(axis: Axis) -> tuple[Tensor, Tensor]:
        gathered = axis.all_gather(parts[axis.rank])
        return gathered, axis.reduce_scatter(gathered.t().contiguous().t())  # the argument need not be contiguous

    for rank, (gathered, reduced) in enumerate(on_axis(tmp_path, size, work)):
        assert torch.equal(gathered, torch.cat(parts))
        assert torch.equal(reduced, size * parts[rank])


@pytest.mark.parametrize("sizes", SIZES)
def test_reduce_scatter_gives_each_rank_its_part_of_the_sum(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    given = [part(rank, sum(sizes)) for rank in range(len(sizes))]
    before = [x.clone() for x in given]
    found = on_axis(tmp_path, len(sizes), lambda axis: axis.reduce_scatter(given[axis.rank], sizes))
    assert equal(found, torch.stack(given).sum(0).split(sizes))
    assert equal(given, before)


def test_unequal_parts_without_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="3 rows cannot be divided evenly among 2 ranks"):
        Axis("tp", Coordinate(0, 2, 0)).reduce_scatter(part(0, 3))


@pytest.mark.parametrize("counts", [((0, 2), (1, 3)), ((1, 2, 0), (0, 0, 0), (3, 0, 1))])
def test_all_to_all_sends_every_rank_its_rows(tmp_path: Path, counts: tuple[tuple[int, ...], ...]) -> None:
    given = [part(rank, sum(to)) for rank, to in enumerate(counts)]

    def work(axis: Axis) -> Tensor:
        return axis.all_to_all(given[axis.rank], counts[axis.rank], [to[axis.rank] for to in counts])

    pieces = [x.split(to) for x, to in zip(given, counts)]
    expected = [torch.cat([own[rank] for own in pieces]) for rank in range(len(counts))]
    assert equal(on_axis(tmp_path, len(counts), work), expected)


@pytest.mark.parametrize("sizes", [*SIZES, (2, 2)])
def test_gather_gives_the_first_rank_all_parts(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    parts = [part(rank, rows) for rank, rows in enumerate(sizes)]
    given = None if len({*sizes}) == 1 else sizes
    first, *rest = on_axis(tmp_path, len(sizes), lambda axis: axis.gather(parts[axis.rank], given))
    assert equal(first, parts)
    assert rest == [None] * (len(sizes) - 1)


@pytest.mark.parametrize(("size", "source"), [(2, 0), (3, 2)])
def test_broadcast_fills_every_rank_from_one(tmp_path: Path, size: int, source: int) -> None:
    found = on_axis(tmp_path, size, lambda axis: axis.broadcast(part(axis.rank, 2), source))
    assert equal(found, [part(source, 2)] * size)


@pytest.mark.parametrize("name", ["tp", "pp"])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_send_to_their_neighbours_before_they_receive(tmp_path: Path, name: str, size: int) -> None:
    """Several tensors of different sizes are in flight, and arrive in the order in which they were sent."""
    rounds = [range(1, 9), range(9, 17), range(17, 25)]

    def work(axis: Axis) -> tuple[list[Tensor], list[Tensor]]:
        from_previous, from_next = [], []
        for sizes in rounds:
            for rows in sizes:
                axis.send(part(axis.rank, rows), axis.next)
                axis.send(-part(axis.rank, rows), axis.previous)
            for rows in sizes:
                from_previous.append(axis.recv(torch.empty(rows, 2), axis.previous))
                from_next.append(axis.recv(torch.empty(rows, 2), axis.next))
        return from_previous, from_next

    for rank, (from_previous, from_next) in enumerate(on_axis(tmp_path, size, work, name)):
        assert equal(from_previous, [part((rank - 1) % size, rows) for rows in range(1, 25)])
        assert equal(from_next, [-part((rank + 1) % size, rows) for rows in range(1, 25)])


def test_an_axis_of_one_rank_gives_back_what_it_was_given(tmp_path: Path) -> None:
    axis, x = Mesh(RankInfo(), torch.device("cpu")).axis("ep"), part(0, 2)
    assert axis.all_reduce(x) is axis.all_gather(x) is axis.reduce_scatter(x) is axis.broadcast(x) is x
    assert axis.all_to_all(x, [2], [2]) is x
    assert axis.gather(x) == [x]


def test_an_axis_computes_only_after_its_ranks_have_met() -> None:
    with pytest.raises(RuntimeError, match="axis tp is not open"):
        Mesh(RankInfo(tp_size=2), torch.device("cpu")).axis("tp").all_reduce(part(0, 1))


def test_each_axis_of_a_mesh_joins_the_ranks_of_its_line(tmp_path: Path) -> None:
    infos = [RankInfo(rank=rank, tp_size=2, dp_size=2, pp_size=2, ep_size=4) for rank in range(8)]

    def work(mesh: Mesh) -> dict[str, list[int]]:
        own = torch.tensor([mesh.rank_info.rank])
        return {name: mesh.axis(name).all_gather(own).tolist() for name in AXES}

    found = on_ranks(tmp_path, infos, work)
    assert found[5] == {"tp": [4, 5], "dp": [5, 7], "ep": [4, 5, 6, 7], "pp": [1, 5], "stage": [4, 5, 6, 7]}
    for name in AXES:
        for rank, own in enumerate(found):
            assert own[name][infos[rank].coordinate(name).rank] == rank
