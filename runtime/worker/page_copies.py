"""Copies pages between pools, in the order of the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from torch import Tensor

from runtime.batch import PageCopy
from runtime.kv_cache.kinds import PAGED
from runtime.kv_cache.paged import PagedKVCache
from runtime.kv_cache.pools import KVPool
from runtime.worker.device import Device
from runtime.worker.step_inputs import Staging

CopyPages = Callable[[Sequence[Tensor], Sequence[Tensor], Tensor, Tensor], None]  # see `ops.kv`


class PageCopier:
    """Performs a batch's page copies on the copy stream, after all earlier steps and before all later work.

    The order is necessary because earlier steps may still write the source pages or read the target pages. The host
    does not wait.
    """

    def __init__(self, pools: Sequence[KVPool], copy_pages: CopyPages, device: Device, staging: Staging) -> None:
        """Create the copier. `pools` has the pool of each model of the rank. The models share one page table."""
        self._pools: dict[str, list[Tensor]] = {
            "device": [tensor for pool in pools for cache in pool.paged.values() for tensor in cache.tensors],
            "host": [tensor for pool in pools for cache in pool.host.values() for tensor in cache.tensors],
        }
        for cache in (cache for pool in pools for cache in pool.values() if isinstance(cache, PagedKVCache)):
            if cache.kind != PAGED:  # pages of a cache kind, by the name of the kind
                self._pools.setdefault(cache.kind, []).extend(cache.tensors)
        self._copy_pages = copy_pages
        self._device = device
        self._staging = staging

    def enqueue(self, copies: Iterable[PageCopy]) -> None:
        """Enqueue these copies in order. Raises `KeyError` for an unknown pool."""
        with self._device.copies():
            for copy in copies:
                self._enqueue_one(copy)
        self._device.order("copy", "forward")

    def _enqueue_one(self, copy: PageCopy) -> None:
        pages = self._staging.copy(
            {
                "source": copy.source_pages.astype(np.int64),
                "target": copy.target_pages.astype(np.int64),
            }
        )
        # The page copy must also wait until the forward stream has written `pages` on the device.
        self._device.order("forward", "copy")
        self._copy_pages(self._pools[copy.source], self._pools[copy.target], pages["source"], pages["target"])
