"""The host tier: pages of the prefix tree that are also kept in host memory.

The tier maps the key of a page (`page_keys.py`) to a host page. It gets a page when the page enters the tree, is
shared for the first time, or leaves the tree (`policy`). When a sequence is admitted, the pages that follow its prefix
in the tree are copied back, instead of being computed. Like all page copies, these are part of the next batch, so a
host page may be used as soon as its copy is in the queue.

A page can be copied to the host once the batch that computes it is built. Pages that enter the tree while a batch is
built therefore wait for the next batch (`begin_step`).

The least recently used pages leave the tier first. A page is always used later than the pages that follow it, so the
page that leaves never has a successor in the tier.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import NamedTuple, Protocol

from runtime.kv_cache.copy_queue import CopyQueue
from runtime.kv_cache.page_keys import page_keys
from runtime.sequence import Sequence

POLICIES = ("write_through", "write_through_selective", "write_back")
WRITE_SHARE = 4  # a step copies this part (1 / WRITE_SHARE) of the waiting pages, but at least `step_pages`


class TierCounts(NamedTuple):
    """Sizes and counters of the host tier, in pages. Counters are since the start."""

    num_pages: int = 0
    num_used: int = 0
    num_written: int = 0  # copied to the host
    num_restored: int = 0  # copied back to the device
    num_evicted: int = 0  # left the host tier


class _TreePage(NamedTuple):
    """A page of the prefix tree, by content."""

    key: bytes
    parent: bytes | None  # key of the page before it
    index: int  # number of pages before it


class Entry(NamedTuple):
    """A page in the tier."""

    page: int  # host page
    parent: bytes | None
    index: int


class PageMover(Protocol):
    """What the host tier tells the storage tier, and what it must know of host pages in use (`StorageTier`)."""

    @property
    def saving(self) -> Collection[bytes]:
        """Keys of pages that must stay in the tier, because they are being saved."""
        ...

    @property
    def reserved(self) -> Collection[int]:
        """Host pages in use that are not in the tier."""
        ...

    def written(self, key: bytes, entry: Entry) -> None:
        """The batch that is built copies a page to the host."""
        ...

    def detained(self, key: bytes, entry: Entry) -> bool:
        """Whether the page that leaves the tier is still in use; the mover then frees it."""
        ...

    def distrust(self, key: bytes) -> None:
        """The KV of a page cannot be trusted."""
        ...

    def clear(self) -> Collection[int]:
        """The tier becomes empty. Returns the host pages in use."""
        ...


class HostTier:
    """Keeps pages of the prefix tree in the host pages first_page .. first_page + num_pages - 1."""

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
        """`step_pages` is the number of pages that one step may copy to the host without becoming slow."""
        if policy not in POLICIES:
            raise ValueError(f"The write policy {policy!r} is unknown.")
        self.page_size = page_size
        self.copy_s: float | None = None  # measured time to copy one page to the device; None: unknown
        self.compute_s: float | None = None  # measured time to compute the tokens of one page
        self._copies = copies
        self._policy = policy
        self._step_pages = step_pages
        self._all = range(first_page, first_page + num_pages)
        self._free = list(reversed(self._all))
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()  # by key, least recently used first
        self._tree: dict[int, _TreePage] = {}  # pages of the prefix tree
        self._waiting: dict[int, None] = {}  # tree pages to copy to the host, in order
        self._kept: frozenset[bytes] = frozenset()  # keys that must not leave the tier now
        self.storage: PageMover | None = None  # keeps pages of this tier in a store
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

    # --- the prefix tree changes ---

    def added(self, sequence: Sequence, first: int, pages: list[int]) -> None:
        """Note pages that entered the tree, from index `first` of the sequence's page list."""
        keys = page_keys(sequence, first + len(pages), self.page_size)
        for index, page in enumerate(pages, start=first):
            self._tree[page] = _TreePage(keys[index], keys[index - 1] if index else None, index)
        if self._policy == "write_through":
            self._waiting.update(dict.fromkeys(pages))

    def evicted(self, pages: Iterable[int]) -> None:
        """Note pages that leave the tree because their memory is needed; they are copied to the host if necessary."""
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
        """Note pages that leave the tree because their KV cannot be trusted."""
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
        """Copy waiting pages to the host, with the batch that is built now. Its own pages are not among them yet."""
        if not self._waiting:
            return
        count = max(self._step_pages, len(self._waiting) // WRITE_SHARE)
        pages = list(self._waiting)[:count]
        for page in pages:
            del self._waiting[page]
        self._write([(page, self._tree[page]) for page in pages])

    def write_all(self) -> None:
        """Copy all waiting pages to the host. Called between two steps."""
        pages, self._waiting = list(self._waiting), {}
        self._write([(page, self._tree[page]) for page in pages])

    @property
    def num_waiting(self) -> int:
        """Number of pages that wait to be copied to the host."""
        return len(self._waiting)

    def num_restorable(self, sequence: Sequence, limit: int) -> int:
        """Return how many of the first `limit` tokens will have KV after `restore`.

        The sequence must hold its prefix in the tree.
        """
        first, size = len(sequence.pages), self.page_size
        if not self._pays:
            return sequence.num_computed
        count = self._num_present(sequence, first, limit // size)
        return (first + count) * size if count else sequence.num_computed

    def keep(self, sequence: Sequence, end: int) -> list[int]:
        """Return the host pages of the sequence from the end of its page list up to page `end`.

        They stay in the tier until `restored` is called.
        """
        keys = page_keys(sequence, end, self.page_size)[len(sequence.pages) :]
        self._kept = frozenset(keys)
        return [self._entries[key].page for key in keys]

    def restored(self, host_pages: list[int], pages: list[int]) -> None:
        """Copy host pages from `keep` to these pages of the device."""
        self._kept = frozenset()
        self._copies.add("host", "device", host_pages, pages)
        self._num_restored += len(pages)

    def used(self, sequence: Sequence) -> None:
        """Note that a sequence starts with the pages that it lists."""
        pages = sequence.pages
        if not pages:
            return
        keys = page_keys(sequence, len(pages), self.page_size)
        self._touch(keys[-1:])
        if self._policy == "write_through_selective":
            self._waiting.update(
                (page, None) for page, key in zip(pages, keys) if page in self._tree and key not in self._entries
            )

    # --- everything ---

    def clear(self) -> None:
        """Remove all pages from the tier. The prefix tree keeps its pages."""
        self._waiting.clear()
        self._entries.clear()
        self._free = list(reversed(self._all))
        if self.storage is not None:
            moving = self.storage.clear()
            self._free = [page for page in self._free if page not in moving]

    def reset(self) -> None:
        """Remove all pages from the tier, and forget the tree's pages. Called when the KV cannot be trusted."""
        self.clear()
        self._tree.clear()
        self._kept = frozenset()

    def check(self, tree_pages: Iterable[int]) -> None:
        """Raise `ValueError` unless host pages balance, and the tier knows exactly the pages of the prefix tree."""
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
        """Return the entry of a page, or None if the tier does not have it."""
        return self._entries.get(key)

    def take_pages(self, count: int) -> list[int]:
        """Return up to `count` host pages for pages from storage; the least recently used pages leave."""
        pages: list[int] = []
        while len(pages) < count and (page := self._take_page()) is not None:
            pages.append(page)
        return pages

    def free_pages(self, pages: Iterable[int]) -> None:
        """Free host pages that hold nothing any more."""
        self._free += pages

    def loaded(self, key: bytes, page: int, parent: bytes | None, index: int) -> None:
        """Add a page that was read from storage. Its predecessors must be added after it."""
        self._entries[key] = Entry(page, parent, index)

    def touch(self, key: bytes) -> None:
        """Make a page and all pages before it the most recently used ones."""
        self._touch([key])

    @property
    def _pays(self) -> bool:
        """Whether copying a page takes less time than computing its tokens, as far as both are known."""
        return self.copy_s is None or self.compute_s is None or self.copy_s < self.compute_s

    def _num_present(self, sequence: Sequence, first: int, end: int) -> int:
        """Return how many pages of the sequence from index `first` up to `end` are in the tier, without a gap."""
        entries, size = self._entries, self.page_size
        for index in range(first, end):
            if page_keys(sequence, index + 1, size)[index] not in entries:
                return index - first
        return max(0, end - first)

    def _touch(self, keys: Iterable[bytes | None]) -> None:
        """Make these pages and all pages before them the most recently used ones."""
        entries, found = self._entries, dict[bytes, int]()
        for key in keys:
            while key is not None and key not in found and (entry := entries.get(key)) is not None:
                found[key] = entry.index
                key = entry.parent
        for key in sorted(found, key=found.__getitem__, reverse=True):
            entries.move_to_end(key)

    def _write(self, pages: list[tuple[int, _TreePage]]) -> None:
        """Copy pages of the device to the tier, unless it has them already.

        If the tier has too few pages, the first pages of the prefixes stay.
        """
        new = [(page, tree_page) for page, tree_page in pages if tree_page.key not in self._entries]
        if not new:
            return
        new.sort(key=lambda item: -item[1].index)
        self._touch([tree_page.parent for _, tree_page in new])
        sources: dict[int, int] = {}  # by host page: a page that is taken twice holds only the newer one
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
        """Return a free host page, if necessary the one of the least recently used page; None if all must stay."""
        if self._free:
            return self._free.pop()
        saving = () if self.storage is None else self.storage.saving
        key = next((key for key in self._entries if key not in self._kept and key not in saving), None)
        if key is None:
            return None
        self._num_evicted += 1
        return self._entries.pop(key).page
