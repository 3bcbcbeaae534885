"""A trainer in a process of its own: it opens a group as slime and SGLang's clients do, and broadcasts tensors.

    async with trainer(world_size=2) as it:
        await it.join()                      # returns when all members have joined
        await it.send(path, "none")          # all tensors of a checkpoint, as "none", "bucket" or "packed"

The process is rank 0 of the group. `names` and `announcement` describe the tensors for the server.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

GROUP = "trainers"


def tensors_of(path: str) -> dict[str, Any]:
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def announcement(path: str) -> dict[str, Any]:
    """Return the names, dtypes and shapes of a checkpoint's tensors, in the order in which `send` sends them."""
    tensors = tensors_of(path)
    return {
        "names": list(tensors),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


class Trainer:
    def __init__(self, process: asyncio.subprocess.Process, port: int, world_size: int) -> None:
        self.process, self.port, self.world_size = process, port, world_size

    @property
    def group(self) -> dict[str, Any]:
        """The body of /init_weights_update_group."""
        where = {"master_address": "127.0.0.1", "master_port": self.port, "rank_offset": 1}
        return {**where, "world_size": self.world_size, "group_name": GROUP, "backend": "gloo"}

    async def joined(self) -> None:
        await self._answer("joined")

    async def send(self, path: str, packing: str = "none", packed_bytes: int = 2**30) -> None:
        """Broadcast; returns when all tensors are sent."""
        self.begin(path, packing, packed_bytes)
        await self._answer("sent")

    def begin(self, path: str, packing: str = "none", packed_bytes: int = 2**30, count: int = -1) -> None:
        """Begin to broadcast; with `count`, the process ends after so many tensors."""
        if self.process.stdin is None:
            raise RuntimeError("the trainer has no input")
        self.process.stdin.write(json.dumps([path, packing, packed_bytes, count]).encode() + b"\n")

    async def _answer(self, wanted: str) -> None:
        if self.process.stdout is None:
            raise RuntimeError("the trainer has no output")
        line = (await asyncio.wait_for(self.process.stdout.readline(), 60)).decode().strip()
        if line != wanted:
            raise AssertionError(f"the trainer said {line!r}, not {wanted!r}")


@asynccontextmanager
async def trainer(world_size: int) -> AsyncIterator[Trainer]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, str(port), str(world_size), stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield Trainer(process, port, world_size)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def trainer_group(port: int, world_size: int, name: str) -> Any:
    """Open a group as the frameworks do, with this process as rank 0. Returns when all members have joined."""
    from datetime import timedelta

    from torch.distributed import distributed_c10d
    from torch.distributed.rendezvous import rendezvous

    torch_group: Any = distributed_c10d
    timeout = timedelta(seconds=60)
    store, rank, size = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, world_size, timeout=timeout))
    prefixed = torch_group.PrefixStore(name, store)
    made: Any = torch_group._new_process_group_helper(
        size, rank, [], "gloo", prefixed, group_name=name, timeout=timeout
    )
    group = made[0]
    torch_group._world.pg_group_ranks[group] = {each: each for each in range(world_size)}
    return group


def main(port: int, world_size: int) -> None:
    import torch.distributed as dist

    group = trainer_group(port, world_size, GROUP)
    print("joined", flush=True)
    for line in sys.stdin:
        path, packing, packed_bytes, count = json.loads(line)
        tensors = list(tensors_of(path).values())
        for number, tensor in enumerate(packed(tensors, packing, packed_bytes)):
            if number == count:
                os._exit(1)
            dist.broadcast(tensor, 0, group=group)
        print("sent", flush=True)


def packed(tensors: list[Any], packing: str, packed_bytes: int) -> list[Any]:
    """Return the tensors that are broadcast: the given ones ("none"), one ("bucket"), or one a buffer ("packed")."""
    import torch

    if packing == "none":
        return tensors
    raw = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    if packing == "bucket":
        return [torch.cat(raw)]
    buckets: list[list[Any]] = [[]]
    for each in raw:  # as vLLM's packed transfer: a buffer ends with the tensor that exceeds its size
        buckets[-1].append(each)
        if sum(len(part) for part in buckets[-1]) > packed_bytes:
            buckets.append([])
    return [torch.cat(bucket) for bucket in buckets if bucket]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
