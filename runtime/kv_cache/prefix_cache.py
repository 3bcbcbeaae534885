"""The pages of all sequences: one interface to the free list and the prefix tree.

A page is either free, or private to one sequence, or owned by the tree, where it can be shared. A sequence's page list
begins with tree pages (`num_shared` tokens, locked by `locked_node`). Private pages follow.

Pages may change owners while steps are in flight, because steps run in the order in which their batches are built, and
each batch has its own copy of the page table:
- Launched steps may still read or write a freed page. The page's next owner writes the page in a later batch, which
  runs after these steps, and only reads what it has written itself.
- A page enters the tree when the batch that writes it is built. A batch that matches the page belongs to the same step
  or to a later one. Within a step, all KV is stored before any row attends.
- A page in the tree is never written again. Only full pages of tokens that the host knows enter the tree. A step in
  flight that overruns the end of a sequence writes only later positions.
- If the tree already contains tokens that a sequence computed, the sequence's page list switches to the tree's pages.
  The current step or an earlier one writes these pages. The sequence's own pages for these tokens (`Duplicates`) are
  freed when the batch that writes them is complete, so no other row of this batch can get them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Set
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from runtime.batch import Batch, PageCopy
from runtime.kv_cache.copy_queue import CopyQueue
from runtime.kv_cache.host_pool import HostPool
from runtime.kv_cache.host_tier import HostTier
from runtime.kv_cache.kinds import CacheKind
from runtime.kv_cache.page_events import PageEvents
from runtime.kv_cache.pages import PagePool
from runtime.kv_cache.pins import Pins
from runtime.kv_cache.radix_tree import Node, RadixTree, path_pages
from runtime.kv_cache.storage_tier import StorageTier
from runtime.sequence import Sequence

NONE_HELD: Set[Sequence] = frozenset()
_EVENT_BITS = 2**63 - 1


class Duplicates(NamedTuple):
    """Private pages of a sequence that were replaced by tree pages. `PrefixCache.replaced` frees them."""

    first: int  # index in the sequence's page list of the first replaced page
    pages: list[int]


class PrefixCache:
    """Allocates, shares and frees the pages of sequences. If not `enabled`, pages are neither shared nor kept.

    `kinds` are the layers' caches other than KV pages. They are told of every change of a page's owner. `events`
    records the pages that enter and leave the tree. With `num_host_pages`, retracted sequences are swapped out to host
    memory. With `num_tier_pages`, host memory also keeps copies of tree pages (`HostTier`); their page ids begin at
    `num_host_pages`. Both options copy only KV pages, so they cannot be combined with `kinds`.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        enabled: bool = True,
        kinds: Iterable[CacheKind] = (),
        events: PageEvents | None = None,
        num_host_pages: int = 0,
        num_tier_pages: int = 0,
        write_policy: str = "write_through",
        step_pages: int = 64,
        num_pinnable: int = 0,
    ) -> None:
        """Create an empty cache. `num_pinnable` is the maximum number of pages that `pin` protects."""
        if page_size < 1:
            raise ValueError(f"The page size must be at least 1, not {page_size}.")
        self.page_size = page_size
        self.enabled = enabled
        self.kinds = tuple(kinds)
        self.events = events
        self._pool = PagePool(num_pages)
        self._tree = RadixTree(page_size)
        self.pins = Pins(self._tree, num_pinnable)
        if (num_host_pages or num_tier_pages) and self.kinds:
            raise ValueError("Sequences that have other caches than KV pages cannot be copied to the host.")
        self.copies = CopyQueue()
        self.host = HostPool(num_host_pages, page_size, self.copies) if num_host_pages else None
        self.tier: HostTier | None = None
        self.storage: StorageTier | None = None  # moves pages between the host tier and a store
        if num_tier_pages and enabled:
            self.tier = HostTier(
                num_tier_pages,
                page_size,
                self.copies,
                first_page=num_host_pages,
                policy=write_policy,
                step_pages=step_pages,
            )

    @property
    def num_pages(self) -> int:
        """Total number of pages."""
        return self._pool.total

    @property
    def num_tokens(self) -> int:
        """Number of tokens that fit into the cache."""
        return self._pool.total * self.page_size

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_evictable(self) -> int:
        """Number of tree pages that no running sequence uses."""
        return self._tree.num_evictable

    def usage(self, kind: str) -> float:
        """Return the share of a kind's units that running sequences use, or 0 if the model has no such kind."""
        used = next((each for each in self.kinds if each.name == kind), None)
        if used is None or used.num_available is None or not used.count:
            return 0.0
        return 1 - used.num_available / used.count

    @property
    def num_available(self) -> int:
        """Maximum number of pages that `allocate` can return now."""
        available = self._pool.num_free + self._tree.num_evictable
        for kind in self.kinds:
            limit = kind.num_available
            if limit is not None and limit < available:
                available = limit
        return available

    @property
    def num_used(self) -> int:
        """Number of pages that running sequences use. Tree pages that only the cache keeps do not count."""
        return self._pool.total - self._pool.num_free - self._tree.num_evictable

    def demand(self, growing: Iterable[tuple[Sequence, int]]) -> list[int]:
        """Return what sequences need to grow by the given numbers of pages.

        The first element is the number of pages. The following elements are the numbers of units of each kind.
        """
        growing = list(growing)
        return [
            sum(pages for _, pages in growing),
            *(sum(kind.pages_ahead(*item) for item in growing) for kind in self.kinds),
        ]

    def can_allocate(self, *demands: Seq[int]) -> bool:
        """Return whether the cache can satisfy all these demands (see `demand`) at the same time."""
        limits = [
            self._pool.num_free + self._tree.num_evictable,
            *(kind.num_available for kind in self.kinds),
        ]
        totals = map(sum, zip(*demands, strict=True))
        return all(limit is None or total <= limit for total, limit in zip(totals, limits, strict=True))

    def match_length(self, sequence: Sequence) -> int:
        """Return how many leading tokens of the sequence are cached. Does not change the cache."""
        if self.kinds:
            return self._resumable_tokens(sequence)
        return self._tree.match_length(sequence.keys, reusable_tokens(sequence), sequence.namespace)

    def num_cached(self, sequence: Sequence) -> int:
        """Return how many leading tokens are cached on the device or in the host tier. Does not change the cache."""
        num_tokens = self.match_length(sequence)
        if self.tier is None:
            return num_tokens
        first, end = num_tokens // self.page_size, reusable_tokens(sequence) // self.page_size
        return num_tokens + self.tier.num_present(sequence, first, end) * self.page_size

    def path(self, sequence: Sequence) -> list[Node]:
        """Return the tree nodes that match the sequence's tokens. Does not change the tree."""
        return self._tree.path(sequence.keys, reusable_tokens(sequence), sequence.namespace)

    def outline(self, limit: int) -> tuple[list[tuple[int, int, int]], int]:
        """Return the shape of the prefix tree, with at most `limit` nodes; see `RadixTree.outline`."""
        return self._tree.outline(limit)

    def outline_ids(self, limit: int, num_ids: int) -> list[list[int]]:
        """Return the first keys of each node of the prefix tree; see `RadixTree.outline_ids`."""
        return self._tree.outline_ids(limit, num_ids)

    def touch(self, ids: list[int], namespace: Hashable) -> int:
        """Mark the cached prefix of these tokens as most recently used. Return its number of tokens."""
        if not self.enabled:
            return 0
        node, pages = self._tree.lock(ids, len(ids), namespace)
        self._tree.unlock(node)
        return len(pages) * self.page_size

    def pin(self, sequence: Sequence) -> None:
        """Pin the cached part of a sequence's prompt, if its request asks for this."""
        request = sequence.request
        if request.service.pin is None or not self.enabled or not self.pins.max_pages:
            return
        node, pages = self._tree.lock(sequence.keys, sequence.num_prompt, sequence.namespace)
        self._tree.unlock(node)
        self.pins.add(request.owner, request.service.pin, node, len(pages))

    def lock(self, sequence: Sequence) -> None:
        """Give the longest cached prefix to a sequence without pages, and lock this prefix in the tree."""
        if self.enabled:
            limit = self._resumable_tokens(sequence) if self.kinds else reusable_tokens(sequence)
            node, pages = self._tree.lock(sequence.keys, limit, sequence.namespace)
            sequence.locked_node = node
            sequence.pages = pages
            sequence.num_computed = sequence.num_shared = len(pages) * self.page_size
        for kind in self.kinds:
            kind.enter(sequence)

    def swap_out(self, sequence: Sequence) -> None:
        """Copy the computed pages of a running sequence to the host, before the sequence is retracted.

        Its tree pages are copied too, because the tree may evict them before the sequence runs again.
        """
        if self.host is not None:
            self.host.swap_out(sequence, min(sequence.num_computed, _num_settled(sequence)))

    def num_restorable(self, sequence: Sequence) -> int:
        """Return how many tokens of a sequence will have KV after `restore`.

        The sequence must already hold its cached prefix (see `lock`).
        """
        limit, num_tokens = reusable_tokens(sequence), sequence.num_computed
        if self.host is not None:
            num_tokens = self.host.num_restorable(sequence, limit)
        if self.tier is not None:
            num_tokens = max(num_tokens, self.tier.num_restorable(sequence, limit))
        return num_tokens

    def restore(self, sequence: Sequence) -> None:
        """Copy the sequence's pages back from the host. Does nothing if it has none there.

        The sequence must hold its cached prefix (see `lock`). Raises `ValueError` if the pages exceed `num_available`.
        """
        if self.host is not None:
            self._swap_in(sequence, self.host)
        if self.tier is None:
            return
        num_tokens = self.tier.num_restorable(sequence, reusable_tokens(sequence))
        if num_tokens > sequence.num_computed:
            end = num_tokens // self.page_size
            host_pages = self.tier.keep(sequence, end)
            pages = self.allocate(len(host_pages))
            self.tier.restored(host_pages, pages)
            sequence.pages += pages
            sequence.num_computed = num_tokens
        self.tier.used(sequence)

    def _swap_in(self, sequence: Sequence, host: HostPool) -> None:
        limit = reusable_tokens(sequence)
        num_tokens = host.num_restorable(sequence, limit)
        from_tier = 0 if self.tier is None else self.tier.num_restorable(sequence, limit)
        if num_tokens > max(sequence.num_computed, from_tier):
            pages = self.allocate(-(-num_tokens // self.page_size) - len(sequence.pages))
            host.swap_in(sequence, pages)
            sequence.pages += pages
            sequence.num_computed = num_tokens
        else:
            host.forget(sequence)

    def forget_swapped(self, sequence: Sequence) -> None:
        """Free the host pages of a waiting sequence that has ended."""
        if self.host is not None:
            self.host.forget(sequence)

    def take_copies(self) -> tuple[PageCopy, ...]:
        """Return and clear the page copies that must be part of the next batch."""
        return self.copies.take()

    def want(self, sequence: Sequence) -> None:
        """Look up in the page store the pages of a waiting sequence that are neither on the device nor on the host."""
        if self.storage is not None and self.storage.attached:
            num_pages = self.match_length(sequence) // self.page_size
            self.storage.want(sequence, num_pages, reusable_tokens(sequence))

    @property
    def held(self) -> Set[Sequence]:
        """Waiting sequences that must not be admitted yet, because their pages are being loaded from the page store."""
        return NONE_HELD if self.storage is None else self.storage.held

    def begin_step(self) -> None:
        """Called before the rows of a batch are chosen."""
        if self.tier is not None:
            self.tier.begin_step()

    def _resumable_tokens(self, sequence: Sequence) -> int:
        """Return the number of tokens in the longest cached prefix after which every kind can resume."""
        pages = self._tree.pages(sequence.keys, reusable_tokens(sequence), sequence.namespace)
        count = -1
        while count != len(pages):  # if one kind shortens the prefix, all kinds must check the shorter one
            count = len(pages)
            for kind in self.kinds:
                del pages[kind.resumable(pages, len(pages)) :]
        return count * self.page_size

    def allocate(self, count: int) -> list[int]:
        """Allocate private pages. If too few are free, evict the least recently used pages of the tree.

        Raises `ValueError` if `count` exceeds `num_available`.
        """
        missing = count - self._pool.num_free
        if missing > 0:
            pages = self._tree.evict(missing)
            self.pins.settle()
            if self.tier is not None:
                self.tier.evicted(pages)
            self._free_shared(pages)
        pages = self._pool.allocate(count)
        for kind in self.kinds:
            kind.allocate(pages)
        return pages

    def free(self, pages: list[int]) -> None:
        """Free pages that are in no sequence's page list."""
        self._pool.free(pages)
        for kind in self.kinds:
            kind.free(pages)

    def _free_shared(self, pages: list[int]) -> None:
        """Free pages that were removed from the tree."""
        if self.events is not None:
            self.events.removed(pages)
        self.free(pages)

    def replaced(self, sequence: Sequence, duplicates: Duplicates) -> None:
        """Free the pages that `insert` replaced. Call it when the batch that writes these pages is complete."""
        first, pages = duplicates
        for kind in self.kinds:
            kind.replace(sequence, first, pages, sequence.pages[first : first + len(pages)])
        self.free(pages)

    def insert(self, sequence: Sequence) -> Duplicates | None:
        """Insert the full computed pages of a sequence into the tree, where other sequences can match them immediately.

        If the sequence has a constraint, its last token may be computed again, so the page with this token is not
        inserted. If the tree already had some of the pages, the sequence's own copies are returned; the caller frees
        them with `replaced`.
        """
        if not self.enabled:
            return None
        shared = sequence.num_shared
        size = self.page_size
        end = min(sequence.num_computed, _num_settled(sequence)) // size * size
        if end <= shared:
            return None
        first, last = shared // size, end // size
        private = sequence.pages[first:last]
        sequence.locked_node, known = self._tree.insert(sequence.locked_node, sequence.keys[shared:end], private)
        sequence.num_shared = end
        if self.events is not None and len(known) < len(private):
            index = first + len(known)
            parent = None if not index else known[-1] if known else sequence.pages[index - 1]
            # The keys of media tokens are truncated to the bits that events can hold.
            ids = [key & _EVENT_BITS for key in sequence.keys[index * size : end]]
            self.events.stored(private[len(known) :], ids, parent, sequence.namespace)
        if self.tier is not None and len(known) < len(private):
            self.tier.added(sequence, first + len(known), private[len(known) :])
        if not known:
            return None
        sequence.pages[first : first + len(known)] = known
        return Duplicates(first, private[: len(known)])

    def filled(self, batch: Batch) -> None:
        """Notify the kinds that a batch is complete. They free the units that no batch built later reads."""
        size, starts = self.page_size, batch.starts
        is_crossing = (starts + batch.counts) // size > starts // size
        if batch.unknown_starts is not None:
            is_crossing |= batch.unknown_starts
        crossing = np.nonzero(is_crossing)[0].tolist()
        for kind in self.kinds:
            kind.filled([batch.sequences[row] for row in crossing])

    def release(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Take all pages from a sequence.

        With `keep`, its full computed pages stay in the tree until they are evicted.
        """
        if keep:
            duplicates = self.insert(sequence)
            if duplicates is not None:
                self.replaced(sequence, duplicates)
        for kind in self.kinds:
            kind.leave(sequence)
        self.free(self._private_pages(sequence))
        if sequence.locked_node is not None:
            self._tree.unlock(sequence.locked_node)
        _forget_pages(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Take all pages from a sequence whose KV may be wrong.

        Its tree pages are removed from the tree, unless another prefix or sequence uses them.
        """
        for kind in self.kinds:
            kind.leave(sequence)
        self.free(self._private_pages(sequence))
        if sequence.locked_node is not None:
            pages = self._tree.remove(sequence.locked_node)
            self.pins.settle()
            if self.tier is not None:
                self.tier.discarded(pages)
            self._free_shared(pages)
        _forget_pages(sequence)

    def empty(self) -> None:
        """Evict all prefixes that no running sequence uses, from the device and from the host tier."""
        self.pins.clear()
        pages = self._tree.evict(self._tree.num_evictable)
        if self.tier is not None:
            self.tier.discarded(pages)
            self.tier.clear()
        if self.events is not None and not self._tree.num_pages:
            self.events.cleared()
            self.free(pages)
        else:
            self._free_shared(pages)

    def reset(self, sequences: Iterable[Sequence]) -> None:
        """Empty the cache, even if its state is inconsistent.

        `sequences` must contain every sequence that may have pages. All of them lose their pages.
        """
        for sequence in sequences:
            _forget_pages(sequence)
        self.pins.clear()
        self._tree.clear()
        if self.events is not None:
            self.events.cleared()
        self._pool.reset()
        for kind in self.kinds:
            kind.reset()
        self.copies.clear()
        if self.host is not None:
            self.host.reset()
        if self.tier is not None:
            self.tier.reset()

    def _private_pages(self, sequence: Sequence) -> list[int]:
        """Return the pages of a sequence and of its branches that are not in the tree."""
        pages = sequence.pages[sequence.num_shared // self.page_size :]
        for branch in sequence.branches:
            pages += branch.pages
        return pages

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise `ValueError` unless every page and every lock belongs to the tree or to one of these sequences."""
        private: list[int] = []
        holders: list[Node] = []
        sequences = list(sequences)
        for sequence in sequences:
            first = sequence.num_shared // self.page_size
            private += self._private_pages(sequence)
            if sequence.locked_node is not None:
                holders.append(sequence.locked_node)
                if path_pages(sequence.locked_node) != sequence.pages[:first]:
                    raise ValueError(f"{sequence!r} does not list the pages of its locked node.")
            elif first:
                raise ValueError(f"{sequence!r} lists shared pages without a lock.")
        tree_pages = self._tree.check(holders)
        self.pins.check()
        self._pool.check(private + tree_pages)
        for kind in self.kinds:
            kind.check(sequences, tree_pages)
        if self.host is not None:
            self.host.check(sequences)
        if self.tier is not None:
            self.tier.check(tree_pages)


def reusable_tokens(sequence: Sequence) -> int:
    """Return how many leading tokens of a sequence may come from the cache.

    The last known token is always computed, because its logits are needed. The cache also ends before prompt positions
    whose log-probabilities, hidden states or experts are requested.
    """
    limit = len(sequence.ids) - 1
    for part in sequence.parts or ():
        if part is not None:
            limit = min(limit, part.end)
    if sequence.next_logprob < sequence.num_prompt - 1:
        return min(limit, sequence.next_logprob)
    return limit


def _num_settled(sequence: Sequence) -> int:
    """Return how many known tokens will not be recomputed: with a constraint, all but the last; otherwise all."""
    return len(sequence.ids) - (sequence.constraint is not None)


def _forget_pages(sequence: Sequence) -> None:
    sequence.pages = []
    sequence.branches.clear()
    sequence.locked_node = None
    sequence.num_shared = sequence.num_computed = 0
