"""The keys and values themselves."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor

from ops.attention import AttentionMetadata
from ops.select import Kernels
from runtime.kv_cache.kinds import PAGED
from runtime.kv_cache.registry import KINDS
from runtime.layers.forward_batch import ForwardBatch, KVSpec, LayerCache, LayerSpec


class PagedKVCache(NamedTuple):
    """One layer's keys and values in pages, [num_pages + 1, K, page, D] each, written in place.

    The pages are those that all sequences have, or those of a kind that has a page table of its own.
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
        return cls(zeros(shape, dtype, device), zeros(shape, dtype, device), kind)

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

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
            self._metadata(batch),
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            sinks=sinks,
            **self._used(scales),
        )

    def _metadata(self, batch: ForwardBatch) -> AttentionMetadata:
        return batch.attention if self.kind == PAGED else batch.kinds[self.kind].attention

    def _used(self, scales: Mapping[str, float]) -> Mapping[str, float]:
        return scales if self.k.dtype.itemsize == 1 else {}


class KVPool:
    """The caches of a rank's layers, zeroed, each with a page (or whatever it consists of) to scratch in behind the
    others.

    Padding writes to the scratch page and nobody reads it. Raises torch.OutOfMemoryError (on a GPU) when the pool does
    not fit.
    """

    def __init__(
        self,
        specs: Mapping[int, LayerSpec],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        kinds: Mapping[str, int] | None = None,
    ) -> None:
        """`specs` are by the number of the layer in the whole model. `kinds` says how many units the kinds have that
        layers may have caches of; other layers keep the keys and values of all tokens.
        """
        self.num_pages = num_pages
        self.page_size = page_size
        self.scratch_page = num_pages
        self.kinds = dict(kinds or {})
        self._layers: dict[int, LayerCache] = {}
        device = torch.device(device)
        for index, spec in specs.items():
            if spec.kind in self.kinds:
                make, count = KINDS[spec.kind].make_layer, self.kinds[spec.kind]
            else:
                make, count = PagedKVCache.zeros, num_pages
            self._layers[index] = make(cast(Any, spec), count, page_size, dtype, device)

    @classmethod
    def uniform(
        cls,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Self:
        """For layers that are alike."""
        specs = {index: KVSpec(num_kv_heads, head_dim) for index in range(num_layers)}
        return cls(specs, num_pages, page_size, dtype, device)

    def __getitem__(self, index: int) -> Any:
        """The cache (`LayerCache`) of the layer with this number in the whole model."""
        return self._layers[index]

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self._layers.values())


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU in private memory that the system hands out page by page, when a page is first written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
