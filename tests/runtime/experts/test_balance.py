"""Balanced placements equal those of published algorithms, which are written here a second time."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.experts import balance
from runtime.experts.balance import balanced, place_experts

# (experts, slots, groups, nodes, ranks)
SHAPES = [
    (8, 8, 1, 1, 4), (8, 12, 4, 1, 4), (8, 16, 4, 2, 8), (12, 16, 4, 2, 8), (16, 16, 1, 1, 16), (64, 72, 8, 2, 8),
    (64, 96, 8, 4, 32), (60, 64, 1, 1, 8), (256, 288, 8, 4, 32),
]  # fmt: skip
COUNTS = [160, 160, 160, 160, 160, 100, 60, 30, 10]  # 1,000 loads


def pack(weights: list[float], packs: int) -> list[tuple[int, int]]:
    """Give each item the lightest pack with free places, heaviest items first."""
    most, found, totals, used = len(weights) // packs, {}, [torch.tensor(0.0)] * packs, [0] * packs
    if most == 1:
        return [(item, 0) for item in range(packs)]
    tensors = torch.tensor(weights)
    for item in sorted(range(len(weights)), key=lambda item: -weights[item]):
        free = [each for each in range(packs) if used[each] < most]
        lightest = min(free, key=lambda each: totals[each].item())
        found[item] = (lightest, used[lightest])
        totals[lightest] = totals[lightest] + tensors[item]
        used[lightest] += 1
    return [found[item] for item in range(len(weights))]


def copy_items(weights: Tensor, count: int) -> tuple[list[int], Tensor]:
    """Copy the item with the largest weight per copy, again and again."""
    owners, copies = list(range(len(weights))), torch.ones(len(weights))
    while len(owners) < count:
        heaviest = int(torch.argmax(weights / copies))
        owners.append(heaviest)
        copies[heaviest] += 1
    return owners, copies


def reference(weights: Tensor, slots: int, groups: int, nodes: int, ranks: int) -> list[int]:
    """Return the expert of each slot: groups to nodes, copies within nodes, copies to ranks."""
    group_size = len(weights) // groups
    members: list[list[int]] = [[] for _ in range(nodes)]
    places = pack(weights.view(groups, group_size).sum(1).tolist(), nodes)
    for group in sorted(range(groups), key=lambda group: places[group]):
        members[places[group][0]] += range(group * group_size, (group + 1) * group_size)
    result = []
    for experts in members:
        of_node = weights[experts]
        owners, copies = copy_items(of_node, slots // nodes)
        packed = pack((of_node / copies)[owners].tolist(), ranks // nodes)
        order = sorted(range(len(owners)), key=lambda copy: packed[copy])
        result += [experts[owners[copy]] for copy in order]
    return result


def copy_by_steps(steps: Tensor, count: int) -> tuple[list[int], Tensor]:
    """Copy, again and again, the item whose copy leaves the smallest sum over steps [S, N] of the largest load."""
    owners, copies = list(range(steps.shape[1])), torch.ones(steps.shape[1])
    while len(owners) < count:
        sums = [(steps.double() / (copies + one)).amax(1).sum().item() for one in torch.eye(len(copies))]
        best = min(range(len(sums)), key=sums.__getitem__)
        owners.append(best)
        copies[best] += 1
    return owners, copies


def reference_by_steps(steps: Tensor, slots: int, groups: int, nodes: int, ranks: int) -> list[list[list[int]]]:
    """Return each node's experts by rank, in the order of the rank's slots."""
    group_size, of_node = steps.shape[1] // groups, ranks // nodes
    members: list[list[int]] = [[] for _ in range(nodes)]
    places = pack(steps.sum(0).view(groups, group_size).sum(1).tolist(), nodes)
    for group in sorted(range(groups), key=lambda group: places[group]):
        members[places[group][0]] += range(group * group_size, (group + 1) * group_size)
    result = []
    for experts in members:
        owners, copies = copy_by_steps(steps[:, experts], slots // nodes)
        load = (steps[:, experts].sum(0) / copies)[owners].tolist()
        order = sorted(range(len(owners)), key=lambda copy: -load[copy])
        if len(owners) == of_node:  # one slot on each rank
            order = list(range(len(owners)))
        hands: list[list[int]] = [[] for _ in range(of_node)]
        for turn in range(len(owners) // of_node):
            to = hands[::-1] if turn % 2 else hands
            for place, hand in enumerate(to):
                hand.append(experts[owners[order[turn * of_node + place]]])
        result.append(hands)
    return result


def loads(kind: str, num_experts: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "counts":  # distinct integers, as a recorder counts them
        return torch.randperm(50 * num_experts, generator=generator)[:num_experts].float()
    uniform = torch.rand(num_experts, generator=generator)
    return uniform if kind == "uniform" else (-torch.log(uniform)) ** 3


@pytest.mark.parametrize(("shape", "count"), [*zip(SHAPES, COUNTS, strict=True)])
def test_placements_equal_the_reference(shape: tuple[int, int, int, int, int], count: int) -> None:
    experts, slots, groups, nodes, ranks = shape
    kinds = ("uniform", "skewed", "counts")
    weights = [loads(kinds[seed % 3], experts, seed) for seed in range(count)]
    found = place_experts(torch.stack(weights).numpy(), slots, groups, nodes, ranks)
    for weight, line in zip(weights, found, strict=True):
        assert line.tolist() == reference(weight, slots, groups, nodes, ranks)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[0] < 100])
def test_placements_by_step_equal_the_reference(shape: tuple[int, int, int, int, int]) -> None:
    experts, slots, groups, nodes, ranks = shape
    steps = torch.stack([loads("skewed", experts, seed) for seed in range(24)]).view(4, 6, experts)  # [L, S, X]
    found = place_experts(steps.swapaxes(0, 1).numpy(), slots, groups, nodes, ranks)
    for layer, line in zip(steps, found, strict=True):
        expected = reference_by_steps(layer, slots, groups, nodes, ranks)
        assert line.reshape(nodes, ranks // nodes, -1).tolist() == expected
    by_layer = {layer: each.numpy() for layer, each in enumerate(steps)}
    common: Any = {"num_slots": slots, "num_ranks": ranks, "num_nodes": nodes, "num_groups": groups}
    placed = balanced(by_layer, algorithm="deepseek_vec_hierarchical", **common)
    assert [*placed.values()] == found.tolist()
    sums = {layer: each.sum(0) for layer, each in by_layer.items()}
    assert balanced(by_layer, **common) == balanced(sums, **common)


def test_an_expert_that_is_busy_in_one_step_gets_a_copy() -> None:
    """Expert 0 has the largest sum of all steps, but expert 1 the largest load of a step."""
    steps = np.array([[[5, 0, 4, 4], [5, 12, 4, 4], [5, 0, 4, 4]]], np.float32).swapaxes(0, 1)
    common: Any = {"num_slots": 6, "num_ranks": 2}
    for algorithm, copied in (("deepseek", 0), ("deepseek_vec", 1)):
        [line] = balanced({0: steps[:, 0]}, algorithm=algorithm, **common).values()
        assert line.count(copied) == 2
        assert set(line) == {0, 1, 2, 3}
    equal = np.array([[[1, 1, 9, 9]]], np.float32)  # no single copy reduces the largest load
    assert sorted(place_experts(equal, 6, 1, 1, 2)[0].tolist()) == [0, 1, 2, 2, 3, 3]


def test_the_published_example() -> None:
    """The example of DeepSeek's README: two layers, 12 experts in 4 groups, 16 copies on 2 nodes with 8 ranks."""
    weight = np.array(
        [
            [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
            [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
        ],
        np.float32,
    )
    assert place_experts(weight, 16, 4, 2, 8).tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_expert_has_a_slot_and_no_rank_is_much_busier(shape: tuple[int, int, int, int, int]) -> None:
    experts, slots, *_, ranks = shape
    weight = loads("uniform", experts, 1)
    [line] = place_experts(weight[None].numpy(), slots, 1, 1, ranks).tolist()
    assert set(line) == set(range(experts))
    copies = torch.bincount(torch.tensor(line))
    of_ranks = (weight / copies)[line].view(ranks, -1).sum(1)
    assert of_ranks.max() / of_ranks.mean() < (1.9 if slots == experts else 1.6)


def test_auto_is_hierarchical_if_the_nodes_divide_the_groups() -> None:
    rng = random.Random(2)
    load = {3: [rng.random() for _ in range(12)]}
    common: Any = {"num_slots": 16, "num_ranks": 8, "num_nodes": 2}
    assert balanced(load, num_groups=4, **common) == balanced(
        load, num_groups=4, algorithm="deepseek_hierarchical", **common
    )
    assert balanced(load, num_groups=3, **common) == balanced(load, num_groups=3, algorithm="deepseek", **common)
    assert balanced(load, num_groups=4, **common) != balanced(load, num_groups=4, algorithm="deepseek", **common)
    fewer: Any = {"num_slots": 16, "num_ranks": 2, "num_nodes": 4}  # parts of experts that span two machines
    assert balanced(load, num_groups=4, **fewer) == balanced(load, num_groups=4, algorithm="deepseek", **fewer)


def test_sizes_that_do_not_divide_are_refused() -> None:
    weight = np.ones((1, 8), np.float32)
    for shape in ((8, 3, 1, 4), (8, 1, 1, 3), (7, 1, 1, 7), (8, 4, 3, 8)):
        with pytest.raises(ValueError, match="cannot"):
            place_experts(weight, *shape)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("_packed", lambda weight, packs: tuple(part[:, ::-1] for part in balance_packed(weight, packs))),
        ("_replicated", lambda weight, count: balance_replicated(-weight, count)),
    ],
)
def test_a_fault_is_noticed(name: str, fault: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance, name, fault)
    with pytest.raises(AssertionError):
        test_placements_equal_the_reference(SHAPES[3], 10)


balance_packed, balance_replicated = balance._packed, balance._replicated
