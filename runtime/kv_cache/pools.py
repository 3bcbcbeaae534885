"""The keys and values themselves."""

from __future__ import annotations

import mmap
from math import prod

import torch
from torch import Tensor


class KVPool:
    """One key and one value tensor per layer, [num_pages + 1, K, page, D], zeroed.

    The last page is scratch: padding writes there and nobody reads it. Raises torch.OutOfMemoryError (on a
    GPU) when the pool does not fit.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.scratch_page = num_pages
        shape = (num_pages + 1, num_kv_heads, page_size, head_dim)
        self._layers = [
            (_zeros(shape, dtype, torch.device(device)), _zeros(shape, dtype, torch.device(device)))
            for _ in range(num_layers)
        ]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(keys, values) of one layer, written in place by the model."""
        return self._layers[index]

    @property
    def nbytes(self) -> int:
        return sum(k.nbytes + v.nbytes for k, v in self._layers)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU in memory that the system hands out page by page, when a page is first written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, prod(shape) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
