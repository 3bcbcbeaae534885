"""Process groups with a trainer, over which a rank receives or sends weights."""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from datetime import timedelta
from itertools import accumulate
from threading import Thread
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ops.large_pages import CACHE_LINE, LargePages
from runtime.errors import InvalidRequest
from runtime.loading.memory_tensors import dtype_of, num_bytes, unflatten

logger = logging.getLogger("penstock.core")
NOTHING = torch.empty(0, dtype=torch.uint8)
SLACK = 2  # announced tensors may have at most this many times the bytes of the model in float32
PACKED_BYTES = 2**30  # vLLM's packed transfer starts a new buffer after this number of bytes
PART_BYTES = 32 * 2**20  # tensors that are broadcast one by one are grouped into parts of about this size
NUM_BLOCKS = 2  # one block receives a part while the previous part is prepared from the other block
KEPT_BYTES = 512 * 2**20  # a group keeps blocks up to this size for later parts
BACKENDS = {"gloo": "cpu", "nccl": "cuda"}  # backend -> type of the device whose tensors it moves


class TensorSpec(NamedTuple):
    """A tensor that the sender of a transfer announces."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.shape, self.dtype)


class Received(NamedTuple):
    """A part of a transfer that has been received."""

    tensors: dict[str, Tensor]
    lent: bool  # whether the memory of the tensors is overwritten by the part after the next one
    later: Set[str]  # names of the tensors in later parts


class TransferGroup:
    """A process group of this rank with a trainer, compatible with the `init_process_group` of training frameworks.

    All methods block, so they must run on a thread of their own. They raise RuntimeError if a peer is gone or too slow.
    """

    def __init__(self, info: Mapping[str, Any], rank: int, device: torch.device) -> None:
        """Connect to all members. `info` has address, port, world_size, name, backend and timeout_s."""
        self.parts: deque[list[TensorSpec]] = deque()  # parts of the announced tensors that have not been received
        self._blocks = [NOTHING] * NUM_BLOCKS  # reused for all parts, because new memory costs page faults
        self._num_received = 0  # number of parts of this transfer that were received into blocks
        self.device = device if info["backend"] == "nccl" else torch.device("cpu")
        timeout, name = timedelta(seconds=info["timeout_s"]), info["name"]
        store: Any = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            info["address"], info["port"], info["world_size"], rank == 0, timeout, multi_tenant=True
        )
        # The same prefixes as in torch's `_new_process_group_helper` and in the frameworks' wrappers.
        for prefix in (name, f"{name}/", f"{self.device.type}/"):
            store = dist.PrefixStore(prefix, store)  # pyright: ignore[reportPrivateImportUsage]
        self._store = store
        if info["backend"] == "nccl":
            nccl: Any = dist.ProcessGroupNCCL.Options()
            nccl._timeout = timeout
            self._group: Any = dist.ProcessGroupNCCL(store, rank, info["world_size"], nccl)
        else:
            options: Any = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
            own_address = _own_address(info["address"], info["port"])
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address)]
            options._timeout = timeout
            self._group = dist.ProcessGroupGloo(store, rank, info["world_size"], options)

    def announce(self, specs: Sequence[TensorSpec], packing: str, packed_bytes: int) -> None:
        """Divide the announced tensors into parts for `receive`.

        `packing` is "none" (one broadcast per tensor), "bucket" (one for all tensors) or "packed" (one per
        `packed_bytes`).
        """
        self._num_received = 0
        if packing == "bucket":
            self.parts = deque([list(specs)])
        else:
            self.parts = deque(_buckets(specs, packed_bytes if packing == "packed" else PART_BYTES))
        if not self.parts:
            self.parts.append([])

    def receive(self, packing: str, source: int, *, lend: bool) -> Received:
        """Receive the next part, which `source` broadcasts: into CPU memory with gloo, into GPU memory with nccl.

        With `lend`, the part may be in memory that the part after the next one overwrites.
        """
        specs = self.parts.popleft()
        if packing != "none":
            flat, lent = self._memory(sum(spec.num_bytes for spec in specs), lend=lend)
            self.broadcast(flat, source)
            tensors = unflatten(flat, [(spec.name, str(spec.dtype), spec.shape) for spec in specs])
            return Received(tensors, lent, self._later())
        ends = list(accumulate(-(-spec.num_bytes // CACHE_LINE) * CACHE_LINE for spec in specs))
        memory, lent = self._memory(ends[-1] if ends else 0, lend=lend)
        tensors = {}
        for spec, first in zip(specs, [0, *ends], strict=False):
            tensors[spec.name] = memory[first : first + spec.num_bytes].view(spec.dtype).view(spec.shape)
            self.broadcast(tensors[spec.name], source)
        return Received(tensors, lent, self._later())

    def _later(self) -> Set[str]:
        return {spec.name for part in self.parts for spec in part}

    def _memory(self, size: int, *, lend: bool) -> tuple[Tensor, bool]:
        """Return uninitialised memory on the group's device, uint8 [size], and whether it will be overwritten."""
        if self.device.type != "cpu":
            return torch.empty(size, dtype=torch.uint8, device=self.device), False
        if not lend or size > KEPT_BYTES:
            return LargePages().take(size), False
        index = self._num_received % NUM_BLOCKS
        self._num_received += 1
        if len(self._blocks[index]) < size:
            self._blocks[index] = NOTHING
            self._blocks[index] = LargePages().take(size)
        return self._blocks[index][:size], True

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Receive `tensor` from rank `source`. On that rank, send it to all others."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._group.broadcast([tensor], options).wait()
        if tensor.device.type == "cuda":
            torch.cuda.current_stream(tensor.device).synchronize()
        return tensor

    def close(self) -> None:
        """Leave the group. Peers that wait for this rank get an error."""
        group, self._group = self._group, None
        self._blocks = [NOTHING] * NUM_BLOCKS
        if group is not None:
            group.abort()
            group.shutdown()


def announced(payload: Mapping[str, Any], max_bytes: int) -> list[TensorSpec]:
    """Return the tensors that a payload announces with names, dtypes and shapes.

    Raises InvalidRequest if they are invalid.
    """
    names, dtypes, shapes = payload["names"], payload["dtypes"], payload["shapes"]
    if not len(names) == len(dtypes) == len(shapes):
        raise InvalidRequest("names, dtypes and shapes must have equal lengths.", param="shapes")
    if len(set(names)) < len(names):
        raise InvalidRequest("A tensor's name occurs twice.", param="names")
    specs = [
        TensorSpec(*each[:1], dtype_of(each[1]), tuple(each[2])) for each in zip(names, dtypes, shapes, strict=True)
    ]
    total = sum(spec.num_bytes for spec in specs)
    if total > SLACK * max_bytes:
        raise InvalidRequest(
            f"The tensors have {total} bytes, more than {SLACK} times the model's {max_bytes}.",
            param="shapes",
        )
    return specs


def on_thread(name: str, work: Callable[[], Mapping[str, Any] | None]) -> Future[dict[str, Any]]:
    """Run `work` on a daemon thread.

    The returned future never raises: its result is {"error": None or the reason}, plus the values that `work` returns.
    """
    done: Future[dict[str, Any]] = Future()

    def run() -> None:
        try:
            values = work()
        except InvalidRequest as error:
            done.set_result({"error": error.message})
        except (torch.OutOfMemoryError, MemoryError):
            done.set_result({"error": "There is not enough memory for the received tensors."})
        except Exception as error:  # gloo, nccl and the store raise errors of several types
            logger.warning("%s failed: %s", name, error)
            done.set_result({"error": f"{name} failed: a peer is gone, or did not answer in time."})
        else:
            done.set_result({"error": None, **(values or {})})

    Thread(target=run, name="penstock-transfer", daemon=True).start()
    return done


def _buckets(specs: Sequence[TensorSpec], packed_bytes: int) -> Iterator[list[TensorSpec]]:
    """Group tensors as vLLM's packed transfer does: a bucket ends when it exceeds `packed_bytes`."""
    bucket: list[TensorSpec] = []
    size = 0
    for spec in specs:
        bucket.append(spec)
        size += spec.num_bytes
        if size > packed_bytes:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def _own_address(host: str, port: int) -> str:
    """Return this machine's address as seen from `host`, without sending a packet."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
