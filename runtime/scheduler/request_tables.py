"""The running sequences: their rows in the tables that every step reads, and their pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from runtime.batch import Ints
from runtime.constraint import SequenceConstraint
from runtime.kv_cache.prefix_cache import PrefixCache
from runtime.scheduler.sampling import SamplingTables
from runtime.sequence import Sequence


class RequestTables:
    """One row per running sequence, written when it enters, gathered by fancy indexing in every step.

    The page table grows in width as sequences do; entries behind a sequence's pages are 0.
    """

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self.sampling = SamplingTables(num_rows, vocab_size)
        self.sequences: list[Sequence | None] = [None] * num_rows
        self.pages: Ints = np.zeros((num_rows, 16), np.int32)
        self._values: dict[str, Ints] = {}  # of `Request.row_values`, for every row
        self._num_with_values = 0
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def enter(self, sequence: Sequence) -> None:
        """Give a sequence a row and fill it, its pages included."""
        index = sequence.sequence_index = self._free.pop()
        self.sequences[index] = sequence
        self.sampling.enter(sequence)
        self.write_pages(index, 0, sequence.pages)
        if sequence.request.row_values:
            self._num_with_values += 1
            for name, value in sequence.request.row_values.items():
                self._values.setdefault(name, np.zeros(len(self.sequences), np.int32))[index] = value

    def leave(self, sequence: Sequence) -> None:
        """Free the row and clear its part of the page table."""
        index = sequence.sequence_index
        self.sequences[index] = None
        self.sampling.leave(sequence)
        self.pages[index, : len(sequence.pages)] = 0
        if sequence.request.row_values:
            self._num_with_values -= 1
            for name in sequence.request.row_values:
                self._values[name][index] = 0
        self._free.append(index)
        sequence.sequence_index = -1

    def values_of(self, indices: Ints) -> dict[str, Ints]:
        """What layers are told of these rows, [B] each, by name: where a row says something that is not 0."""
        if not self._num_with_values:
            return {}
        found = {name: values[indices] for name, values in self._values.items()}
        return {name: values for name, values in found.items() if values.any()}

    def write_pages(self, index: int, first: int, pages: list[int]) -> None:
        """Set the page table's entries first .. first + len(pages) - 1 of a row."""
        end = first + len(pages)
        self._widen(end)
        self.pages[index, first:end] = pages

    def append_pages(self, sequences: list[Sequence], pages: list[int]) -> None:
        """Give each of these sequences one more page."""
        columns = []
        for sequence, page in zip(sequences, pages):
            own = sequence.pages
            columns.append(len(own))
            own.append(page)
        self._widen(max(columns, default=0) + 1)
        self.pages[[sequence.sequence_index for sequence in sequences], columns] = pages

    def check(self, running: list[Sequence]) -> None:
        """Raise `ValueError` unless exactly these sequences have rows and the page table is theirs."""
        indices = [sequence.sequence_index for sequence in running]
        if sorted(indices + self._free) != list(range(len(self.sequences))):
            raise ValueError("Rows are lost or taken twice.")
        expected: NDArray[np.int32] = np.zeros_like(self.pages)
        for sequence in running:
            expected[sequence.sequence_index, : len(sequence.pages)] = sequence.pages
            if self.sequences[sequence.sequence_index] is not sequence:
                raise ValueError(f"{sequence!r} is not in its row.")
        if not np.array_equal(expected, self.pages):
            raise ValueError("The page table does not list the pages of the running sequences.")

    def _widen(self, width: int) -> None:
        have = self.pages.shape[1]
        if width > have:
            wider = np.zeros((len(self.sequences), max(width, 2 * have)), np.int32)
            wider[:, :have] = self.pages
            self.pages = wider


class Running:
    """Running sequences in order of admission, each with a row in the tables and with pages for what is computed.

    `full` is set when a waiting sequence did not fit, and cleared when somebody leaves: until then trying
    again would only cost time.
    """

    def __init__(self, num_rows: int, cache: PrefixCache, vocab_size: int) -> None:
        self.cache = cache
        self.tables = RequestTables(num_rows, vocab_size)
        self._vocab_size = vocab_size
        self.full = False
        self.stalled: set[Sequence] = set()  # in no further step until their host data has come
        # Of those that have one, in order of admission.
        self.constrained: dict[Sequence, SequenceConstraint] = {}
        self._sequences: dict[Sequence, None] = {}  # an ordered set

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def enter(self, sequence: Sequence) -> None:
        """Start a sequence to which the cache already gave its shared prefix."""
        self.tables.enter(sequence)
        self._sequences[sequence] = None
        if sequence.constraint is not None:
            self.constrained[sequence] = sequence.constraint

    def leave(self, sequence: Sequence, *, trusted: bool = True) -> None:
        """Free row and pages. What was computed stays in the prefix tree, unless it is not to be trusted."""
        self.stalled.discard(sequence)
        self.constrained.pop(sequence, None)
        self.tables.leave(sequence)
        if trusted:
            self.cache.release(sequence)
        else:
            self.cache.discard(sequence)
        self.full = False
        del self._sequences[sequence]  # last: whatever breaks before, `rebuild` finds it

    def extend(self, sequence: Sequence, end: int) -> None:
        """Give a sequence pages for its first `end` tokens; the caller knows that they are available."""
        pages = sequence.pages
        have = len(pages)
        more = self.cache.allocate(-(-end // self.cache.page_size) - have)
        if more:
            pages += more
            self.tables.write_pages(sequence.sequence_index, have, more)

    def rewind(self, sequence: Sequence) -> None:
        """Compute its last known token again: host data was late, so its newest row yielded no token.

        The sequence is in no further step before that data has come, and before the steps in flight are over
        that were launched on the missing token: each of them is rewound in its turn.
        """
        if sequence.sequence_index < 0:  # retracted meanwhile
            return
        sequence.num_computed -= 1
        keep = -(-sequence.num_computed // self.cache.page_size)
        surplus = sequence.pages[keep:]
        if surplus:
            del sequence.pages[keep:]
            self.tables.write_pages(sequence.sequence_index, keep, [0] * len(surplus))
            self.cache.free(surplus)
        self.stalled.add(sequence)

    def resume(self) -> None:
        """Let those go on whose host data has come."""
        for sequence in list(self.stalled):
            if not sequence.num_pending and sequence.next_host_data.is_there:
                self.stalled.discard(sequence)

    def reset(self) -> list[Sequence]:
        """Take rows and pages from everybody and forget all prefixes; returns who was running, in order."""
        sequences = list(self._sequences)
        for sequence in sequences:
            self.tables.leave(sequence)
        self._sequences.clear()
        self.constrained.clear()
        self.stalled.clear()
        self.cache.reset(sequences)
        self.full = False
        return sequences

    def rebuild(self, sequences: Iterable[Sequence]) -> None:
        """As `reset`, but whatever the state: nothing is read of it, new tables are made.

        `sequences` are all that may hold rows or pages.
        """
        sequences = list(sequences)
        self.tables = RequestTables(len(self.tables.sequences), self._vocab_size)
        for sequence in sequences:
            sequence.sequence_index = -1
        self._sequences.clear()
        self.constrained.clear()
        self.stalled.clear()
        self.cache.reset(sequences)
        self.full = False

    def check(self) -> None:
        """Raise `ValueError` unless rows and pages balance exactly."""
        sequences = list(self._sequences)
        self.tables.check(sequences)
        self.cache.check(sequences)
        if list(self.constrained) != [sequence for sequence in sequences if sequence.constraint is not None]:
            raise ValueError("The constrained sequences are not those that run.")
        for sequence in sequences:
            if len(sequence.pages) != -(-sequence.num_computed // self.cache.page_size):
                raise ValueError(f"{sequence!r} has {len(sequence.pages)} pages.")
