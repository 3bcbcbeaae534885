"""Moves the weights of experts between ranks, one layer at a time, between two steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ops.moe.pieces import expert_pieces
from runtime.experts.placement import Placement, placed
from runtime.layers.expert_sharing import ExpertSharing
from runtime.layers.moe import MoE
from runtime.mesh.axis import Axis
from runtime.worker.expert_recorder import ExpertRecorder


@dataclass(slots=True)
class RankExperts:
    """The MoE layers of a rank, the placement of their experts, and the recorder of their use."""

    mixtures: Mapping[int, MoE]
    sharing: ExpertSharing
    stage: Axis  # axis of all ranks that share the layers
    recorder: ExpertRecorder | None  # None: this rank does not record


class Move(NamedTuple):
    """A copy of an expert's weights to a slot of the receiving rank."""

    target: int  # index among the slots of the receiving rank
    source_rank: int
    source: int  # index among the slots of the sending rank


def moves(old: Placement, new: Placement, rank: int) -> list[Move]:
    """Return the moves to this rank: the slots whose expert changes, and the source of each. Needs no communication.

    If the rank has the expert in another slot, this slot is the source. Otherwise, ranks choose different copies of the
    expert.
    """
    found = []
    for target, (before, expert) in enumerate(zip(old.of_rank(rank), new.of_rank(rank), strict=True)):
        if before == expert:
            continue
        slots = old.slots[expert]
        own = [slot for slot in slots if slot // old.per_rank == rank]
        slot = own[0] if own else slots[(rank + target) % len(slots)]
        found.append(Move(target, *divmod(slot, old.per_rank)))
    return found


def move_experts(mixture: MoE, layer: int, sharing: ExpertSharing, new: tuple[int, ...]) -> int:
    """Change the expert placement of one layer. Return the number of experts that this rank received.

    All ranks must call it with the same placement. Only the experts of this layer that move need memory twice.
    """
    axis, old = sharing.axis, sharing.placement(layer, mixture.num_experts)
    target = placed(new, mixture.num_experts, axis.size)
    pieces = expert_pieces(mixture.weights, old.per_rank)
    plans = [moves(old, target, rank) for rank in range(axis.size)]
    outgoing = [[move.source for move in plan if move.source_rank == axis.rank] for plan in plans]
    outgoing[axis.rank] = []
    incoming = [
        [move for move in plans[axis.rank] if move.source_rank == rank and rank != axis.rank]
        for rank in range(axis.size)
    ]
    inside = [move for move in plans[axis.rank] if move.source_rank == axis.rank]
    # All sources are copied before any target is overwritten.
    kept = [piece[[move.source for move in inside]] for piece in pieces]
    for piece, local in zip(pieces, kept, strict=True):
        received = _exchange(axis, piece, outgoing, [len(each) for each in incoming])
        piece[[move.target for part in incoming for move in part]] = received
        piece[[move.target for move in inside]] = local
    sharing.place(layer, target)
    return sum(map(len, incoming))


def _exchange(axis: Axis, piece: Tensor, outgoing: list[list[int]], incoming: list[int]) -> Tensor:
    """Send rows of `piece` to each rank. Return the rows that this rank received, ordered by sender."""
    sent = piece[[line for lines in outgoing for line in lines]]
    return axis.all_to_all(sent, [len(lines) for lines in outgoing], incoming)


def any_rank(axis: Axis, flag: bool, device: torch.device) -> bool:
    """Return whether the flag is set on any rank of the axis."""
    return bool(axis.all_reduce(torch.tensor([int(flag)], device=device)).item())
