"""Per-slot host tables: what every step needs of a running sequence, ready to be gathered by slot."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runtime.batch import Ints
from runtime.scheduler.sampling import SamplingTables
from runtime.sequence import Sequence


class SlotTables:
    """One row per running sequence, written when it enters, gathered by fancy indexing in every step.

    The page table grows in width as sequences do; entries behind a sequence's pages are 0.
    """

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self.sampling = SamplingTables(num_slots, vocab_size)
        self.sequences: list[Sequence | None] = [None] * num_slots
        self.pages: Ints = np.zeros((num_slots, 16), np.int32)
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def enter(self, sequence: Sequence) -> None:
        """Give a sequence a slot and write its row, its pages included."""
        slot = sequence.slot = self._free.pop()
        self.sequences[slot] = sequence
        self.sampling.enter(sequence)
        self.write_pages(slot, 0, sequence.pages)

    def leave(self, sequence: Sequence) -> None:
        """Free the slot; its row of the page table is cleared."""
        slot = sequence.slot
        self.sequences[slot] = None
        self.sampling.leave(sequence)
        self.pages[slot, : len(sequence.pages)] = 0
        self._free.append(slot)
        sequence.slot = -1

    def write_pages(self, slot: int, first: int, pages: list[int]) -> None:
        """Set the page table's entries first .. first + len(pages) - 1 of a slot."""
        end = first + len(pages)
        self._widen(end)
        self.pages[slot, first:end] = pages

    def append_pages(self, sequences: list[Sequence], pages: list[int]) -> None:
        """Give each of these sequences one more page."""
        columns = []
        for sequence, page in zip(sequences, pages):
            own = sequence.pages
            columns.append(len(own))
            own.append(page)
        self._widen(max(columns, default=0) + 1)
        self.pages[[sequence.slot for sequence in sequences], columns] = pages

    def check(self, running: list[Sequence]) -> None:
        """Raise `ValueError` unless exactly these sequences have slots and the page table is theirs."""
        slots = [sequence.slot for sequence in running]
        if sorted(slots + self._free) != list(range(len(self.sequences))):
            raise ValueError("Slots are lost or held twice.")
        expected: NDArray[np.int32] = np.zeros_like(self.pages)
        for sequence in running:
            expected[sequence.slot, : len(sequence.pages)] = sequence.pages
            if self.sequences[sequence.slot] is not sequence:
                raise ValueError(f"{sequence!r} is not in its slot.")
        if not np.array_equal(expected, self.pages):
            raise ValueError("The page table does not list the pages of the running sequences.")

    def _widen(self, width: int) -> None:
        have = self.pages.shape[1]
        if width > have:
            wider = np.zeros((len(self.sequences), max(width, 2 * have)), np.int32)
            wider[:, :have] = self.pages
            self.pages = wider
