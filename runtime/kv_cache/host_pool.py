"""A pool of host pages that keeps the KV of retracted sequences.

A retracted sequence loses its device pages. With a host pool, its pages are first copied to the host. They are copied
back when the sequence is admitted again, so its tokens are not recomputed.

The scheduler decides about copies when it builds a batch. The copies are part of the batch (`Batch.copies`), and every
rank performs copies and steps in the same order. A freed page of either pool can therefore be reused immediately: a new
owner writes to the page only after the copy that reads it.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from runtime.kv_cache.copy_queue import CopyQueue
from runtime.kv_cache.pages import PagePool
from runtime.sequence import Sequence


class SwappedOut(NamedTuple):
    """The host pages of a waiting sequence."""

    pages: list[int]
    num_tokens: int  # number of leading tokens whose KV is in these pages; the last page may be partly filled


class HostPool:
    """Allocates host pages. Appends their copies to `copies`, the queue of copies for the next batch."""

    def __init__(self, num_pages: int, page_size: int, copies: CopyQueue) -> None:
        self.page_size = page_size
        self._copies = copies
        self.num_swapped_out = 0  # number of pages swapped out, since the start
        self.num_swapped_in = 0
        self._pool = PagePool(num_pages)
        self._swapped: dict[Sequence, SwappedOut] = {}

    @property
    def num_pages(self) -> int:
        return self._pool.total

    @property
    def num_used(self) -> int:
        return self._pool.total - self._pool.num_free

    @property
    def holders(self) -> AbstractSet[Sequence]:
        """The sequences that own host pages."""
        return self._swapped.keys()

    def swap_out(self, sequence: Sequence, num_tokens: int) -> None:
        """Copy the pages of the first `num_tokens` tokens to the host. `sequence.pages` must still list these pages.

        If too few host pages are free, nothing is copied, and the sequence is recomputed later.
        """
        pages = sequence.pages[: -(-num_tokens // self.page_size)]
        if not pages or len(pages) > self._pool.num_free:
            return
        host_pages = self._pool.allocate(len(pages))
        self._swapped[sequence] = SwappedOut(host_pages, num_tokens)
        self._copies.add("device", "host", pages, host_pages)
        self.num_swapped_out += len(pages)

    def num_restorable(self, sequence: Sequence, limit: int) -> int:
        """Return how many leading tokens will have KV after `swap_in`, at most `limit`."""
        swapped = self._swapped.get(sequence)
        if swapped is None:
            return sequence.num_computed
        return max(sequence.num_computed, min(swapped.num_tokens, limit))

    def swap_in(self, sequence: Sequence, pages: list[int]) -> None:
        """Copy a sequence's host pages to the device pages `pages`, beginning with index `len(sequence.pages)`.

        Then free all host pages of the sequence.
        """
        start = len(sequence.pages)
        host_pages = self._swapped[sequence].pages[start : start + len(pages)]
        self._copies.add("host", "device", host_pages, pages)
        self.num_swapped_in += len(pages)
        self.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Free the host pages of a sequence, if it has any."""
        swapped = self._swapped.pop(sequence, None)
        if swapped is not None:
            self._pool.free(swapped.pages)

    def reset(self) -> None:
        """Free all pages. Called when KV may be wrong after a failed step."""
        self._swapped.clear()
        self._pool.reset()

    def check(self, running: Collection[Sequence]) -> None:
        """Raise `ValueError` unless every page is either free or owned once, and no running sequence has host pages."""
        self._pool.check([page for swapped in self._swapped.values() for page in swapped.pages])
        if any(sequence in self._swapped for sequence in running):
            raise ValueError("A running sequence still has pages in host memory.")
        for sequence, swapped in self._swapped.items():
            if len(swapped.pages) != -(-swapped.num_tokens // self.page_size):
                raise ValueError(f"The number of host pages of {sequence!r} is wrong.")
