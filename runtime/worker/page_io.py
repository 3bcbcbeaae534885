"""Moves the host pages of a rank to and from a page store, on threads, while steps run."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from runtime.errors import ConfigurationError, InvalidRequest
from runtime.mesh.rank_info import RankInfo
from runtime.page_store.offered_pages import LocalPages, OfferedPages
from runtime.page_store.opening import open_store
from runtime.page_store.protocol import CHECKSUM_BYTES, CheckedStore, StoreSpace
from runtime.worker.device import Device, Event

logger = logging.getLogger("penstock.core")

DEFAULT_THREADS = 2
READ_AT_ONCE = 64  # maximum number of pages in one read from the store
NOT_ATTACHED = "No storage is attached to this rank."


class PageIO:
    """The host pages of all models of a rank, and the store that is attached to them.

    A page in the store consists of the bytes of its blocks in all models, in the order of the models. The caller
    ensures that no step copies to or from a host page while a call moves the page. Calls return futures. Their work
    begins after all work that was enqueued before.
    """

    def __init__(self, blocks: Sequence[Tensor], device: Device, rank_info: RankInfo) -> None:
        """Create the mover. `blocks` has the host pages of each model, [num_host_pages, elements per page]."""
        self._blocks = [block.view(torch.uint8).numpy() for block in blocks]
        self._rank_info = rank_info
        self._device = device
        self._store: CheckedStore | None = None
        self._threads: ThreadPoolExecutor | None = None
        self.local_pages: LocalPages = {}  # pages that prefill replicas in this process offer; set by the engine
        self._num_corrupt = 0  # number of corrupt pages in stores that were attached before
        self._has_logged = False  # whether an error of the attached store was logged

    @property
    def is_unordered(self) -> bool:
        """Whether `HOST_VERBS` may overtake launched steps: only on a CPU, if no other rank saves pages later."""
        return self._device.is_host and self._rank_info.world_size == 1

    @property
    def page_bytes(self) -> int:
        return sum(block.shape[1] for block in self._blocks)

    def attach(self, backend: str, name: str, config: Mapping[str, Any], *, same: bool = False) -> None:
        """Open a store and use it from now on. Raises `InvalidRequest` if it cannot be used.

        `same` says that all ranks have equal pages; each rank is then an attention group of its own.
        """
        info, num_bytes = self._rank_info, self.page_bytes + CHECKSUM_BYTES
        if same:
            space = StoreSpace(name, 0, 1, num_bytes, info.rank, info.world_size)
        else:
            group, num_ranks = info.coordinate("dp").rank, info.tp_size * info.pp_size
            space = StoreSpace(name, info.cache_rank, num_ranks, num_bytes, group, info.dp_size)
        try:
            store = open_store(backend, space, dict(config), self.local_pages)
        except ConfigurationError as error:
            raise InvalidRequest(str(error)) from error
        self.detach()
        self._store, self._has_logged = CheckedStore(store, quick=backend in ("prefill", "decode")), False
        num_threads = int(config.get("threads", DEFAULT_THREADS))
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="penstock-pages")

    def detach(self) -> None:
        """Wait for calls in progress, and close the store."""
        store, threads, self._store, self._threads = self._store, self._threads, None, None
        if store is not None:
            store.closing = True
        if threads is not None:
            threads.shutdown(cancel_futures=True)
        if store is not None:
            self._num_corrupt += store.num_corrupt
            store.store.close()

    def load(self, keys: Sequence[bytes], pages: Sequence[int]) -> Future[dict[str, int]]:
        """Read pages of the store into the host pages `pages`.

        The result has "count", the number of leading pages that were found and intact, and "corrupt", the number of
        corrupt pages since the start.
        """
        store, threads, reached = self._begin()
        return threads.submit(self._load, store, list(zip(keys, pages, strict=True)), reached)

    def save(self, keys: Sequence[bytes], pages: Sequence[int]) -> Future[dict[str, int]]:
        """Write the host pages `pages` to the store.

        The result has "failed", the number of pages that the store did not accept, and "us", the microseconds that it
        took.
        """
        store, threads, reached = self._begin()
        return threads.submit(self._save, store, list(zip(keys, pages, strict=True)), reached)

    def delete(self, keys: Sequence[bytes]) -> Future[None]:
        """Remove pages from the store."""
        store, threads, _ = self._begin()
        return threads.submit(store.store.delete, keys)

    def clear(self) -> Future[None]:
        """Remove all pages of this rank from the store."""
        store, threads, _ = self._begin()
        return threads.submit(store.store.clear)

    def note_prompts(self, begun: Sequence[bytes], ended: Sequence[bytes], stored: Sequence[bytes]) -> None:
        """Call `OfferedPages.note_prompts` of a prefill server's store. Does nothing with other stores."""
        if self._store is not None and isinstance(self._store.store, OfferedPages):
            self._store.store.note_prompts(begun, ended, stored)

    def _begin(self) -> tuple[CheckedStore, ThreadPoolExecutor, Event]:
        if self._store is None or self._threads is None:
            raise InvalidRequest(NOT_ATTACHED)
        self._device.order("copy", "forward")
        return self._store, self._threads, self._device.record()

    def _log_first(self, error: Exception) -> None:
        """Log the first error of the attached store. Later errors are only counted."""
        if not self._has_logged:
            self._has_logged = True
            text = "Storage failed: %s: %s. Further errors count as missing or failed pages, and are not logged."
            logger.warning(text, type(error).__name__, error)

    def _load(self, store: CheckedStore, items: list[tuple[bytes, int]], reached: Event) -> dict[str, int]:
        reached.wait()
        count = 0
        for begin in range(0, len(items), READ_AT_ONCE):
            part = items[begin : begin + READ_AT_ONCE]
            if store.closing:
                break
            try:
                number = self._read(store, part)
            except Exception as error:  # after any error of the store, the pages count as missing
                self._log_first(error)
                break
            count += number
            if number < len(part):
                break
        return {"count": count, "corrupt": self._num_corrupt + store.num_corrupt}

    def _save(self, store: CheckedStore, items: list[tuple[bytes, int]], reached: Event) -> dict[str, int]:
        reached.wait()
        failed, began_s = 0, time.monotonic()
        for key, page in items:
            if store.closing:
                break
            try:
                store.set(key, self._bytes_of(page))
            except Exception as error:  # any error of the store, for example a full disk
                self._log_first(error)
                failed += 1
        return {"failed": failed, "us": round((time.monotonic() - began_s) * 1e6)}

    def _read(self, store: CheckedStore, items: Sequence[tuple[bytes, int]]) -> int:
        """Read pages into their host pages. Return the number of leading pages that were found and intact."""
        keys = [key for key, _ in items]
        if len(self._blocks) == 1:
            return store.get_many(keys, [memoryview(self._blocks[0][page]) for _, page in items])
        wholes = [bytearray(self.page_bytes) for _ in items]
        count = store.get_many(keys, [memoryview(whole) for whole in wholes])
        for (_, page), whole in zip(items[:count], wholes):
            start = 0
            for block in self._blocks:
                width = block.shape[1]
                memoryview(block[page])[:] = whole[start : start + width]
                start += width
        return count

    def _bytes_of(self, page: int) -> memoryview:
        if len(self._blocks) == 1:
            return memoryview(self._blocks[0][page])
        return memoryview(b"".join(memoryview(block[page]) for block in self._blocks))
