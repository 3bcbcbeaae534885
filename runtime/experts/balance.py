"""Places experts to balance the load of the ranks, with DeepSeek's EPLB (github.com/deepseek-ai/EPLB, MIT).

Additional copies go to the experts with the largest load per copy, one at a time. The copies are then packed to ranks:
the heaviest first, always to the lightest rank that has a free slot. The hierarchical form first packs groups of
experts to nodes. DeepSeek's models route each token to few groups, and therefore to few nodes.

As in SGLang, the algorithms named "vec" balance single steps instead of the sum of all steps. An additional copy goes
to the expert for which it reduces the busiest copy's load the most, summed over the steps. The copies are then dealt to
the ranks in the order of their load, forwards and backwards in turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Loads = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
Numbers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
HIERARCHICAL = ("deepseek_hierarchical", "deepseek_vec_hierarchical")


def balanced(
    loads: Mapping[int, Any],
    *,
    num_slots: int,
    num_ranks: int,
    num_nodes: int = 1,
    num_groups: int = 1,
    algorithm: str = "auto",
) -> dict[int, list[int]]:
    """Return, for each layer, the expert in each slot (see `placement`).

    `loads` maps each layer to the number of tokens per expert, [X], or per step and expert, [S, X].

    "auto" means hierarchical if the number of nodes divides the numbers of expert groups and ranks.
    """
    layers, weight = list(loads), np.array([*loads.values()], np.float32)  # [L, X] or [L, S, X]
    if algorithm.startswith("deepseek_vec"):
        weight = weight.reshape(len(layers), -1, weight.shape[-1]).swapaxes(0, 1)
    elif weight.ndim == 3:
        weight = weight.sum(1)
    divides = not (num_groups % num_nodes or num_ranks % num_nodes)
    hierarchical = algorithm in HIERARCHICAL or (algorithm == "auto" and divides)
    groups, nodes = (num_groups, num_nodes) if hierarchical else (1, 1)
    experts = place_experts(weight, num_slots, groups, nodes, num_ranks)
    return {layer: line.tolist() for layer, line in zip(layers, experts, strict=True)}


def place_experts(weight: Loads, num_slots: int, num_groups: int, num_nodes: int, num_ranks: int) -> Numbers:
    """Return the expert in each slot, [L, num_slots].

    `weight` has the load of each expert, [L, X], or for the algorithms named "vec" in each step, [S, L, X]. Each node
    gets whole groups. All nodes have the same number of ranks and of slots.

    Raises ValueError if `num_groups` does not divide
    the number of experts, `num_nodes` does not divide `num_groups` or `num_ranks`, `num_ranks` does not divide
    `num_slots`, or there are fewer slots than experts.
    """
    steps = weight if weight.ndim == 3 else weight[None]
    by_step, weight = weight.ndim == 3, steps.sum(0)
    num_layers, num_experts = weight.shape
    for whole, parts in ((num_experts, num_groups), (num_groups, num_nodes), (num_ranks, num_nodes)):
        if whole % parts:
            raise ValueError(f"{whole} cannot be divided evenly by {parts}.")
    if num_slots % num_ranks or num_slots < num_experts:
        raise ValueError(f"{num_experts} experts cannot have {num_slots} copies on {num_ranks} ranks.")
    group_size, groups_per_node, per_node = (
        num_experts // num_groups, num_groups // num_nodes, num_experts // num_nodes
    )  # fmt: skip

    # 1. Groups to nodes.
    by_group = weight.reshape(num_layers, num_groups, group_size).sum(-1)
    node, place = _packed(by_group, num_nodes)
    first = (node * groups_per_node + place) * group_size
    in_nodes = (first[:, :, None] + np.arange(group_size)).reshape(num_layers, -1)
    experts_of_nodes = _inverse(in_nodes)

    # 2. Copies within each node.
    of_node = np.take_along_axis(weight, experts_of_nodes, 1).reshape(-1, per_node)
    if by_step:
        of_steps = np.take_along_axis(steps, experts_of_nodes[None], 2).reshape(len(steps), -1, per_node)
        copies, counts = _replicated_by_step(of_steps, num_slots // num_nodes)
    else:
        copies, counts = _replicated(of_node, num_slots // num_nodes)

    # 3. Copies to ranks.
    of_copy = np.take_along_axis(of_node / counts, copies, 1)
    rank, place = (_dealt if by_step else _packed)(of_copy, num_ranks // num_nodes)
    order = _inverse(rank * (num_slots // num_ranks) + place)
    within = np.take_along_axis(copies, order, 1).reshape(num_layers, num_nodes, -1)
    within = within + np.arange(0, num_experts, per_node)[:, None]
    return np.take_along_axis(experts_of_nodes, within.reshape(num_layers, -1), 1)


def _packed(weight: Loads, num_packs: int) -> tuple[Numbers, Numbers]:
    """Distribute the items [L, N] to packs of equal size. Return each item's pack, and its place in the pack."""
    num_items = weight.shape[1]
    per_pack = num_items // num_packs
    if per_pack == 1:
        packs = np.broadcast_to(np.arange(num_items), weight.shape)
        return packs.copy(), np.zeros(weight.shape, np.int64)
    packs, places = np.empty(weight.shape, np.int64), np.empty(weight.shape, np.int64)
    order = np.argsort(-weight, axis=1, kind="stable")
    for line, items, pack_of, place_of in zip(weight, order.tolist(), packs, places, strict=True):
        totals, used = np.zeros(num_packs, np.float32), [0] * num_packs
        for item in items:
            pack = min((pack for pack in range(num_packs) if used[pack] < per_pack), key=totals.__getitem__)
            pack_of[item], place_of[item] = pack, used[pack]
            totals[pack] += line[item]
            used[pack] += 1
    return packs, places


def _replicated(weight: Loads, num_copies: int) -> tuple[Numbers, Loads]:
    """Return the item of each copy, [L, num_copies], and the number of copies of each item, [L, N]."""
    num_layers, num_items = weight.shape
    copies = np.tile(np.arange(num_copies), (num_layers, 1))
    counts, lines = np.ones(weight.shape, np.float32), np.arange(num_layers)
    for copy in range(num_items, num_copies):
        heaviest = (weight / counts).argmax(1)
        copies[:, copy] = heaviest
        counts[lines, heaviest] += 1
    return copies, counts


def _replicated_by_step(weight: Loads, num_copies: int) -> tuple[Numbers, Loads]:
    """Like `_replicated`, for the loads of several steps, [S, L, N].

    Each additional copy goes to the item for which it reduces the steps' largest loads the most. If it reduces none of
    them, it goes to the item with the largest load per copy.
    """
    _, num_layers, num_items = weight.shape
    exact = weight.astype(np.float64)
    copies, total = np.tile(np.arange(num_copies), (num_layers, 1)), exact.sum(0)
    counts, lines = np.ones((num_layers, num_items), np.float32), np.arange(num_layers)
    for copy in range(num_items, num_copies):
        per_copy = exact / counts
        busiest = per_copy.argmax(-1, keepdims=True)
        largest = np.take_along_axis(per_copy, busiest, -1)
        relieved = np.take_along_axis(exact / (counts + 1), busiest, -1)
        np.put_along_axis(per_copy, busiest, relieved, -1)
        gains = np.zeros((num_layers, num_items))
        saved = (largest - per_copy.max(-1, keepdims=True))[..., 0]  # [S, L]
        np.add.at(gains, (lines, busiest[..., 0]), saved)
        best = np.where(gains.max(-1) > 0, gains.argmax(-1), (total / counts).argmax(-1))
        copies[:, copy] = best
        counts[lines, best] += 1
    return copies, counts


def _dealt(weight: Loads, num_packs: int) -> tuple[Numbers, Numbers]:
    """Deal items to packs, heaviest first, forwards and backwards in turn. Return items' packs and places [L, N]."""
    if weight.shape[1] == num_packs:
        return _packed(weight, num_packs)
    turn, pack = np.divmod(_inverse(np.argsort(-weight, axis=1, kind="stable")), num_packs)
    return np.where(turn % 2, num_packs - 1 - pack, pack), turn


def _inverse(numbers: Numbers) -> Numbers:
    """Return the inverse of the permutation in each row."""
    inverse = np.empty_like(numbers)
    np.put_along_axis(inverse, numbers, np.broadcast_to(np.arange(numbers.shape[1]), numbers.shape), 1)
    return inverse
