"""Several ranks of one model in one process, with a thread for each."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import torch
from torch import Tensor


class Ranks:
    """The data that the ranks of a tensor-parallel group exchange. Each rank has its own `TensorParallelGroup`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.given: list[Any] = [None] * size
        self.all_there = Barrier(size, timeout=60)

    def run(self, work: Callable[[Rank], Any]) -> list[Any]:
        """Run work(rank) on all ranks at the same time."""

        def guarded(number: int) -> Any:
            try:
                with torch.inference_mode():
                    return work(Rank(self, number))
            except BaseException:
                self.all_there.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(guarded, range(self.size)))

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.given[rank] = x
        self.all_there.wait()
        found = [each.clone() for each in self.given]
        self.all_there.wait()
        return found


class Rank:
    """The group as seen from one rank."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._ranks, self.rank, self.size = ranks, rank, ranks.size

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._ranks.exchange(self.rank, x)).sum(0)

    def gather(self, x: Tensor) -> list[Tensor] | None:
        found = self._ranks.exchange(self.rank, x)
        return found if self.rank == 0 else None
