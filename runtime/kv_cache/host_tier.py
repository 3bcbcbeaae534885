"""The host tier: copies of prefix-tree pages in host memory.

The tier maps the key of a page (`page_keys.py`) to a host page. `policy` says when a tree page is copied to the tier:
when it enters the tree, when it is first shared, or when it is evicted from the tree. When a sequence is admitted, the
tier's pages after its prefix in the tree are copied back instead of being computed. All copies are part of the next
batch, so a host page may be used as soon as its copy is queued.

A page can be copied to the host only after the batch that computes it is built. Pages that enter the tree while a batch
is built therefore wait for the next batch (`begin_step`).

The tier evicts the least recently used page first. A page always counts as used later than the pages that follow it in
a sequence, so a prefix is evicted from its end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Set
from typing import NamedTuple, Protocol

from runtime.kv_cache.copy_queue import CopyQueue
from runtime.kv_cache.page_keys import page_keys
from runtime.sequence import Sequence

POLICIES = ("write_through", "write_through_selective", "write_back")
WRITE_SHARE = 4  # each step copies 1 / WRITE_SHARE of the waiting pages, or `step_pages` if this is more
KEYS_AT_ONCE = 32  # number of page keys that a lookup computes at a time; it stops at the first absent page


class TierCounts(NamedTuple):
    """Sizes and counters of the host tier, in pages. Counters are since the start."""

    num_pages: int = 0
    num_used: int = 0
    num_written: int = 0  # pages copied to the host
    num_restored: int = 0  # pages copied back to the device
    num_evicted: int = 0  # pages evicted from the host tier


class _TreePage(NamedTuple):
    """A page of the prefix tree, identified by its content."""

    key: bytes
    parent: bytes | None  # key of the preceding page; None for the first page of a prefix
    index: int  # number of preceding pages in the prefix


class Entry(NamedTuple):
    """A page in the tier."""

    page: int  # host page id
    parent: bytes | None
    index: int


class PageMover(Protocol):
    """The part of a `StorageTier` that the host tier calls.

    The calls report changes of the host tier, and ask which host pages the storage tier still uses.
    """

    @property
    def saving(self) -> Collection[bytes]:
        """Keys of pages that must stay in the tier because they are being saved to the store."""
        ...

    @property
    def reserved(self) -> Collection[int]:
        """Host pages that the mover uses and that are not in the tier."""
        ...

    def written(self, key: bytes, entry: Entry) -> None:
        """Called when the batch being built copies a page to the host."""
        ...

    def detained(self, key: bytes, entry: Entry) -> bool:
        """Return whether the mover still uses a page that leaves the tier. If so, the mover frees the page later."""
        ...

    def distrust(self, key: bytes) -> None:
        """Called when the KV of a page may be wrong."""
        ...

    def clear(self) -> Collection[int]:
        """Called when the tier becomes empty. Return the host pages that the mover still uses."""
        ...


class HostTier:
    """Keeps copies of tree pages in the host pages with the ids first_page .. first_page + num_pages - 1."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        copies: CopyQueue,
        *,
        first_page: int = 0,
        policy: str = "write_through",
        step_pages: int = 64,
    ) -> None:
        """Create an empty tier. `step_pages` is the number of pages that a step can copy without a noticeable delay."""
        if policy not in POLICIES:
            raise ValueError(f"The write policy {policy!r} is unknown.")
        self.page_size = page_size
        self.copy_s: float | None = None  # measured seconds to copy one page to the device; None: unknown
        self.compute_s: float | None = None  # measured seconds to compute the tokens of one page; None: unknown
        self._copies = copies
        self._policy = policy
        self._step_pages = step_pages
        self._all = range(first_page, first_page + num_pages)
        self._free = list(reversed(self._all))
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()  # by key, least recently used first
        self._tree: dict[int, _TreePage] = {}  # pages of the prefix tree, by device page id
        self._waiting: dict[int, None] = {}  # tree pages that will be copied to the host, in order
        self._kept: frozenset[bytes] = frozenset()  # keys of pages that `keep` protects from eviction
        self.storage: PageMover | None = None  # saves pages of this tier to a store and loads them
        self._num_written = self._num_restored = self._num_evicted = 0

    @property
    def counts(self) -> TierCounts:
        return TierCounts(
            len(self._all),
            len(self._all) - len(self._free),
            self._num_written,
            self._num_restored,
            self._num_evicted,
        )

    # --- called when the prefix tree changes ---

    def added(self, sequence: Sequence, first: int, pages: list[int]) -> None:
        """Add pages that entered the tree. They begin at index `first` of the sequence's page list."""
        keys = page_keys(sequence, first + len(pages), self.page_size)
        for index, page in enumerate(pages, start=first):
            self._tree[page] = _TreePage(keys[index], keys[index - 1] if index else None, index)
        if self._policy == "write_through":
            self._waiting.update(dict.fromkeys(pages))

    def evicted(self, pages: Iterable[int]) -> None:
        """Remove pages that were evicted from the tree.

        Before that, copy them to the host if the policy is "write_back" or if their copy was still waiting.
        """
        left = [self._tree.pop(page) for page in pages]
        chosen = [
            (page, tree_page)
            for page, tree_page in zip(pages, left, strict=True)
            if page in self._waiting or self._policy == "write_back"
        ]
        for page, _ in chosen:
            self._waiting.pop(page, None)
        self._write(chosen)

    def discarded(self, pages: Iterable[int]) -> None:
        """Remove from the tier the pages that left the tree because their KV may be wrong."""
        for page in pages:
            self._waiting.pop(page, None)
            key = self._tree.pop(page).key
            entry = self._entries.pop(key, None)
            if entry is not None and (self.storage is None or not self.storage.detained(key, entry)):
                self._free.append(entry.page)
            if self.storage is not None:
                self.storage.distrust(key)

    # --- steps ---

    def begin_step(self) -> None:
        """Queue copies of waiting pages to the host, for the batch being built.

        Pages that this batch computes wait for the next batch.
        """
        if not self._waiting:
            return
        count = max(self._step_pages, len(self._waiting) // WRITE_SHARE)
        pages = list(self._waiting)[:count]
        for page in pages:
            del self._waiting[page]
        self._write([(page, self._tree[page]) for page in pages])

    def write_all(self) -> None:
        """Queue copies of all waiting pages to the host. Called between two steps."""
        pages, self._waiting = list(self._waiting), {}
        self._write([(page, self._tree[page]) for page in pages])

    @property
    def num_waiting(self) -> int:
        """Number of tree pages that wait to be copied to the host."""
        return len(self._waiting)

    def has_waiting(self, keys: Set[bytes]) -> bool:
        """Return whether one of these pages waits to be copied to the host."""
        return not {self._tree[page].key for page in self._waiting}.isdisjoint(keys)

    def num_restorable(self, sequence: Sequence, limit: int) -> int:
        """Return how many of the first `limit` tokens have KV once the tier's pages are restored.

        The sequence must already have its pages from the tree.
        """
        first = len(sequence.pages)
        count = self.num_present(sequence, first, limit // self.page_size)
        return (first + count) * self.page_size if count else sequence.num_computed

    def num_present(self, sequence: Sequence, first: int, end: int) -> int:
        """Return how many consecutive pages of the sequence, from index `first` up to `end`, are in the tier.

        Returns 0 while restoring pages takes longer than computing them.
        """
        if not self._pays:
            return 0
        entries, keys = self._entries, sequence.page_keys
        for index in range(first, end):
            if index >= len(keys):
                page_keys(sequence, min(end, index + KEYS_AT_ONCE), self.page_size)  # appends to `keys`
            if keys[index] not in entries:
                return index - first
        return max(0, end - first)

    def keep(self, sequence: Sequence, end: int) -> list[int]:
        """Return the host pages of a sequence with page indices from `len(sequence.pages)` up to `end` (exclusive).

        The tier does not evict these pages until `restored` is called.
        """
        keys = page_keys(sequence, end, self.page_size)[len(sequence.pages) :]
        self._kept = frozenset(keys)
        return [self._entries[key].page for key in keys]

    def restored(self, host_pages: list[int], pages: list[int]) -> None:
        """Queue copies of the host pages from `keep` to the device pages `pages`. Allow their eviction again."""
        self._kept = frozenset()
        self._copies.add("host", "device", host_pages, pages)
        self._num_restored += len(pages)

    def used(self, sequence: Sequence) -> None:
        """Mark the pages of an admitted sequence as recently used."""
        pages = sequence.pages
        if not pages:
            return
        keys = page_keys(sequence, len(pages), self.page_size)
        self._touch(keys[-1:])
        if self._policy == "write_through_selective":
            self._waiting.update(
                (page, None) for page, key in zip(pages, keys) if page in self._tree and key not in self._entries
            )

    # --- all pages ---

    def clear(self) -> None:
        """Remove all pages from the tier. The prefix tree keeps its pages."""
        self._waiting.clear()
        self._entries.clear()
        self._free = list(reversed(self._all))
        if self.storage is not None:
            moving = self.storage.clear()
            self._free = [page for page in self._free if page not in moving]

    def reset(self) -> None:
        """Empty the tier and forget the tree's pages. Called after a failed step, when KV may be wrong."""
        self.clear()
        self._tree.clear()
        self._kept = frozenset()

    def check(self, tree_pages: Iterable[int]) -> None:
        """Raise `ValueError` unless every host page is free or used once, and the tier knows exactly `tree_pages`."""
        if self._tree.keys() != set(tree_pages):
            raise ValueError("The host tier does not know the pages of the prefix tree.")
        if not self._waiting.keys() <= self._tree.keys():
            raise ValueError("A page waits for its copy to the host but is not in the prefix tree.")
        moving = [] if self.storage is None else self.storage.reserved
        if sorted([*self._free, *moving, *(entry.page for entry in self._entries.values())]) != list(self._all):
            raise ValueError("The pages of the host tier do not balance.")
        seen: set[bytes] = set()
        for key, entry in self._entries.items():
            if entry.parent in seen:
                raise ValueError("A page of the host tier would leave before a page that follows it.")
            seen.add(key)

    # --- pages from storage ---

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def entry(self, key: bytes) -> Entry | None:
        """Return the entry of a page, or None if the page is not in the tier."""
        return self._entries.get(key)

    def take_pages(self, count: int) -> list[int]:
        """Allocate up to `count` host pages, into which pages from storage will be loaded.

        Evicts the least recently used pages if necessary.
        """
        pages: list[int] = []
        while len(pages) < count and (page := self._take_page()) is not None:
            pages.append(page)
        return pages

    def free_pages(self, pages: Iterable[int]) -> None:
        """Free host pages that no entry of the tier uses."""
        self._free += pages

    def loaded(self, key: bytes, page: int, parent: bytes | None, index: int) -> None:
        """Add a page that was loaded from storage. The pages of a prefix must be added from last to first."""
        self._entries[key] = Entry(page, parent, index)

    def touch(self, key: bytes) -> None:
        """Mark a page and all its predecessors as most recently used."""
        self._touch([key])

    @property
    def _pays(self) -> bool:
        """Whether copying a page from the host is faster than computing its tokens. True if either time is unknown."""
        return self.copy_s is None or self.compute_s is None or self.copy_s < self.compute_s

    def _touch(self, keys: Iterable[bytes | None]) -> None:
        """Mark these pages and all their predecessors as most recently used."""
        entries, found = self._entries, dict[bytes, int]()
        for key in keys:
            while key is not None and key not in found and (entry := entries.get(key)) is not None:
                found[key] = entry.index
                key = entry.parent
        for key in sorted(found, key=found.__getitem__, reverse=True):
            entries.move_to_end(key)

    def _write(self, pages: list[tuple[int, _TreePage]]) -> None:
        """Queue copies of device pages to the tier. Pages that are already in the tier are skipped.

        If the tier has too few pages, the pages closest to the start of their prefixes are kept.
        """
        new = [(page, tree_page) for page, tree_page in pages if tree_page.key not in self._entries]
        if not new:
            return
        new.sort(key=lambda item: -item[1].index)
        self._touch([tree_page.parent for _, tree_page in new])
        # Host page -> device page. If the tier has to evict a page of `new`, a later page of `new` gets its host page,
        # and only the later copy is made.
        sources: dict[int, int] = {}
        for page, (key, parent, index) in new:
            target = self._take_page()
            if target is None:
                break
            self._entries[key] = Entry(target, parent, index)
            sources.pop(target, None)
            sources[target] = page
            if self.storage is not None:
                self.storage.written(key, self._entries[key])
        self._touch([tree_page.key for _, tree_page in new])
        self._copies.add("device", "host", list(sources.values()), list(sources))
        self._num_written += len(sources)

    def _take_page(self) -> int | None:
        """Return a free host page. If none is free, evict the least recently used page.

        Returns None if no page may be evicted.
        """
        if self._free:
            return self._free.pop()
        saving = () if self.storage is None else self.storage.saving
        key = next((key for key in self._entries if key not in self._kept and key not in saving), None)
        if key is None:
            return None
        self._num_evicted += 1
        return self._entries.pop(key).page
