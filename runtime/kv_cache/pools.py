"""The caches of a rank's layers, in device and host memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self, cast

import torch

from runtime.kv_cache.paged import PagedKVCache
from runtime.kv_cache.registry import KINDS
from runtime.layers.forward_batch import KVSpec, LayerSpec


class KVPool(dict[int, Any]):
    """The caches (`LayerCache`) of a rank's layers, by layer index in the whole model. They initially hold zeros.

    Each cache has one more page (or unit) than it can allocate: the scratch page, to which only padding writes and
    which no row reads. Raises torch.OutOfMemoryError (on a GPU) if the pool does not fit.
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
        num_host_pages: int = 0,
        in_blocks: bool = False,
    ) -> None:
        """Allocate the caches. The keys of `specs` are layer indices in the whole model.

        `kinds` maps each kind in use to its number of units. Layers of all other kinds keep all tokens in pages, and
        also have `num_host_pages` pages in host memory. With `in_blocks`, each host page is one block over all layers;
        otherwise each layer has its own tensor.
        """
        super().__init__()
        self.num_pages = num_pages
        self.page_size = page_size
        self.scratch_page = num_pages
        self.kinds = dict(kinds or {})
        self.paged: dict[int, PagedKVCache] = {}  # layer index -> cache, for layers that keep all tokens
        self.host: dict[int, PagedKVCache] = {}  # layer index -> host pages; for the layers in `paged`
        self.host_blocks: torch.Tensor | None = None  # [num_host_pages, elements per page], only with `in_blocks`
        device = torch.device(device)
        paged_specs: dict[int, KVSpec] = {}
        for index, spec in specs.items():
            if spec.kind in self.kinds:
                make, count = KINDS[spec.kind].make_layer, self.kinds[spec.kind]
                self[index] = make(cast(Any, spec), count, page_size, dtype, device)
                continue
            spec = cast(KVSpec, spec)
            self[index] = self.paged[index] = PagedKVCache.zeros(spec, num_pages, page_size, dtype, device)
            paged_specs[index] = spec
            if num_host_pages and not in_blocks:
                self.host[index] = PagedKVCache.in_host_memory(spec, num_host_pages, page_size, dtype, device)
        if num_host_pages and in_blocks:
            self.host, self.host_blocks = PagedKVCache.in_blocks(paged_specs, num_host_pages, page_size, dtype, device)

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
        *,
        num_host_pages: int = 0,
    ) -> Self:
        """Create a pool for `num_layers` layers with caches of the same shape."""
        specs = {index: KVSpec(num_kv_heads, head_dim) for index in range(num_layers)}
        return cls(specs, num_pages, page_size, dtype, device, num_host_pages=num_host_pages)

    @property
    def host_tensors(self) -> list[torch.Tensor]:
        """The tensors that hold the host pages. Their first dimension is `num_host_pages`."""
        if self.host_blocks is not None:
            return [self.host_blocks]
        return [tensor for cache in self.host.values() for tensor in cache.tensors]

    @property
    def nbytes(self) -> int:
        """Bytes of all caches on the device."""
        return sum(cache.nbytes for cache in self.values())
