"""Where a rank stands among those that compute one model together, and the groups it belongs to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from runtime.facts import ModelFacts
from runtime.layers.split import span
from runtime.parallel.collectives import Group


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

    def layers(self, num_layers: int) -> range:
        """The layers of this rank's stage; the last stages get what does not divide evenly."""
        return range(num_layers * self.stage // self.pp_size, num_layers * (self.stage + 1) // self.pp_size)

    def local(self, facts: ModelFacts) -> ModelFacts:
        """The facts of this rank's share, as far as its part of the KV pool is concerned."""
        kv_heads = span("kv_heads", facts.num_kv_heads, 1, self.tp_rank, self.tp_size).size
        return replace(facts, num_kv_heads=kv_heads, num_layers=len(self.layers(facts.num_layers)))


class Mesh:
    """The groups of one rank. It can be built into layers at once, and computes after `join`."""

    def __init__(self, place: Place, device: torch.device) -> None:
        self.place = place
        self._device = device
        self._tp: Group | None = None

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

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks that share the same layers, in place."""
        return self._team.all_reduce(x)

    def gather(self, x: Tensor) -> list[Tensor] | None:
        """`x` of all ranks that share the same layers, on the first of them; None on the others."""
        return self._team.gather(x)

    def broadcast(self, x: Tensor) -> Tensor:
        """The first rank's `x` on those that share the same layers; in place."""
        return x if self._tp is None and self.size == 1 else self._team.broadcast(x)

    def abort(self) -> None:
        """Let go of whoever waits for other ranks; nothing can be computed afterwards."""
        if self._tp is not None:
            self._tp.abort()

    def close(self) -> None:
        """Give back sockets and threads."""
        group, self._tp = self._tp, None
        if group is not None:
            group.close()

    @property
    def _team(self) -> Group:
        if self._tp is None:
            raise RuntimeError("The ranks have not met yet.")
        return self._tp
