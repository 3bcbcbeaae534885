"""A separate page pool for sliding-window layers, in which a sequence keeps only the pages of its window.

Each page of the prefix cache may have a *windowed page* in this pool, which it gets when it is allocated. The windowed
page is in use as long as a future token of a running sequence can attend to it. Then the windowed page of a private
page is freed. The windowed page of a tree page is kept until its memory is needed, so that later prompts can resume
after this page.

A sequence resumes after n cached pages only if all pages in the window of its next token have windowed pages. Otherwise
a shorter prefix is used. If a sequence recomputes tree pages that have lost their windowed pages, the tree pages get
the new windowed pages.

Attention reads no page before the window (`ops.attention`). For these positions, page tables contain the scratch page.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
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
    """Allocates windowed pages. A running sequence has one for each prefix-cache page in its window."""

    name = "windowed"

    # --- sizing ---

    @staticmethod
    def used(specs: Specs, plan: Plan) -> bool:
        return plan.cache.window_ratio is not None and _window(specs) < plan.model.context_length

    @staticmethod
    def num_units(specs: Specs, plan: Plan, num_pages: int) -> int:
        """Return a share of `num_pages` that is enough for at least one sequence with its largest chunk."""
        size = plan.cache.page_size
        minimum = pages_held(_window(specs), size) + -(-plan.scheduler.step_prompt_tokens // size)
        return min(num_pages, max(minimum, int(num_pages * (plan.cache.window_ratio or 1.0))))

    @staticmethod
    def unit_bytes(specs: Specs, plan: Plan) -> int:
        return sum(spec.page_bytes(plan.cache.page_size, DTYPE_BYTES[plan.cache.kv_dtype]) for spec in specs.values())

    # --- on the device ---

    @staticmethod
    def make_layer(spec: Any, num_units: int, page_size: int, dtype: torch.dtype, device: torch.device) -> LayerCache:
        from runtime.kv_cache.paged import PagedKVCache

        return PagedKVCache.zeros(spec, num_units, page_size, dtype, device, kind=WindowedPages.name)

    @staticmethod
    def buffer_sizes(max_rows: int, max_pages: int, max_drafts: int = 0) -> Mapping[str, int]:
        return {"page_table": max_rows * max_pages}

    @staticmethod
    def scratch_arrays(counts: Seq[int], num_units: int) -> dict[str, Ints]:
        return {"page_table": np.full((len(counts), 1), num_units, np.int32)}

    # --- while the engine runs ---

    def __init__(self, specs: Specs, num_units: int, num_pages: int, page_size: int, max_drafts: int = 0) -> None:
        super().__init__(specs, num_units, num_pages, page_size, max_drafts)
        self.window, self._size = _window(specs), page_size
        self._pages_held = pages_held(self.window, page_size)
        self._num_pages = num_pages
        self.reset()

    def reset(self) -> None:
        self._free = list(range(self.count - 1, -1, -1))
        # Windowed page of each prefix-cache page, or `count` if it has none.
        self._windowed: Ints = np.full(self._num_pages, self.count, np.int32)
        self._users = [0] * self._num_pages  # page -> number of running sequences that may still attend to the page
        # Tree pages that have a windowed page and no users, least recently used first.
        self._evictable: dict[int, None] = {}
        # Index, in the sequence's page list, of the first page that the sequence still uses.
        self._first: dict[Sequence, int] = {}

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._evictable)

    def pages_ahead(self, sequence: Sequence, num_pages: int) -> int:
        """Return how many of the next `num_pages` pages need an additional windowed page before the window is full."""
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
        self, sequences: Seq[Sequence], starts: Ints, counts: Ints, page_table: Ints, unknown: Collection[int] = ()
    ) -> dict[str, Ints]:
        return {"page_table": self._windowed[page_table]}

    def filled(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            # Late host data can rewind the sequence, but never before its last known token.
            position = min(sequence.num_computed, len(sequence.ids) - 1)
            first, end = self._first[sequence], self._first_used(position)
            if end > first:
                self._release_pages(sequence, first, end)
                self._first[sequence] = end

    def replace(self, sequence: Sequence, first: int, private: Seq[int], shared: Seq[int]) -> None:
        for old, new in zip(private, shared, strict=True):
            if self._windowed[new] == self.count:
                self._windowed[new], self._windowed[old] = self._windowed[old], self.count
        self._use(shared[max(0, self._first[sequence] - first) :])

    def leave(self, sequence: Sequence) -> None:
        self._release_pages(sequence, self._first.pop(sequence), sequence.num_shared // self._size)

    def free(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._users[page] = 0
            self._drop(page)

    def check(self, sequences: Iterable[Sequence], tree_pages: Iterable[int]) -> None:
        users = [0] * self._num_pages
        sequences, shared = list(sequences), set(tree_pages)
        if set(sequences) != self._first.keys():
            raise ValueError("The sequences with windowed pages are not the running sequences.")
        for sequence in sequences:
            used = sequence.pages[self._first[sequence] :]
            if (self._windowed[used] == self.count).any():
                raise ValueError(f"{sequence!r} lacks pages of its window.")
            for page in [*used, *(page for branch in sequence.branches for page in branch.pages)]:
                users[page] += 1
        present = np.nonzero(self._windowed < self.count)[0].tolist()
        evictable = {page for page in present if not users[page]}
        if users != self._users or evictable != self._evictable.keys() or not evictable <= shared:
            raise ValueError("The user counts of the windowed pages are wrong.")
        if sorted(self._free + self._windowed[present].tolist()) != list(range(self.count)):
            raise ValueError(
                f"The windowed pages do not balance: {len(self._free)} free + {len(present)} used, of {self.count}."
            )

    def _first_used(self, position: int) -> int:
        """Return the index of the first page to which a token at `position` can attend."""
        return max(0, position - self.window + 1) // self._size

    def _use(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._users[page] += 1
            self._evictable.pop(page, None)

    def _release_pages(self, sequence: Sequence, first: int, end: int) -> None:
        """Release the windowed pages of the pages first .. end - 1 in the sequence's page list."""
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
    """Return an upper bound on the number of windowed pages of a decoding sequence.

    The window may begin and end within a page. Pages are released late: only at the end of a page, and after the last
    known token has passed them.
    """
    return -(-window // page_size) + 3


def _window(specs: Specs) -> int:
    return max(spec.window for spec in specs.values())
