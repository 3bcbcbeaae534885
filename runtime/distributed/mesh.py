"""Where a rank stands among those that compute one model together, and the groups it belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from runtime.distributed.collectives import Group
from runtime.distributed.rendezvous import Rendezvous
from runtime.layers.forward_batch import LayerSpec
from runtime.layers.sharding import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
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
    def is_first_stage(self) -> bool:
        """Whether this rank is of the stage that embeds tokens and has the LM head."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.pp_size - 1

    def stage_layers(self, num_layers: int) -> Stage:
        """What this rank's stage computes; the last stages get the layers that do not divide evenly."""
        first, end = (num_layers * stage // self.pp_size for stage in (self.stage, self.stage + 1))
        return Stage(range(first, end), self.is_first_stage, self.is_last_stage)

    def local_specs(self, specs: Mapping[int, LayerSpec], num_layers: int) -> dict[int, LayerSpec]:
        """What the layers of this rank keep, of what those of the whole model do."""
        stage = self.stage_layers(num_layers).layers
        return {
            index: spec.local(self.tp_rank, self.tp_size) for index, spec in specs.items() if index in stage
        }


class Mesh:
    """The groups of one rank. It can be built into layers at once, and computes after `join`."""

    def __init__(self, rank_info: RankInfo, device: torch.device) -> None:
        self.rank_info = rank_info
        self._device = device
        self._tp: Group | None = None  # who shares our layers
        self._forth: Group | None = None  # the same rank of every stage, for what goes on through the layers
        self._back: Group | None = None  # and for what the last stage returns to the first

    @property
    def rank(self) -> int:
        """Among the ranks that share the same layers."""
        return self.rank_info.tp_rank

    @property
    def size(self) -> int:
        return self.rank_info.tp_size

    def join(self, rendezvous: Rendezvous, *, address: str | None = None, listening: int = -1) -> None:
        """Meet the other ranks. Blocks until all are there; RuntimeError when they are not in time.

        `address` is this rank's own, if not the rendezvous' host; `listening` a socket that rank 0 listens on there.
        """
        info, store = self.rank_info, _open_store(rendezvous, self.rank_info.world_size, listening)
        host = address or rendezvous.host

        def group(name: str, rank: int, size: int) -> Group:
            return Group(
                store, name, rank, size, device=self._device, timeout_s=rendezvous.timeout_s, address=host
            )

        if info.tp_size > 1:
            self._tp = group(f"tp{info.stage}", info.tp_rank, info.tp_size)
        if info.pp_size > 1:
            # Two groups, since on CUDA what one group sends and receives happens in one order.
            self._forth = group(f"forth{info.tp_rank}", info.stage, info.pp_size)
            self._back = group(f"back{info.tp_rank}", info.stage, info.pp_size)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks that share the same layers, in place."""
        return self._tp_group.all_reduce(x)

    def gather(self, x: Tensor) -> list[Tensor] | None:
        """`x` of all ranks that share the same layers, on the first of them; None on the others."""
        return self._tp_group.gather(x)

    def broadcast(self, x: Tensor) -> Tensor:
        """The first rank's `x` on those that share the same layers; in place."""
        return x if self.size == 1 else self._tp_group.broadcast(x)

    def send(self, x: Tensor) -> None:
        """Send `x` to the next stage, or from the last one back to the first; does not wait for it."""
        if self.rank_info.is_last_stage:
            self._joined(self._back).send(x, 0)
        else:
            self._joined(self._forth).send(x, self.rank_info.stage + 1)

    def recv(self, like: Tensor) -> Tensor:
        """Fill `like` with what the previous stage sent; in the first stage, with what came back."""
        if self.rank_info.is_first_stage:
            return self._joined(self._back).recv(like, self.rank_info.pp_size - 1)
        return self._joined(self._forth).recv(like, self.rank_info.stage - 1)

    def abort(self) -> None:
        """Let go of whoever waits for other ranks; nothing can be computed afterwards."""
        for group in (self._tp, self._forth, self._back):
            if group is not None:
                group.abort()

    def close(self) -> None:
        """Give back sockets and threads."""
        groups = (self._tp, self._forth, self._back)
        self._tp = self._forth = self._back = None
        for group in groups:
            if group is not None:
                group.close()

    @property
    def _tp_group(self) -> Group:
        return self._joined(self._tp)

    @staticmethod
    def _joined(group: Group | None) -> Group:
        if group is None:
            raise RuntimeError("The ranks have not met yet.")
        return group


def _open_store(rendezvous: Rendezvous, world_size: int, listening: int) -> Any:
    """Where the ranks find each other: a private file, or over the network a port of rank 0's machine."""
    if rendezvous.path is not None:
        return distributed.FileStore(rendezvous.path, world_size)  # pyright: ignore[reportPrivateImportUsage]
    store = distributed.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        rendezvous.host,
        rendezvous.port,
        world_size,
        listening >= 0,
        timedelta(seconds=rendezvous.timeout_s),
        wait_for_workers=False,
        master_listen_fd=listening if listening >= 0 else None,
    )
    return distributed.PrefixStore(rendezvous.key_prefix, store)  # pyright: ignore[reportPrivateImportUsage]
