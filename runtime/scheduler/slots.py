"""Per-slot host tables: what every step needs of a running sequence, ready to be gathered by slot."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runtime.batch import Ints
from runtime.sequence import Sequence

TOP_K_OFF = 2**30


class SlotTables:
    """One row per running sequence, written when it enters, gathered by fancy indexing in every step.

    The page table grows in width as sequences do; entries behind a sequence's pages are 0.
    """

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.greedy = np.zeros(num_slots, np.bool_)
        self.temperature = np.ones(num_slots, np.float32)
        self.top_k = np.full(num_slots, TOP_K_OFF, np.int32)
        self.top_p = np.ones(num_slots, np.float32)
        self.min_p = np.zeros(num_slots, np.float32)
        self.seeds = np.zeros(num_slots, np.uint64)
        self.num_prompt = np.zeros(num_slots, np.int64)
        self.special = np.zeros(num_slots, np.bool_)  # has bias, penalties or logprobs
        self.sequences: list[Sequence | None] = [None] * num_slots
        self.fresh: set[int] = set()  # penalised slots whose sequence has not sampled there yet
        self.pages: Ints = np.zeros((num_slots, 16), np.int32)
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def enter(self, sequence: Sequence) -> None:
        """Give a sequence a slot and write its row, its pages included."""
        slot = sequence.slot = self._free.pop()
        params = sequence.sampling
        self.sequences[slot] = sequence
        self.greedy[slot] = params.greedy
        self.temperature[slot] = 1.0 if params.greedy else params.temperature
        self.top_k[slot] = TOP_K_OFF if params.top_k < 1 else min(params.top_k, TOP_K_OFF)
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.seeds[slot] = sequence.seed & 0xFFFF_FFFF_FFFF_FFFF
        self.num_prompt[slot] = sequence.num_prompt
        penalised = is_penalised(sequence)
        forbids = params.min_new_tokens > 0 and bool(sequence.stop_ids)
        logprobs = sequence.request.logprobs is not None
        self.special[slot] = penalised or forbids or logprobs or bool(params.logit_bias)
        if penalised:
            self.fresh.add(slot)
        self.write_pages(slot, 0, sequence.pages)

    def leave(self, sequence: Sequence) -> None:
        """Free the slot; its row of the page table is cleared."""
        slot = sequence.slot
        self.sequences[slot] = None
        self.fresh.discard(slot)
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


def is_penalised(sequence: Sequence) -> bool:
    params = sequence.sampling
    return bool(params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0)
