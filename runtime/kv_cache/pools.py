"""The keys and values themselves."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ops.select import Kernels
from runtime.layers.forward_batch import ForwardBatch


class PagedKVCache(NamedTuple):
    """One layer's keys and values in pages, [num_pages + 1, K, page, D] each, written in place."""

    k: Tensor
    v: Tensor

    def store(
        self, kernels: Kernels, k: Tensor, v: Tensor, batch: ForwardBatch, scales: Mapping[str, float]
    ) -> None:
        """Put keys and values [T, K, D] into the slots of their tokens."""
        kernels.store(k, v, self.k, self.v, batch.attention, **self._used(scales))

    def attend(
        self,
        kernels: Kernels,
        q: Tensor,
        batch: ForwardBatch,
        scales: Mapping[str, float],
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attention [T, H, D] of the queries [T, H, D] over their rows' pages (see `ops.attention`)."""
        return kernels.attend(
            q,
            self.k,
            self.v,
            batch.attention,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            sinks=sinks,
            **self._used(scales),
        )

    def _used(self, scales: Mapping[str, float]) -> Mapping[str, float]:
        return scales if self.k.dtype.itemsize == 1 else {}


class KVPool:
    """The caches of the layers from `first_layer` on, zeroed, each with a page to scratch in behind the others.

    Padding writes to the scratch page and nobody reads it. Raises torch.OutOfMemoryError (on a GPU) when the pool does
    not fit.
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
        *,
        first_layer: int = 0,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.scratch_page = num_pages
        shape, device = (num_pages + 1, num_kv_heads, page_size, head_dim), torch.device(device)
        self._layers = {
            first_layer + index: PagedKVCache(_zeros(shape, dtype, device), _zeros(shape, dtype, device))
            for index in range(num_layers)
        }

    def __getitem__(self, index: int) -> PagedKVCache:
        """Of the layer with this number in the whole model."""
        return self._layers[index]

    @property
    def nbytes(self) -> int:
        return sum(cache.k.nbytes + cache.v.nbytes for cache in self._layers.values())


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU in memory that the system hands out page by page, when a page is first written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, prod(shape) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
