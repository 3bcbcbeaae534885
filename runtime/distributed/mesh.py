"""Where a rank stands among those that compute one model together, and the groups it belongs to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from runtime.config.model_facts import ModelFacts
from runtime.distributed.collectives import Group
from runtime.layers.sharding import Stage, shard_range


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The coordinates of a rank: ranks of one stage share its layers, and are neighbours in number."""

    rank: int = 0
    tp_size: int = 1
    pp_size: int = 1

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    @property
    def stage(self) -> int:
        return self.rank // self.tp_size

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size

    @property
    def first(self) -> bool:
        """Whether this rank is of the first stage, which embeds tokens and chooses the next ones."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.pp_size - 1

    def share(self, num_layers: int) -> Stage:
        """What this rank's stage computes; the last stages get the layers that do not divide evenly."""
        first, end = (num_layers * stage // self.pp_size for stage in (self.stage, self.stage + 1))
        return Stage(range(first, end), self.first, self.last)

    def local(self, facts: ModelFacts) -> ModelFacts:
        """The facts of this rank's share, as far as its part of the KV pool is concerned."""
        kv_heads = shard_range("kv_heads", facts.num_kv_heads, 1, self.tp_rank, self.tp_size).size
        return replace(facts, num_kv_heads=kv_heads, num_layers=len(self.share(facts.num_layers).layers))


class Mesh:
    """The groups of one rank. It can be built into layers at once, and computes after `join`."""

    def __init__(self, place: Place, device: torch.device) -> None:
        self.place = place
        self._device = device
        self._tp: Group | None = None  # who shares our layers
        self._on: Group | None = None  # the same rank of every stage, for what goes on through the layers
        self._back: Group | None = None  # and for what the last stage returns to the first

    @property
    def rank(self) -> int:
        """Among the ranks that share the same layers."""
        return self.place.tp_rank

    @property
    def size(self) -> int:
        return self.place.tp_size

    def join(self, store: Any, *, timeout_s: float, address: str) -> None:
        """Meet the other ranks. Blocks until all are there; RuntimeError when they are not in time."""
        place = self.place

        def group(name: str, rank: int, size: int) -> Group:
            return Group(store, name, rank, size, device=self._device, timeout_s=timeout_s, address=address)

        if place.tp_size > 1:
            self._tp = group(f"tp{place.stage}", place.tp_rank, place.tp_size)
        if place.pp_size > 1:
            # Two groups, since on CUDA what one group sends and receives happens in one order.
            self._on = group(f"on{place.tp_rank}", place.stage, place.pp_size)
            self._back = group(f"back{place.tp_rank}", place.stage, place.pp_size)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks that share the same layers, in place."""
        return self._team.all_reduce(x)

    def gather(self, x: Tensor) -> list[Tensor] | None:
        """`x` of all ranks that share the same layers, on the first of them; None on the others."""
        return self._team.gather(x)

    def broadcast(self, x: Tensor) -> Tensor:
        """The first rank's `x` on those that share the same layers; in place."""
        return x if self.size == 1 else self._team.broadcast(x)

    def pass_on(self, x: Tensor) -> None:
        """Send `x` to the next stage, or from the last one back to the first; does not wait for it."""
        if self.place.last:
            self._joined(self._back).send(x, 0)
        else:
            self._joined(self._on).send(x, self.place.stage + 1)

    def take(self, like: Tensor) -> Tensor:
        """Fill `like` with what the previous stage passed on; in the first stage, with what came back."""
        if self.place.first:
            return self._joined(self._back).receive(like, self.place.pp_size - 1)
        return self._joined(self._on).receive(like, self.place.stage - 1)

    def abort(self) -> None:
        """Let go of whoever waits for other ranks; nothing can be computed afterwards."""
        for group in (self._tp, self._on, self._back):
            if group is not None:
                group.abort()

    def close(self) -> None:
        """Give back sockets and threads."""
        groups = (self._tp, self._on, self._back)
        self._tp = self._on = self._back = None
        for group in groups:
            if group is not None:
                group.close()

    @property
    def _team(self) -> Group:
        return self._joined(self._tp)

    @staticmethod
    def _joined(group: Group | None) -> Group:
        if group is None:
            raise RuntimeError("The ranks have not met yet.")
        return group
