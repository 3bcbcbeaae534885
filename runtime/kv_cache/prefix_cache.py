"""The pages of all sequences: the free list and the prefix tree behind one interface.

Every page is free, or held by exactly one sequence alone, or owned by the tree and shared. A sequence's page
list begins with tree pages (`num_shared` tokens of it, locked through `locked_node`) and continues with its own.

Why pages may change hands while steps are in flight: steps run one after the other, in the order in which
their batches were filled, and each batch carries its own copy of the page table.
- A page that is freed may still be written or read by steps already launched. Whoever gets it next
  writes it in a batch filled later, hence after them, and reads only what it wrote itself.
- A page enters the tree when the step that writes it has been filled, so any batch that finds it there runs
  in the same step (all KV of a step is stored before any row attends) or later.
- Nobody writes a page after it entered the tree: only whole pages of tokens known on the host enter, and a
  step in flight that overruns the end of a sequence writes positions behind these.
- When a sequence computed what the tree already has, its list switches to the tree's pages, which this
  step writes at the latest. Its own pages go back only after the batch that writes them is complete
  (`Duplicates`), so that no other row of the same batch can get them.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from runtime.batch import Batch
from runtime.kv_cache.kinds import CacheKind
from runtime.kv_cache.page_events import PageEvents
from runtime.kv_cache.pages import PagePool
from runtime.kv_cache.radix_tree import Node, RadixTree, path_pages
from runtime.sequence import Sequence


class Duplicates(NamedTuple):
    """Pages that a sequence no longer needs because the tree has the same tokens; still to be freed."""

    first: int  # index in the sequence's page list, which already names the tree's pages
    pages: list[int]


class PrefixCache:
    """Allocates, shares and frees the pages of sequences. Without `enabled` nothing is shared or kept.

    `kinds` are the caches that layers have beside these pages; they hear of everything that happens to a page.
    `events` notes what enters the tree and leaves it.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        enabled: bool = True,
        kinds: Iterable[CacheKind] = (),
        events: PageEvents | None = None,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"A page holds at least one token, not {page_size}.")
        self.page_size = page_size
        self.enabled = enabled
        self.kinds = tuple(kinds)
        self.events = events
        self._pool = PagePool(num_pages)
        self._tree = RadixTree(page_size)

    @property
    def num_pages(self) -> int:
        """Free and held pages together."""
        return self._pool.total

    @property
    def num_tokens(self) -> int:
        """Tokens that fit into all pages."""
        return self._pool.total * self.page_size

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_evictable(self) -> int:
        """Pages kept only in case their prefix comes again."""
        return self._tree.num_evictable

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can hand out."""
        available = self._pool.num_free + self._tree.num_evictable
        for kind in self.kinds:
            limit = kind.num_available
            if limit is not None and limit < available:
                available = limit
        return available

    @property
    def num_used(self) -> int:
        """Pages that running sequences hold."""
        return self._pool.total - self._pool.num_free - self._tree.num_evictable

    def demand(self, growing: Iterable[tuple[Sequence, int]]) -> list[int]:
        """What sequences take while each grows by so many pages: of the pages, and of what each kind hands out."""
        growing = list(growing)
        return [
            sum(pages for _, pages in growing),
            *(sum(kind.pages_ahead(*each) for each in growing) for kind in self.kinds),
        ]

    def has_room(self, *demands: Seq[int]) -> bool:
        """Whether all these demands can be met together."""
        limits = [
            self._pool.num_free + self._tree.num_evictable,
            *(kind.num_available for kind in self.kinds),
        ]
        wanted = map(sum, zip(*demands, strict=True))
        return all(limit is None or each <= limit for each, limit in zip(wanted, limits, strict=True))

    def match_length(self, sequence: Sequence) -> int:
        """How many of the sequence's tokens would be found; changes nothing."""
        if self.kinds:
            return self._resumable_tokens(sequence)
        return self._tree.match_length(sequence.ids, reusable_tokens(sequence), sequence.namespace)

    def path(self, sequence: Sequence) -> list[Node]:
        """The nodes of the tree along which the sequence's tokens would be found; changes nothing."""
        return self._tree.path(sequence.ids, reusable_tokens(sequence), sequence.namespace)

    def outline(self, limit: int) -> tuple[list[tuple[int, int, int]], int]:
        """The shape of the prefix tree; see `RadixTree.outline`."""
        return self._tree.outline(limit)

    def lock(self, sequence: Sequence) -> None:
        """Give a sequence without pages the longest known prefix of its ids, and lock it in the tree."""
        if self.enabled:
            limit = self._resumable_tokens(sequence) if self.kinds else reusable_tokens(sequence)
            node, pages = self._tree.lock(sequence.ids, limit, sequence.namespace)
            sequence.locked_node = node
            sequence.pages = pages
            sequence.num_computed = sequence.num_shared = len(pages) * self.page_size
        for kind in self.kinds:
            kind.enter(sequence)

    def _resumable_tokens(self, sequence: Sequence) -> int:
        """How many leading tokens are found behind which all kinds of caches can go on."""
        pages = self._tree.pages(sequence.ids, reusable_tokens(sequence), sequence.namespace)
        count = -1
        while count != len(pages):  # where one kind cannot go on, another may be unable to go on before it
            count = len(pages)
            for kind in self.kinds:
                del pages[kind.resumable(pages, len(pages)) :]
        return count * self.page_size

    def allocate(self, count: int) -> list[int]:
        """Pages for the caller alone, emptying the tree from its least recently used end when too few are free.

        Raises `ValueError` when `count` exceeds `num_available`.
        """
        missing = count - self._pool.num_free
        if missing > 0:
            self._free_shared(self._tree.evict(missing))
        pages = self._pool.allocate(count)
        for kind in self.kinds:
            kind.allocate(pages)
        return pages

    def free(self, pages: list[int]) -> None:
        """Return pages that no sequence lists any more."""
        self._pool.free(pages)
        for kind in self.kinds:
            kind.free(pages)

    def _free_shared(self, pages: list[int]) -> None:
        """Free pages that were in the tree."""
        if self.events is not None:
            self.events.removed(pages)
        self.free(pages)

    def replaced(self, sequence: Sequence, duplicates: Duplicates) -> None:
        """Free what `insert` replaced: the batch that writes it is complete, and no other row may get it before."""
        first, pages = duplicates
        for kind in self.kinds:
            kind.replace(sequence, first, pages, sequence.pages[first : first + len(pages)])
        self.free(pages)

    def insert(self, sequence: Sequence) -> Duplicates | None:
        """Enter the known and computed whole pages of a sequence into the tree, to be found at once.

        With a constraint, the last known token may be computed again: its page is not entered.
        """
        if not self.enabled:
            return None
        shared = sequence.num_shared
        size = self.page_size
        num_known = len(sequence.ids) - (sequence.constraint is not None)
        end = min(sequence.num_computed, num_known) // size * size
        if end <= shared:
            return None
        first, last = shared // size, end // size
        own = sequence.pages[first:last]
        sequence.locked_node, known = self._tree.insert(sequence.locked_node, sequence.ids[shared:end], own)
        sequence.num_shared = end
        if self.events is not None and len(known) < len(own):
            at = first + len(known)
            before = None if not at else known[-1] if known else sequence.pages[at - 1]
            ids = sequence.ids[at * size : end]
            self.events.stored(own[len(known) :], ids, before, sequence.namespace)
        if not known:
            return None
        sequence.pages[first : first + len(known)] = known
        return Duplicates(first, own[: len(known)])

    def filled(self, batch: Batch) -> None:
        """A batch is complete: kinds of caches may give up what nobody needs behind it."""
        size, starts = self.page_size, batch.starts
        crossing = np.nonzero((starts + batch.counts) // size > starts // size)[0].tolist()
        for kind in self.kinds:
            kind.filled([batch.sequences[row] for row in crossing])

    def release(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Take all pages from a sequence; with `keep`, what it computed can be found while there is room."""
        if keep:
            duplicates = self.insert(sequence)
            if duplicates is not None:
                self.replaced(sequence, duplicates)
        for kind in self.kinds:
            kind.leave(sequence)
        self.free(sequence.pages[sequence.num_shared // self.page_size :])
        if sequence.locked_node is not None:
            self._tree.unlock(sequence.locked_node)
        _forget_pages(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Take all pages from a sequence with untrusted KV, out of the tree too where nobody shares them."""
        for kind in self.kinds:
            kind.leave(sequence)
        self.free(sequence.pages[sequence.num_shared // self.page_size :])
        if sequence.locked_node is not None:
            self._free_shared(self._tree.remove(sequence.locked_node))
        _forget_pages(sequence)

    def empty(self) -> None:
        """Forget every prefix that no running sequence holds."""
        pages = self._tree.evict(self._tree.num_evictable)
        if self.events is not None and not self._tree.num_pages:
            self.events.cleared()
            self.free(pages)
        else:
            self._free_shared(pages)

    def reset(self, sequences: Iterable[Sequence]) -> None:
        """Forget everything, whatever the state; `sequences` are all that may hold pages, and lose them."""
        for sequence in sequences:
            _forget_pages(sequence)
        self._tree.clear()
        if self.events is not None:
            self.events.cleared()
        self._pool.reset()
        for kind in self.kinds:
            kind.reset()

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise `ValueError` unless every page and lock is accounted for by the tree and these sequences."""
        own: list[int] = []
        holders: list[Node] = []
        sequences = list(sequences)
        for sequence in sequences:
            first = sequence.num_shared // self.page_size
            own += sequence.pages[first:]
            if sequence.locked_node is not None:
                holders.append(sequence.locked_node)
                if path_pages(sequence.locked_node) != sequence.pages[:first]:
                    raise ValueError(f"{sequence!r} does not list the pages that it shares.")
            elif first:
                raise ValueError(f"{sequence!r} shares pages without a lock.")
        kept = self._tree.check(holders)
        self._pool.check(own + kept)
        for kind in self.kinds:
            kind.check(sequences, kept)


def reusable_tokens(sequence: Sequence) -> int:
    """How many leading tokens need not be computed again, if they are found.

    At least the last known token is computed, for its logits; so is every prompt position whose logprobs are
    still to be asked for.
    """
    limit = len(sequence.ids) - 1
    if sequence.next_logprob < sequence.num_prompt - 1:
        return min(limit, sequence.next_logprob)
    return limit


def _forget_pages(sequence: Sequence) -> None:
    sequence.pages = []
    sequence.locked_node = None
    sequence.num_shared = sequence.num_computed = 0
