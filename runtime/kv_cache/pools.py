"""The caches of a rank's layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self, cast

import torch

from runtime.kv_cache.paged import PagedKVCache
from runtime.kv_cache.registry import KINDS
from runtime.layers.forward_batch import KVSpec, LayerSpec


class KVPool(dict[int, Any]):
    """The caches (`LayerCache`) of a rank's layers, by the number of the layer in the whole model: zeroed, each with a
    page (or whatever it consists of) to scratch in behind the others.

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
        super().__init__()
        self.num_pages = num_pages
        self.page_size = page_size
        self.scratch_page = num_pages
        self.kinds = dict(kinds or {})
        device = torch.device(device)
        for index, spec in specs.items():
            if spec.kind in self.kinds:
                make, count = KINDS[spec.kind].make_layer, self.kinds[spec.kind]
            else:
                make, count = PagedKVCache.zeros, num_pages
            self[index] = make(cast(Any, spec), count, page_size, dtype, device)

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

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.values())
