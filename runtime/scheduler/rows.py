"""The rows of the batch that is being filled, and the arrays they become."""

from __future__ import annotations

import numpy as np

from runtime.batch import UNKNOWN, Batch, PromptLogprobs
from runtime.scheduler.slots import SlotTables
from runtime.sequence import Sequence


class Rows:
    """Adding a row also advances its sequence: more is computed, and one more pending if it samples."""

    __slots__ = ("_sampled", "counts", "prompt_logprobs", "sequences", "starts", "token_ids")

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.token_ids: list[int] = []
        self.prompt_logprobs: list[PromptLogprobs] = []
        self._sampled: list[int] = []

    def __len__(self) -> int:
        return len(self.sequences)

    def add_decodes(self, sequences: list[Sequence]) -> None:
        """One row for each of these sequences, which lack only their last token, perhaps still pending."""
        first = len(self.sequences)
        starts, token_ids = self.starts, self.token_ids
        for sequence in sequences:
            start = sequence.num_computed
            starts.append(start)
            sequence.num_computed = start + 1
            pending = sequence.num_pending
            token_ids.append(UNKNOWN if pending else sequence.ids[start])
            sequence.num_pending = pending + 1
        self.sequences += sequences
        self.counts += [1] * len(sequences)
        self._sampled += range(first, first + len(sequences))

    def add_prompt(self, sequence: Sequence, count: int) -> None:
        """The next `count` known tokens; the row samples if they are the last and more may follow."""
        start = sequence.num_computed
        end = start + count
        self._ask_prompt_logprobs(sequence, start, end)
        if end == len(sequence.ids) < sequence.max_tokens:
            self._sampled.append(len(self.sequences))
            sequence.num_pending += 1
        self.sequences.append(sequence)
        self.starts.append(start)
        self.counts.append(count)
        self.token_ids += sequence.ids[start:end]
        sequence.num_computed = end

    def _ask_prompt_logprobs(self, sequence: Sequence, start: int, end: int) -> None:
        params = sequence.request.logprobs
        first = max(sequence.next_logprob, start)
        last = min(end, sequence.num_prompt - 1)
        if params is None or first >= last:
            return
        targets = np.array(sequence.ids[first + 1 : last + 1], np.int32)
        offset = len(self.token_ids) + first - start
        self.prompt_logprobs.append(PromptLogprobs(len(self.sequences), offset, targets, params))
        sequence.next_logprob = last

    def build(self, number: int, tables: SlotTables, page_size: int) -> Batch:
        """The finished batch; it shares no memory with the tables."""
        slots = np.array([sequence.slot for sequence in self.sequences], np.int32)
        starts = np.array(self.starts, np.int32)
        counts = np.array(self.counts, np.int32)
        ends = starts + counts
        width = -(-int(ends.max()) // page_size)
        sampling = None
        if self._sampled:
            rows = np.array(self._sampled, np.int32)
            sampling = tables.sampling.gather(rows, slots[rows], ends[rows].astype(np.int64))
        return Batch(
            number=number,
            sequences=tuple(self.sequences),
            starts=starts,
            counts=counts,
            slots=slots,
            token_ids=np.array(self.token_ids, np.int32),
            page_table=tables.pages[slots, :width],
            sampling=sampling,
            prompt_logprobs=tuple(self.prompt_logprobs),
        )
