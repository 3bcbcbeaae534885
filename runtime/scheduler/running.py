"""The sequences that hold slots and pages."""

from __future__ import annotations

from collections.abc import Iterator

from runtime.kv_cache.prefix_cache import PrefixCache
from runtime.scheduler.slots import SlotTables
from runtime.sequence import Sequence


class Running:
    """Running sequences in order of admission, each with a slot and with pages for what is computed.

    `full` is set when a waiting sequence did not fit, and cleared when somebody leaves: until then trying
    again would only cost time.
    """

    def __init__(self, num_slots: int, cache: PrefixCache, vocab_size: int) -> None:
        self.cache = cache
        self.tables = SlotTables(num_slots, vocab_size)
        self.full = False
        self._sequences: dict[Sequence, None] = {}  # an ordered set

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def enter(self, sequence: Sequence) -> None:
        """Start a sequence to which the cache already gave its shared prefix."""
        self.tables.enter(sequence)
        self._sequences[sequence] = None

    def leave(self, sequence: Sequence, *, trusted: bool = True) -> None:
        """Free slot and pages. What was computed stays in the prefix tree, unless it is not to be trusted."""
        del self._sequences[sequence]
        self.tables.leave(sequence)
        if trusted:
            self.cache.release(sequence)
        else:
            self.cache.discard(sequence)
        self.full = False

    def extend(self, sequence: Sequence, end: int) -> None:
        """Give a sequence pages for its first `end` tokens; the caller knows that they are available."""
        pages = sequence.pages
        have = len(pages)
        more = self.cache.allocate(-(-end // self.cache.page_size) - have)
        if more:
            pages += more
            self.tables.write_pages(sequence.slot, have, more)

    def reset(self) -> list[Sequence]:
        """Take slots and pages from everybody and forget all prefixes; returns who was running, in order."""
        sequences = list(self._sequences)
        for sequence in sequences:
            self.tables.leave(sequence)
        self._sequences.clear()
        self.cache.reset(sequences)
        self.full = False
        return sequences

    def check(self) -> None:
        """Raise `ValueError` unless slots and pages balance exactly."""
        sequences = list(self._sequences)
        self.tables.check(sequences)
        self.cache.check(sequences)
        for sequence in sequences:
            if len(sequence.pages) != -(-sequence.num_computed // self.cache.page_size):
                raise ValueError(f"{sequence!r} has {len(sequence.pages)} pages.")
