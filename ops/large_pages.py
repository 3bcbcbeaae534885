"""Host memory in large pages, with which page faults and address translation take less time than with small pages."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

CACHE_LINE = 64
BLOCK_BYTES = 64 << 20  # minimum size of a block


class LargePages:
    """Allocates adjacent tensors in blocks of large pages. A block is freed with its last tensor."""

    def __init__(self) -> None:
        self._block = memoryview(b"")  # free memory of the newest block

    def take(self, size: int) -> Tensor:
        """Return `size` zeroed bytes as a uint8 tensor, aligned to a cache line, at the start of its storage."""
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        if size > len(self._block):
            self._block = large_pages(max(size, BLOCK_BYTES))
        taken, self._block = self._block[:size], self._block[-(-size // CACHE_LINE) * CACHE_LINE :]
        return torch.frombuffer(taken, dtype=torch.uint8)


class ReusedPages(LargePages):
    """Allocates like `LargePages`, but keeps its blocks. After `reset`, new tensors reuse the memory of earlier ones.

    Reused memory is not zeroed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._blocks: list[memoryview] = []
        self._num_used = 0

    def take(self, size: int) -> Tensor:
        """Return `size` bytes as a uint8 tensor, aligned to a cache line, at the start of its storage."""
        while size > len(self._block):
            if self._num_used == len(self._blocks):
                self._blocks.append(large_pages(max(size, BLOCK_BYTES)))
            self._block = self._blocks[self._num_used]
            self._num_used += 1
        return super().take(size)

    def reset(self) -> None:
        """Begin again with the first block. Tensors that `take` has returned must no longer be in use."""
        self._num_used, self._block = 0, memoryview(b"")


def large_pages(size: int) -> memoryview:
    """Return zeroed memory, in large pages if the system has them. A page occupies memory from its first write on."""
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the Linux kernel may not support large pages
            block.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(block)
