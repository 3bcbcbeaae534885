"""What ranks tell each other about tensors."""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MAX_UNSENT = 16  # tensors on their way, kept alive until then


class Group:
    """Some ranks of a mesh, seen from one of them. Not registered with torch: nothing global is touched.

    All its ranks call the same methods in the same order. On CUDA a call is enqueued on the current stream; on
    CPU it returns when it is done. Raises RuntimeError when one of them is gone or too late.
    """

    def __init__(
        self,
        store: Any,  # of torch.distributed: where the ranks find each other
        name: str,
        rank: int,
        size: int,
        *,
        device: torch.device,
        timeout_s: float,
        address: str,
    ) -> None:
        self.rank = rank
        self.size = size
        store = dist.PrefixStore(name, store)  # pyright: ignore[reportPrivateImportUsage]
        make = _nccl if device.type == "cuda" else _gloo
        self._group = make(store, rank, size, timedelta(seconds=timeout_s), address)
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`, in place."""
        self._group.allreduce([x]).wait()
        return x

    def gather(self, x: Tensor) -> list[Tensor] | None:
        """All ranks' `x`, of one shape, on rank 0; None on the others."""
        options = dist.GatherOptions()
        options.rootRank = 0
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        self._group.gather([parts] if parts is not None else [], [x], options).wait()
        return parts

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's `x` on every rank, in place."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([x], options).wait()
        return x

    def send(self, x: Tensor, to: int) -> None:
        """Send without waiting for the receiver. The tensor must not be changed afterwards."""
        while len(self._sent) >= MAX_UNSENT:
            self._sent.popleft()[0].wait()
        x = x.contiguous()
        self._sent.append((self._group.send([x], to, 0), x))

    def recv(self, like: Tensor, source: int) -> Tensor:
        """Fill `like` with what `source` sent next."""
        self._group.recv([like], source, 0).wait()
        return like

    def abort(self) -> None:
        """Unblock whoever waits in a call of this rank."""
        self._group.abort()

    def close(self) -> None:
        """Give back sockets and threads."""
        self._sent.clear()
        self._group.shutdown()
        del self._group


def _gloo(store: Any, rank: int, size: int, timeout: timedelta, address: str) -> Any:
    options: Any = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]  # listens there and only there
    options._timeout = timeout
    options._threads = 1  # calls of one group never overlap
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, timeout: timedelta, address: str) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)
