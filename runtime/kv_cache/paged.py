"""A layer's keys and values in pages."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from math import prod
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ops.attention import AttentionMetadata, AttentionOptions
from ops.latent import LatentWeights
from ops.select import Kernels
from runtime.kv_cache.kinds import PAGED
from runtime.layers.forward_batch import ForwardBatch, KVSpec


class PagedKVCache(NamedTuple):
    """One layer's keys and values in pages, [num_pages + 1, K, page, D] each, written in place.

    Where keys hold the values too, both are the same tensor. The pages are those that all sequences have, or those of a
    kind that has a page table of its own.
    """

    k: Tensor
    v: Tensor
    kind: str = PAGED

    @classmethod
    def zeros(
        cls,
        spec: KVSpec,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kind: str = PAGED,
    ) -> Self:
        shape = (num_pages + 1, spec.num_kv_heads, page_size, spec.head_dim)
        k = zeros(shape, dtype, device)
        return cls(k, k if spec.values_in_keys else zeros(shape, dtype, device), kind)

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + (0 if self.v is self.k else self.v.nbytes)

    def store(
        self, kernels: Kernels, k: Tensor, v: Tensor, batch: ForwardBatch, scales: Mapping[str, float]
    ) -> None:
        """Put keys and values [T, K, D] into the slots of their tokens."""
        kernels.store(k, v, self.k, self.v, self._metadata(batch), **self._used(scales))

    def attend(
        self,
        kernels: Kernels,
        q: Tensor,
        batch: ForwardBatch,
        scales: Mapping[str, float],
        options: AttentionOptions,
    ) -> Tensor:
        """Attention [T, H, D] of the queries [T, H, D] over their rows' pages (see `ops.attention`)."""
        if used := self._used(scales):
            options = options._replace(**used)
        return kernels.attend(q, self.k, self.v, self._metadata(batch), options)

    def attend_latent(
        self,
        kernels: Kernels,
        plain: Tensor,
        turned: Tensor,
        weights: LatentWeights,
        batch: ForwardBatch,
        options: AttentionOptions,
    ) -> Tensor:
        """Attention [T, H * V] of the queries [T, H, N] and [T, H, P] over the latent vectors in their rows' pages."""
        metadata = self._metadata(batch)
        return kernels.attend_latent(plain, turned, self.k, weights, metadata, options, kernels.attend)

    def _metadata(self, batch: ForwardBatch) -> AttentionMetadata:
        return batch.attention if self.kind == PAGED else batch.kinds[self.kind].attention

    def _used(self, scales: Mapping[str, float]) -> Mapping[str, float]:
        return scales if self.k.dtype.itemsize == 1 else {}


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU in private memory that the system hands out page by page, when a page is first written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
