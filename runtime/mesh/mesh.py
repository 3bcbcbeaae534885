"""The mesh: the axes along which a rank computes together with other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from runtime.mesh.axis import Axis
from runtime.mesh.rank_info import AXES, RankInfo
from runtime.mesh.rendezvous import Rendezvous
from runtime.mesh.turns import Turns

SUMMED = ("tp", "stage")  # axes over which layers add their results


class Mesh:
    """The axes of one rank. Layers can hold them before `join`, and use them afterwards."""

    def __init__(self, rank_info: RankInfo, device: torch.device, *, symmetric: bool = False) -> None:
        """With `symmetric`, ranks that share layers add small tensors through symmetric memory; see `SymmetricSum`."""
        self.rank_info = rank_info
        self._symmetric = symmetric
        self._device = device
        self._axes = {name: Axis(name, rank_info.coordinate(name)) for name in AXES}

    def axis(self, name: str) -> Axis:
        """Return the axis with this name, which is one of AXES.

        Without attention groups, "stage" is the same axis as "tp".
        """
        return self._axes["tp" if name == "stage" and self.rank_info.dp_size == 1 else name]

    def join(self, rendezvous: Rendezvous, *, address: str | None = None, listening: int = -1) -> None:
        """Connect to the other ranks. Blocks until all ranks have connected.

        `address` is this rank's address; the default is the host of the rendezvous. `listening` is the file descriptor
        of the socket on which rank 0 listens. Raises RuntimeError after a timeout, or if symmetric memory is configured
        and the GPUs cannot share memory.
        """
        store = _open_store(rendezvous, self.rank_info.world_size, listening)
        for name, axis in self._axes.items():
            if axis.size > 1 and axis is self.axis(name):
                axis.open(
                    store,
                    device=self._device,
                    timeout_s=rendezvous.timeout_s,
                    address=address or rendezvous.host,
                    two_ways=name == "pp",
                    symmetric=self._symmetric and name in SUMMED,
                )

    @contextmanager
    def in_turns(self, turns: Turns) -> Iterator[None]:
        """Inside the context, two threads compute in turns: a thread that waits for a collective ends its turn."""
        for axis in self._axes.values():
            axis.turns = turns
        try:
            yield
        finally:
            for axis in self._axes.values():
                axis.turns = None

    def abort(self) -> None:
        """Unblock calls that wait for other ranks. The mesh cannot be used afterwards."""
        for axis in self._axes.values():
            axis.abort()

    def close(self) -> None:
        """Release sockets and threads."""
        for axis in self._axes.values():
            axis.close()


def _open_store(rendezvous: Rendezvous, world_size: int, listening: int) -> Any:
    """Return the store of the rendezvous: a private file, or a TCP port on rank 0's machine."""
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
