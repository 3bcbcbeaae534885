"""The running sequences, and the tables that every step reads: their pages, parameters and row values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from runtime.batch import ADAPTER, SECOND_START, Ints
from runtime.constraint import SequenceConstraint
from runtime.kv_cache.prefix_cache import PrefixCache
from runtime.request import Request
from runtime.scheduler.adapter_slots import AdapterSlots
from runtime.scheduler.owner_shares import OwnerShares
from runtime.scheduler.sampling import SamplingTables
from runtime.sequence import Sequence


class RequestTables:
    """Tables with one row per running sequence.

    `enter` writes a sequence's row, and every step gathers its rows by index. The page table grows to the width that
    the longest sequence needs. Entries after a sequence's last page are 0.
    """

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self.sampling = SamplingTables(num_rows, vocab_size)
        self.sequences: list[Sequence | None] = [None] * num_rows
        self.pages: Ints = np.zeros((num_rows, 16), np.int32)
        self._values: dict[str, Ints] = {}  # name -> `Request.row_values` of every row
        self._num_with_values = 0
        self.num_with_axes = 0  # number of running sequences whose positions have three axes (M-RoPE)
        self.num_with_parts = 0  # number of running sequences that return hidden states or experts
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def enter(self, sequence: Sequence, adapter_slot: int = 0) -> None:
        """Assign a table row to a sequence, and write its parameters, pages and row values."""
        index = sequence.sequence_index = self._free.pop()
        self.sequences[index] = sequence
        self.sampling.enter(sequence)
        self.write_pages(index, 0, sequence.pages)
        self.num_with_axes += _has_axes(sequence)
        self.num_with_parts += sequence.request.returns_parts
        values = _row_values(sequence.request, adapter_slot)
        if values:
            self._num_with_values += 1
            for name, value in values.items():
                self._values.setdefault(name, np.zeros(len(self.sequences), np.int32))[index] = value

    def leave(self, sequence: Sequence) -> None:
        """Free a sequence's table row, and clear its entries in the page table."""
        index = sequence.sequence_index
        self.sequences[index] = None
        self.sampling.leave(sequence)
        self.pages[index, : len(sequence.pages)] = 0
        self.num_with_axes -= _has_axes(sequence)
        self.num_with_parts -= sequence.request.returns_parts
        values = _row_values(sequence.request)
        if values:
            self._num_with_values -= 1
            for name in values:
                self._values[name][index] = 0
        self._free.append(index)
        sequence.sequence_index = -1

    def values_of(self, indices: Ints) -> dict[str, Ints]:
        """Return the row values at these indices, an array [B] by name. Names with only zeros are omitted."""
        if not self._num_with_values:
            return {}
        gathered = {name: values[indices] for name, values in self._values.items()}
        return {name: values for name, values in gathered.items() if values.any()}

    def write_pages(self, index: int, first: int, pages: list[int]) -> None:
        """Set entries first .. first + len(pages) - 1 of a row of the page table."""
        end = first + len(pages)
        self._widen(end)
        self.pages[index, first:end] = pages

    def append_pages(self, sequences: list[Sequence], pages: list[int]) -> None:
        """Append `pages[i]` to `sequences[i]`."""
        columns = []
        for sequence, page in zip(sequences, pages):
            columns.append(len(sequence.pages))
            sequence.pages.append(page)
        self._widen(max(columns, default=0) + 1)
        self.pages[[sequence.sequence_index for sequence in sequences], columns] = pages

    def check(self, running: list[Sequence]) -> None:
        """Raise `ValueError` unless exactly these sequences have rows and the page table lists exactly their pages."""
        indices = [sequence.sequence_index for sequence in running]
        if sorted(indices + self._free) != list(range(len(self.sequences))):
            raise ValueError("Rows are lost or assigned twice.")
        expected: NDArray[np.int32] = np.zeros_like(self.pages)
        for sequence in running:
            expected[sequence.sequence_index, : len(sequence.pages)] = sequence.pages
            if self.sequences[sequence.sequence_index] is not sequence:
                raise ValueError(f"{sequence!r} is not at its sequence index.")
        if not np.array_equal(expected, self.pages):
            raise ValueError("The page table does not list the pages of the running sequences.")

    def _widen(self, width: int) -> None:
        old = self.pages.shape[1]
        if width > old:
            wider = np.zeros((len(self.sequences), max(width, 2 * old)), np.int32)
            wider[:, :old] = self.pages
            self.pages = wider


def _has_axes(sequence: Sequence) -> bool:
    return sequence.media is not None and sequence.media.offsets is not None


def _row_values(request: Request, adapter_slot: int = 0) -> Mapping[str, int]:
    """Return the row values of a request, by name. Includes `adapter_slot` if the request has an adapter."""
    if request.second_start is None and request.adapter is None:
        return request.row_values
    second = {} if request.second_start is None else {SECOND_START: request.second_start}
    adapter = {} if request.adapter is None else {ADAPTER: adapter_slot}
    return {**request.row_values, **second, **adapter}


class Running:
    """The running sequences in order of admission. Each one has a row in the tables, and pages for its computed tokens.

    `full` is set when a waiting sequence does not fit, and cleared when a running sequence leaves. While it is set, no
    admission is tried.
    """

    def __init__(
        self, num_rows: int, cache: PrefixCache, vocab_size: int, adapters: AdapterSlots, owners: OwnerShares
    ) -> None:
        self.cache = cache
        self.adapters = adapters
        self.tables = RequestTables(num_rows, vocab_size)
        self._vocab_size = vocab_size
        self.full = False
        self.stalled: set[Sequence] = set()  # sequences that get no row until their `HostData` arrives
        self.on_resume: Callable[[Sequence], object] | None = None  # called with each resumed sequence
        # Constraints of the running sequences that have one, in order of admission.
        self.constrained: dict[Sequence, SequenceConstraint] = {}
        self.owners = owners
        self._sequences: dict[Sequence, None] = {}  # an ordered set

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def enter(self, sequence: Sequence) -> None:
        """Start a sequence that already holds the pages of its cached prefix."""
        self.tables.enter(sequence, self.adapters.enter(sequence))
        self._sequences[sequence] = None
        self.owners.enter(sequence.request.owner)
        if sequence.constraint is not None:
            self.constrained[sequence] = sequence.constraint

    def leave(self, sequence: Sequence, *, trusted: bool = True) -> None:
        """Free a sequence's row and pages. With `trusted`, its computed pages are kept in the prefix tree."""
        self.stalled.discard(sequence)
        self.constrained.pop(sequence, None)
        self.tables.leave(sequence)
        self.adapters.leave(sequence)
        if trusted:
            self.cache.release(sequence)
        else:
            self.cache.discard(sequence)
        self.full = False
        self.owners.leave(sequence.request.owner)
        # Last, so that `rebuild` still finds the sequence if an exception was raised before.
        del self._sequences[sequence]

    def extend(self, sequence: Sequence, end: int) -> None:
        """Allocate pages for the first `end` tokens of a sequence.

        The caller must have checked that enough pages are available.
        """
        pages = sequence.pages
        first = len(pages)
        more = self.cache.allocate(-(-end // self.cache.page_size) - first)
        if more:
            pages += more
            self.tables.write_pages(sequence.sequence_index, first, more)

    def rewind(self, sequence: Sequence, count: int = 1) -> None:
        """Mark the last `count` computed positions as not computed.

        Later steps compute these positions again, perhaps with other tokens. Pages without a computed position are
        freed immediately. Steps in flight may still write to the freed pages; this is safe, because these steps run
        before any step that uses the pages for another sequence.
        """
        if sequence.sequence_index < 0 or not count:  # a negative index: retracted while its step was in flight
            return
        sequence.num_computed -= count
        keep = -(-sequence.num_computed // self.cache.page_size)
        surplus = sequence.pages[keep:]
        if surplus:
            del sequence.pages[keep:]
            self.tables.write_pages(sequence.sequence_index, keep, [0] * len(surplus))
            self.cache.free(surplus)

    def take_branch(self, sequence: Sequence, number: int | None) -> None:
        """Put the pages of branch `number` in place of the trunk's; None: keep the trunk's. Free the unused pages."""
        for index, (_, _, first, pages) in enumerate(sequence.branches):
            unused = pages
            if index == number:
                unused = sequence.pages[first : first + len(pages)]
                sequence.pages[first : first + len(pages)] = pages
                self.tables.write_pages(sequence.sequence_index, first, pages)
            self.cache.free(unused)
        sequence.branches.clear()

    def stall(self, sequence: Sequence) -> None:
        """Exclude a sequence from steps, because its host data was late and no token was sampled.

        Its last known token will be computed again. The sequence resumes when its host data has arrived and all steps
        in flight with a row of the sequence are applied. Each of these rows is rewound too.
        """
        if sequence.sequence_index >= 0:
            self.rewind(sequence)
            self.stalled.add(sequence)

    def resume(self) -> None:
        """Resume the stalled sequences whose host data has arrived."""
        for sequence in list(self.stalled):
            if not sequence.num_pending and sequence.next_host_data.is_there:
                self.stalled.discard(sequence)
                if self.on_resume is not None:
                    self.on_resume(sequence)

    def reset(self) -> list[Sequence]:
        """Free all rows and pages, and empty the cache. Return the sequences that ran, in order of admission."""
        sequences = list(self._sequences)
        for sequence in sequences:
            self.tables.leave(sequence)
        self._sequences.clear()
        self.owners.counts.clear()
        self.constrained.clear()
        self.stalled.clear()
        self.adapters.reset()
        self.cache.reset(sequences)
        self.full = False
        return sequences

    def rebuild(self, sequences: Iterable[Sequence]) -> None:
        """Free the rows and pages of all sequences and empty the cache, even if the tables are inconsistent.

        New tables are created without reading the old ones. `sequences` must contain every sequence that may have a row
        or pages.
        """
        sequences = list(sequences)
        self.tables = RequestTables(len(self.tables.sequences), self._vocab_size)
        for sequence in sequences:
            sequence.sequence_index = -1
        self._sequences.clear()
        self.owners.counts.clear()
        self.constrained.clear()
        self.stalled.clear()
        self.adapters.reset()
        self.cache.reset(sequences)
        self.full = False

    def check(self) -> None:
        """Raise `ValueError` unless the rows and pages of all running sequences are consistent."""
        sequences = list(self._sequences)
        self.tables.check(sequences)
        self.cache.check(sequences)
        self.adapters.check(sequences)
        if list(self.constrained) != [sequence for sequence in sequences if sequence.constraint is not None]:
            raise ValueError("The table of constrained sequences does not match the running sequences.")
        for sequence in sequences:
            if len(sequence.pages) != -(-sequence.num_computed // self.cache.page_size):
                raise ValueError(f"{sequence!r} has {len(sequence.pages)} pages.")
