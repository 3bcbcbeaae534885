"""Sliding-window layers: a pool of their own, in which a sequence holds no more than its window.

A page of the prefix cache has a page in this pool or has none. It has one from when it is handed out until every
running sequence that lists it has gone on so far that no later token attends to it; then, if the page is a sequence's
own, the windowed one is free at once, and if the tree has it, it stays as long as there is room, so that a prompt may
go on behind it. Where it is gone, a found prefix ends before it: a sequence goes on behind n pages only if all pages
of the window before its next token are there. What it computes again is given to the pages that the tree has already.

Attention reads no page before the window (`ops.attention`), so the rows' page tables name the pool's last page there,
which is nobody's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

import numpy as np

from runtime.batch import Ints
from runtime.kv_cache.kinds import DTYPE_BYTES, CacheKind, Specs
from runtime.sequence import Sequence

if TYPE_CHECKING:
    import torch

    from runtime.config.plan import Plan
    from runtime.layers.forward_batch import LayerCache


class WindowedPages(CacheKind):
    """Pages of a pool of their own for sliding-window layers; a running sequence holds those of its window."""

    name = "windowed"

    # --- how large, before there is one ---

    @staticmethod
    def used(specs: Specs, plan: Plan) -> bool:
        return plan.cache.window_ratio is not None and _window(specs) < plan.model.context_length

    @staticmethod
    def num_units(specs: Specs, plan: Plan, num_pages: int) -> int:
        """A share of the pages of all layers, and never less than one sequence with its largest chunk needs."""
        size = plan.cache.page_size
        least = pages_held(_window(specs), size) + -(-plan.scheduler.step_prompt_tokens // size)
        return min(num_pages, max(least, int(num_pages * (plan.cache.window_ratio or 1.0))))

    @staticmethod
    def unit_bytes(specs: Specs, plan: Plan) -> int:
        return sum(
            spec.page_bytes(plan.cache.page_size, DTYPE_BYTES[plan.cache.kv_dtype]) for spec in specs.values()
        )

    # --- on the device ---

    @staticmethod
    def make_layer(
        spec: Any, num_units: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> LayerCache:
        from runtime.kv_cache.paged import PagedKVCache

        return PagedKVCache.zeros(spec, num_units, page_size, dtype, device, kind=WindowedPages.name)

    @staticmethod
    def buffer_sizes(max_rows: int, max_pages: int) -> Mapping[str, int]:
        return {"page_table": max_rows * max_pages}

    @staticmethod
    def scratch_arrays(counts: Seq[int], num_units: int) -> dict[str, Ints]:
        return {"page_table": np.full((len(counts), 1), num_units, np.int32)}

    # --- while the engine runs ---

    def __init__(self, specs: Specs, num_units: int, num_pages: int, page_size: int) -> None:
        super().__init__(specs, num_units, num_pages, page_size)
        self._window, self._size = _window(specs), page_size
        self._pages_held = pages_held(self._window, page_size)
        self._num_pages = num_pages
        self.reset()

    def reset(self) -> None:
        self._free = list(range(self.count - 1, -1, -1))
        self._windowed: Ints = np.full(self._num_pages, self.count, np.int32)  # by page; `count`: it has none
        self._users = [0] * self._num_pages  # of each page, the running sequences that may still attend to it
        # Pages of the tree without users that have one, least recent first.
        self._evictable: dict[int, None] = {}
        self._first: dict[Sequence, int] = {}  # the first index in its page list that a sequence uses

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._evictable)

    def pages_ahead(self, sequence: Sequence, num_pages: int) -> int:
        """No more than to what it holds when its window is full."""
        held = len(sequence.pages) - self._first.get(sequence, 0)
        return max(0, min(num_pages, self._pages_held - held))

    def resumable(self, pages: Seq[int], count: int) -> int:
        present = (self._windowed[list(pages[:count])] < self.count).tolist()
        index = count - 1
        while index >= self._first_used(count * self._size):
            if not present[index]:
                count = index
            index -= 1
        return count

    def enter(self, sequence: Sequence) -> None:
        first = self._first[sequence] = self._first_used(sequence.num_computed)
        self._use(sequence.pages[first:])

    def allocate(self, pages: list[int]) -> None:
        while len(self._free) < len(pages):
            self._drop(next(iter(self._evictable)))
        for page in pages:
            self._windowed[page] = self._free.pop()
            self._users[page] = 1

    def step_arrays(
        self, sequences: Seq[Sequence], starts: Ints, counts: Ints, page_table: Ints
    ) -> dict[str, Ints]:
        return {"page_table": self._windowed[page_table]}

    def filled(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            # A token that comes late takes the sequence back, but never before its last known one.
            position = min(sequence.num_computed, len(sequence.ids) - 1)
            first, end = self._first[sequence], self._first_used(position)
            if end > first:
                self._leave_pages(sequence, first, end)
                self._first[sequence] = end

    def replace(self, sequence: Sequence, first: int, own: Seq[int], kept: Seq[int]) -> None:
        for ours, trees in zip(own, kept, strict=True):
            if self._windowed[trees] == self.count:
                self._windowed[trees], self._windowed[ours] = self._windowed[ours], self.count
        self._use(kept[max(0, self._first[sequence] - first) :])

    def leave(self, sequence: Sequence) -> None:
        self._leave_pages(sequence, self._first.pop(sequence), sequence.num_shared // self._size)

    def free(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._users[page] = 0
            self._drop(page)

    def check(self, sequences: Iterable[Sequence], tree_pages: Iterable[int]) -> None:
        users = [0] * self._num_pages
        sequences, kept = list(sequences), set(tree_pages)
        if set(sequences) != self._first.keys():
            raise ValueError("The windowed pages are not those of the running sequences.")
        for sequence in sequences:
            used = sequence.pages[self._first[sequence] :]
            if (self._windowed[used] == self.count).any():
                raise ValueError(f"{sequence!r} lacks pages of its window.")
            for page in used:
                users[page] += 1
        present = np.nonzero(self._windowed < self.count)[0].tolist()
        evictable = {page for page in present if not users[page]}
        if users != self._users or evictable != self._evictable.keys() or not evictable <= kept:
            raise ValueError("The windowed pages do not have the users that they count.")
        if sorted(self._free + self._windowed[present].tolist()) != list(range(self.count)):
            raise ValueError(
                f"The windowed pages do not balance: {len(self._free)} free + {len(present)}, {self.count} in all."
            )

    def _first_used(self, position: int) -> int:
        """The index of the first page to which a token at this position attends."""
        return max(0, position - self._window + 1) // self._size

    def _use(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._users[page] += 1
            self._evictable.pop(page, None)

    def _leave_pages(self, sequence: Sequence, first: int, end: int) -> None:
        """A sequence needs the pages first .. end - 1 of its list no more."""
        num_shared = sequence.num_shared // self._size
        for index in range(first, end):
            page = sequence.pages[index]
            self._users[page] -= 1
            if index >= num_shared:
                self._drop(page)
            elif not self._users[page] and self._windowed[page] < self.count:
                self._evictable[page] = None

    def _drop(self, page: int) -> None:
        self._evictable.pop(page, None)
        windowed = int(self._windowed[page])
        if windowed < self.count:
            self._free.append(windowed)
            self._windowed[page] = self.count


def pages_held(window: int, page_size: int) -> int:
    """The most pages that a sequence holds whose output grows: its window, which begins and ends within pages, and one
    more, because pages are given up when the last known token has passed them and only at the end of a page.
    """
    return -(-window // page_size) + 3


def _window(specs: Specs) -> int:
    return max(spec.window for spec in specs.values())
