"""Collectives among the ranks of one mesh axis."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from runtime.mesh.rank_info import Coordinate
from runtime.mesh.symmetric import SymmetricSum
from runtime.mesh.turns import Turns

MAX_UNSENT = 16  # maximum number of sent tensors that a rank keeps until they have arrived


class Axis:
    """The ranks along one axis, as seen by one of them. Does not use torch's global process groups.

    Layers can hold an axis before `open`, and use it afterwards. All ranks must call the same methods in the same
    order. On CUDA, a call enqueues the collective on the current stream. On a CPU, a call returns when the collective
    is complete. On an axis of one rank, collectives return their argument. Methods raise RuntimeError if another rank
    has died or timed out.

    If the ranks' parts differ in size, `sizes` lists their first dimensions. Every rank must pass the same list. Parts
    may be empty.
    """

    def __init__(self, name: str, coordinate: Coordinate) -> None:
        self.name = name
        self.rank, self.size, self._group_index = coordinate
        # Process groups: one for all traffic, or one to send to higher ranks and one to send to lower ranks.
        self._open: list[Any] = []
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()
        self.turns: Turns | None = None  # set while two threads compute in turns
        self._symmetric: SymmetricSum | None = None  # adds small tensors; None: the process group adds all tensors

    def open(
        self,
        store: Any,  # torch.distributed store for the rendezvous
        *,
        device: torch.device,
        timeout_s: float,
        address: str,
        two_ways: bool = False,
        symmetric: bool = False,
    ) -> None:
        """Connect to the other ranks of the axis. Blocks until all ranks have connected.

        `two_ways` adds a process group to send to lower ranks. On CUDA, a group runs all sends and receives in one
        order. With a single group, a pipeline stage would wait for the next stage's reply before it could send.

        With `symmetric`, small tensors are added through symmetric memory. Raises RuntimeError if the GPUs cannot share
        memory.
        """
        make, timeout = _nccl if device.type == "cuda" else _gloo, timedelta(seconds=timeout_s)
        for way in ("up", "down") if two_ways else ("all",):
            prefix = f"{self.name}{self._group_index}/{way}"
            prefixed = dist.PrefixStore(prefix, store)  # pyright: ignore[reportPrivateImportUsage]
            self._open.append(make(prefixed, self.rank, self.size, timeout, address))
        if symmetric:
            name = f"{self.name}{self._group_index}"
            own = dist.PrefixStore(f"{name}/symmetric", store)  # pyright: ignore[reportPrivateImportUsage]
            self._symmetric = SymmetricSum(f"penstock-{name}", self.rank, self.size, own, device)

    @property
    def next(self) -> int:
        """The next rank, cyclically."""
        return (self.rank + 1) % self.size

    @property
    def previous(self) -> int:
        """The previous rank, cyclically."""
        return (self.rank - 1) % self.size

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of the `x` of all ranks. May overwrite `x`."""
        if self._symmetric is not None and self._symmetric.takes(x):
            return self._symmetric.sum(x)
        if self.size > 1:
            self._wait(self._group.allreduce([x]))
        return x

    def all_gather(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """Return the concatenated parts of all ranks, on every rank."""
        if self.size == 1:
            return x
        largest = len(x) if sizes is None else max(sizes)
        padded = _pad(x, largest)
        gathered = x.new_empty(self.size * largest, *x.shape[1:])
        if gathered.numel():
            self._wait(self._group._allgather_base(gathered, padded))
        return gathered if sizes is None else torch.cat(_unpad(gathered.split(largest), sizes))

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """Add the `x` of all ranks, and return this rank's part of the sum."""
        if self.size == 1:
            return x
        if sizes is None and len(x) % self.size:
            raise ValueError(f"{len(x)} rows cannot be divided evenly among {self.size} ranks. Pass sizes.")
        largest = len(x) // self.size if sizes is None else max(sizes)
        padded = x.contiguous()
        if sizes is not None:
            padded = torch.cat([_pad(part, largest) for part in x.split(list(sizes))])
        reduced = x.new_empty(largest, *x.shape[1:])
        if reduced.numel():
            self._wait(self._group._reduce_scatter_base(reduced, padded))
        return reduced if sizes is None else reduced[: sizes[self.rank]]

    def all_to_all(self, x: Tensor, to: Sequence[int], source: Sequence[int]) -> Tensor:
        """Send `to[rank]` consecutive rows of `x` to each rank. Return the rows received from all ranks.

        `source[rank]` is the number of rows received from each rank.
        """
        if self.size == 1:
            return x
        received = x.new_empty(sum(source), *x.shape[1:])
        self._wait(self._group.alltoall_base(received, x.contiguous(), list(source), list(to)))
        return received

    def gather(self, x: Tensor, sizes: Sequence[int] | None = None) -> list[Tensor] | None:
        """Return the parts of all ranks on rank 0, and None on other ranks."""
        if self.size == 1:
            return [x]
        padded = x if sizes is None else _pad(x, max(sizes))
        options = dist.GatherOptions()
        options.rootRank = 0
        parts = [torch.empty_like(padded) for _ in range(self.size)] if self.rank == 0 else None
        if padded.numel():
            self._wait(self._group.gather([parts] if parts is not None else [], [padded], options))
        return parts if parts is None or sizes is None else _unpad(parts, sizes)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Copy the `x` of rank `source` into `x` on every rank, and return it."""
        if self.size > 1:
            options = dist.BroadcastOptions()
            options.rootRank = source
            self._wait(self._group.broadcast([x], options))
        return x

    def send(self, x: Tensor, to: int) -> None:
        """Send `x` without waiting for the receiver. The caller must not change the tensor afterwards."""
        group = self._group if to > self.rank else self._group_down
        while len(self._sent) >= MAX_UNSENT:
            self._sent.popleft()[0].wait()
        x = x.contiguous()
        self._sent.append((group.send([x], to, 0), x))

    def recv(self, like: Tensor, source: int) -> Tensor:
        """Receive the next tensor from `source` into `like`, and return it."""
        group = self._group if source < self.rank else self._group_down
        group.recv([like], source, 0).wait()
        return like

    def abort(self) -> None:
        """Unblock calls of this rank that wait for other ranks."""
        for group in self._open:
            group.abort()

    def close(self) -> None:
        """Release sockets and threads."""
        self._sent.clear()
        if self._symmetric is not None:
            self._symmetric.close()
            self._symmetric = None
        groups, self._open = self._open, []
        for group in groups:
            group.shutdown()

    def _wait(self, work: Any) -> None:
        """Wait for a collective. If two threads compute in turns, the other thread computes meanwhile."""
        if self.turns is None:
            work.wait()
        else:
            self.turns.wait(work)

    @property
    def _group(self) -> Any:
        if not self._open:
            raise RuntimeError(f"The mesh axis {self.name} is not open. Call `Mesh.join` first.")
        return self._open[0]

    @property
    def _group_down(self) -> Any:
        return self._group if len(self._open) < 2 else self._open[1]


def _pad(x: Tensor, size: int) -> Tensor:
    """Append zero rows, up to `size` rows in total."""
    return x.contiguous() if len(x) == size else F.pad(x, (0, 0) * (x.dim() - 1) + (0, size - len(x)))


def _unpad(parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    return [part[:size] for part, size in zip(parts, sizes, strict=True)]


def _gloo(store: Any, rank: int, size: int, timeout: timedelta, address: str) -> Any:
    options: Any = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]  # listens on this address only
    options._timeout = timeout
    options._threads = 1  # one thread is enough, because calls of one group run one after the other
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, timeout: timedelta, address: str) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)
