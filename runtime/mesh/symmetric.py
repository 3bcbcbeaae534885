"""All-reduce through symmetric memory: one kernel per rank reads the memory of all GPUs and adds.

For the small tensors of a decode step, NCCL's latency exceeds the time to move and add the data. torch's kernel copies
the rank's tensor into memory that the other GPUs can read, waits until all ranks have copied, and adds the tensors in
the order of the ranks. Every rank therefore gets the same bits. CUDA graphs can capture the kernel.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Maximum size of a tensor. For larger tensors NCCL is faster, because here every rank reads the tensors of all ranks.
MAX_BYTES = 512 * 1024
ALIGNMENT = 16  # the size of a tensor must be a multiple of this number of bytes
_C10D: Any = torch._C._distributed_c10d  # pyright: ignore[reportAttributeAccessIssue]
DTYPES = (torch.bfloat16, torch.float32)  # dtypes that the kernel adds


class SymmetricSum:
    """Adds small tensors of all ranks of an axis. All GPUs must be in one machine and reach each other's memory."""

    def __init__(self, name: str, rank: int, size: int, store: Any, device: torch.device) -> None:
        """Allocate memory that the other ranks can read, using `store`. Blocks until all ranks have done so.

        Raises RuntimeError if the GPUs cannot share memory, or if a test sum is wrong.
        """
        self._name = name
        group = dist.ProcessGroup(store, rank, size)  # torch reads only rank, size and store
        _C10D._register_process_group(name, group)
        try:
            memory = _memory()
            if hasattr(memory, "set_group_info"):  # older versions of torch read these values
                memory.set_group_info(name, rank, size, store)
            self._buffer = memory.empty_strided_p2p((MAX_BYTES,), (1,), torch.uint8, device, name)
            memory.rendezvous(self._buffer, name)
            found = self.sum(torch.full((64,), rank + 1.0, device=device)).tolist()
            if found != [size * (size + 1) / 2] * 64:
                raise RuntimeError(f"the sum of a test is {found[0]}, not {size * (size + 1) / 2}")
        except BaseException:
            self.close()
            raise

    def takes(self, x: Tensor) -> bool:
        """Return whether the kernel can add this tensor. The answer is the same on all ranks."""
        fits = 0 < x.nbytes <= MAX_BYTES and x.nbytes % ALIGNMENT == 0
        return fits and x.dtype in DTYPES and x.is_contiguous() and x.storage_offset() == 0

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors as a new tensor."""
        buffer = self._buffer[: x.nbytes].view(x.dtype).view(x.shape)
        return _operations().one_shot_all_reduce_copy(buffer, x, "sum", self._name)

    def close(self) -> None:
        """Unregister the process group. The memory is freed with this object."""
        _C10D._unregister_process_group(self._name)


def _memory() -> Any:
    return _C10D._SymmetricMemory


def _operations() -> Any:
    return torch.ops.symm_mem
