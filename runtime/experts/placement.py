"""The placement of a mixture's experts on ranks. Busy experts may have several copies.

A copy of an expert is a *slot*. The slots are numbered rank by rank, and each rank has the same number of slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

Table = np.ndarray[tuple[int, ...], np.dtype[np.int32]]


@dataclass(frozen=True)
class Placement:
    """The expert of each slot, as a number below `num_experts`. Every expert has at least one slot."""

    experts: tuple[int, ...]
    num_experts: int
    num_ranks: int

    def __post_init__(self) -> None:
        if len(self.experts) % self.num_ranks:
            raise ValueError(f"{len(self.experts)} copies of experts cannot be divided evenly by {self.num_ranks}.")
        if set(self.experts) != set(range(self.num_experts)):
            raise ValueError(f"A placement must name each of the {self.num_experts} experts, and no other number.")

    @property
    def per_rank(self) -> int:
        """Number of slots per rank."""
        return len(self.experts) // self.num_ranks

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """Return the experts of a rank's slots."""
        return self.experts[rank * self.per_rank : (rank + 1) * self.per_rank]

    @cached_property
    def slots(self) -> list[list[int]]:
        """The slots of each expert, in ascending order."""
        slots: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(self.experts):
            slots[expert].append(slot)
        return slots

    @cached_property
    def fixed_slots(self) -> Table:
        """The slot to which each rank sends its tokens for each expert, int32 [ranks, X].

        A rank uses its own copy if it has one. All other ranks are divided evenly among the copies.
        """
        table = np.full((self.num_ranks, self.num_experts), -1, np.int32)
        for expert, slots in enumerate(self.slots):
            for slot in reversed(slots):
                table[slot // self.per_rank, expert] = slot
            without = np.flatnonzero(table[:, expert] < 0)
            for number, rank in enumerate(without):
                table[rank, expert] = slots[(number + expert) % len(slots)]
        return table

    def slot_table(self, width: int) -> tuple[Table, Table]:
        """Return the slots of each expert, repeated to int32 [X, width], and the number of its slots, int32 [X]."""
        counts = np.array([len(slots) for slots in self.slots], np.int32)
        table = np.array([[slots[k % len(slots)] for k in range(width)] for slots in self.slots], np.int32)
        return table, counts


def in_order(num_experts: int, num_ranks: int, num_redundant: int = 0) -> Placement:
    """Return the placement of the experts in order. The redundant slots hold experts 0, 1, ... again."""
    return Placement(tuple(slot % num_experts for slot in range(num_experts + num_redundant)), num_experts, num_ranks)


def placed(experts: Sequence[int], num_experts: int, num_ranks: int) -> Placement:
    """Return the placement with these experts. Raises ValueError if an expert is missing."""
    return Placement(tuple(map(int, experts)), num_experts, num_ranks)
