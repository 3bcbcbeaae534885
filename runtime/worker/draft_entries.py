"""Chooses the entries of a drafter's KV cache that a step computes, on a CPU and on a GPU.

A *drafter* runs a draft model or a draft head. Its KV cache uses the same page ids as the target's. *Entry* q of the
cache is computed from the token at position q. For a draft head, it is computed from the target's state at q and the
token at q + 1 (`shift` = 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.batch import UNKNOWN, Batch, Ints, Longs, Sampling
from runtime.speculative.model_drafts import DRAFT
from runtime.worker.cpu_graph import NO_POSITIONS

# Maximum number of missing entries of a sequence. If more are missing, a step computes the newest of them, even if the
# sequence has no draft tokens in this step.
MISSING = 62
NO_BATCH: Mapping[str, Any] = {  # fields of the target's batch that the drafter ignores
    "sequences": (), "prompt_logprobs": (), "embedding_rows": None, "row_values": {}, "kinds": {}, "drafts": None,
    "position_offsets": None, "media": (), "mutual_spans": None, "copies": (), "adapters": (),
}  # fmt: skip


class EntryRows(NamedTuple):
    """The entries that a step of the drafter computes: begins[i] .. ends[i] - 1 of the target's row rows[i]."""

    rows: Longs  # [R], rows in the target's batch
    begins: Longs  # [R]
    ends: Longs  # [R]
    # [R], whether the tokens in the target's row are read from its step (True) or from the stored tokens (False).
    from_batch: NDArray[np.bool_]


class DraftEntries:
    """The number of computed entries of every sequence.

    A drafter stores the last `kept` tokens (and states) of each sequence, so that it can compute missing entries later.
    After a rewind or with a shared prefix, entries may be missing or stale. The draft tokens are then worse. The output
    stays correct, because the target verifies them.
    """

    def __init__(self, num_sequences: int, max_drafts: int, shift: int) -> None:
        self.shift = shift
        self.kept = MISSING + max_drafts + 2  # the value of position p is stored at index p % `kept`
        # By sequence index: number of computed entries, or a lower bound while draft tokens are in flight.
        self.computed = np.zeros(num_sequences, np.int64)
        self._starts = np.zeros(num_sequences, np.int64)  # by sequence index: first position of the newest row
        # By sequence index: upper bound on the position after the newest row.
        self._ends = np.zeros(num_sequences, np.int64)

    def missing(self, batch: Batch, drafted: Ints) -> EntryRows:
        """Return the entries to compute before the draft tokens of the rows `drafted`, and record them as computed.

        For a draft model, these include the entries of prompts.
        """
        indices, starts = batch.sequence_indices, batch.starts.astype(np.int64)
        unknown = np.zeros(len(starts), np.bool_) if batch.unknown_starts is None else batch.unknown_starts
        is_prompt = _is_prompt(batch)
        # A row that does not begin within or right after the newest row of its sequence index belongs to a new sequence
        # or follows cached pages.
        continues = (self._starts[indices] <= starts) & (starts <= self._ends[indices])
        continues &= ~is_prompt | (starts != self._starts[indices])
        computed = np.where(continues, np.minimum(self.computed[indices], starts), starts)
        computed = np.where(unknown, self.computed[indices], computed)
        self._starts[indices[~unknown]] = starts[~unknown]
        self._ends[indices] = starts + batch.counts
        wanted = ~is_prompt & (starts - computed > MISSING)
        wanted[drafted] = True
        lasts = starts + 1 - self.shift  # proposing needs all entries before these indices
        begins = np.minimum(np.maximum(computed, lasts - MISSING - 1), np.where(unknown, computed, lasts - 1)).clip(0)
        after = np.where(unknown, computed + 1, lasts)
        if not self.shift:
            begins = np.where(is_prompt, self._first_of_prompt(batch, starts, computed), begins)
            lasts = np.where(is_prompt, starts + batch.counts, lasts)
            after = np.where(is_prompt, lasts, after)
            wanted |= is_prompt
        self.computed[indices] = np.where(wanted, after, computed)
        [rows] = np.nonzero(wanted)
        return EntryRows(rows, begins[rows], lasts[rows], is_prompt[rows])

    def of_prompts(self, batch: Batch) -> EntryRows:
        """Return the entries of prompts that a draft head computes after the target, and record them as computed."""
        starts = batch.starts.astype(np.int64)
        begins, ends = self._first_of_prompt(batch, starts, self.computed[batch.sequence_indices]), starts - 1
        ends = ends + batch.counts
        is_prompt = _is_prompt(batch)
        self.computed[batch.sequence_indices[is_prompt]] = ends[is_prompt]
        [rows] = np.nonzero(is_prompt & (ends > begins))
        return EntryRows(rows, begins[rows], ends[rows], np.ones(len(rows), np.bool_))

    def step(self, batch: Batch, todo: EntryRows) -> tuple[Batch, dict[str, np.ndarray]]:
        """Return the drafter's step that computes these entries, without token ids, and arrays that locate its inputs.

        The arrays have, for each entry q: the sequence index ("owners"), the row of the step ("rows"), q ("entries"),
        and the indices of its token ("ids") and state ("states") in the target's step, or -1 if these are stored.
        """
        rows, begins, ends, from_batch = todo
        counts = ends - begins
        owners = np.repeat(np.arange(len(rows)), counts)
        entries = np.arange(len(owners)) + np.repeat(begins - counts.cumsum() + counts, counts)
        firsts = (batch.counts.cumsum() - batch.counts)[rows]
        starts = batch.starts[rows][owners]
        # For each entry q: index of the token at position q in the batch's token ids [T].
        flat, own = firsts[owners] - starts + entries, from_batch[owners]
        step = replace(
            batch,
            **NO_BATCH,
            starts=begins.astype(np.int32),
            counts=counts.astype(np.int32),
            sequence_indices=batch.sequence_indices[rows],
            token_ids=np.zeros(len(owners), np.int32),
            page_table=batch.page_table[rows],
            sampling=None,
            unknown_starts=None,
        )
        return step, {
            "owners": batch.sequence_indices[rows][owners].astype(np.int64),
            "rows": owners,
            "entries": entries,
            "ids": np.where(own & (entries + self.shift >= starts), flat + self.shift, -1).astype(np.int64),
            "states": np.where(own & (entries >= starts), flat, -1).astype(np.int64),
        }

    def next_step(self, batch: Batch, rows: Ints, number: int, ids: Ints | None = None) -> Batch:
        """Return the step that computes the entries of draft token `number` (from 1) of each row, and chooses the next.

        `ids` are the draft tokens; None if only the device knows them.
        """
        own = np.arange(len(rows), dtype=np.int32)
        return replace(
            batch,
            **NO_BATCH,
            starts=batch.starts[rows] + np.int32(number - self.shift),
            counts=np.ones(len(rows), np.int32),
            sequence_indices=batch.sequence_indices[rows],
            token_ids=np.full(len(rows), UNKNOWN, np.int32) if ids is None else ids,
            page_table=batch.page_table[rows],
            sampling=draft_sampling(batch, rows, number + 1, own, own),
            unknown_starts=None if batch.unknown_starts is None else batch.unknown_starts[rows],
        )

    def _first_of_prompt(self, batch: Batch, starts: Longs, computed: Longs) -> Longs:
        """Return the first entry to compute for each row that is a prompt. Stored tokens let it precede the row."""
        return np.maximum(computed, np.minimum(starts - self.shift, starts + batch.counts - self.kept)).clip(0)


def drafted_by_model(batch: Batch) -> tuple[Ints, Ints]:
    """Return the rows for which the drafter proposes draft tokens, and the number of draft tokens of each."""
    drafts = batch.drafts
    if drafts is None:
        return NO_POSITIONS, NO_POSITIONS
    firsts = batch.counts.cumsum() - batch.counts
    own = batch.token_ids[firsts[drafts.rows] + 1] == DRAFT
    return drafts.rows[own], drafts.counts[own]


def draft_sampling(batch: Batch, rows: Ints, number: int, own_rows: Ints, positions: Ints) -> Sampling:
    """Return the sampling parameters for draft token `number` (from 1) of these rows.

    The parameters equal those of the target's token at the same position. `own_rows` and `positions` are the rows and
    the sampled positions in the drafter's own step.
    """
    target = batch.sampling
    if target is None:
        raise ValueError("A batch with drafts samples.")
    chosen = np.searchsorted(target.row_of, rows) + number - 1
    params = {name: values[chosen] for name, values in target.params.items()}
    return Sampling(positions, own_rows, target.greedy[chosen], target.uniform[chosen], params)


def _is_prompt(batch: Batch) -> NDArray[np.bool_]:
    """Return which rows are prompts, bool [B]: they have several tokens, none of which is a draft token."""
    found = batch.counts > 1
    if batch.drafts is not None:
        found[batch.drafts.rows] = False
    return found
