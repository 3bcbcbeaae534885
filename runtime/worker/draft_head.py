"""Proposes tokens with a draft head, which reads the model's hidden states (EAGLE, multi-token prediction)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.batch import UNKNOWN, Batch, Ints
from runtime.kv_cache.pools import KVPool
from runtime.modeling.draft_head import DraftHead
from runtime.worker.cpu_graph import CpuGraph
from runtime.worker.device import Device
from runtime.worker.draft_model import NO_ALTERNATIVES, NO_BATCH, draft_sampling, drafted_by_model, one_token_each
from runtime.worker.sampler import Sampler, chooses_greedily
from runtime.worker.step_inputs import Staging, prepare

# Maximum number of missing cache entries of a sequence. If more are missing, a step computes the newest of them, even
# if the sequence has no draft tokens in this step.
MISSING = 62

Longs = NDArray[np.int64]


class HeadDrafter:
    """Proposes tokens with a draft head, whose KV cache has the same pages as the target's. Only for CPUs.

    *Entry* q of the head's cache is computed from the target's state at position q and the token at q + 1. A step does
    the following:

        propose   computes the missing entries of rows with draft tokens from stored states, and then one entry per
                  further draft token from the head's own states
        observe   gets the target's states of the step, computes the entries of prompts, and stores the last states

    Entries from the head's own states are computed again once the target's states are known. After a rewind or with a
    shared prefix, entries may be missing or stale. The draft tokens are then worse. The output stays correct, because
    the target verifies them.
    """

    def __init__(
        self,
        head: DraftHead,
        pool: KVPool,
        device: Device,
        sampler: Sampler,
        num_sequences: int,
        max_drafts: int,
        graph: CpuGraph | None = None,
        topk: int = 1,
    ) -> None:
        """Create the drafter. With `topk` > 1, each proposal also sets `alternatives`."""
        # Alternatives to the last proposed tokens (see `branches.Alternatives`).
        self.alternatives: list[tuple[Ints, Ints]] = []
        self._topk = topk
        self._likeliest = NO_ALTERNATIVES  # the likeliest ids at each sampled position of the last step, [N, topk]
        self._head = head
        self._pool = pool
        self._sampler = sampler
        self._graph = graph
        self._staging = Staging(device)
        # Steps need this tensor, but no draft head step reads it.
        self._last_tokens = torch.zeros(num_sequences, dtype=torch.int64)
        # The last tokens and states of each sequence, for entries that are computed later. Position p is stored at
        # index p % `kept`.
        self._kept = kept = MISSING + max_drafts + 2
        self._ids = np.zeros((num_sequences, kept), np.int32)
        self._states = torch.zeros(num_sequences, kept, head.hidden_size, dtype=head.dtype)
        # By sequence index: number of entries computed from the target's states.
        self._computed = np.zeros(num_sequences, np.int64)
        self._starts = np.zeros(num_sequences, np.int64)  # by sequence index: first position of the newest row
        self._ends = np.zeros(num_sequences, np.int64)  # by sequence index: position after the newest row
        self._vocab_size = head.vocab_size
        self._map = head.token_ids

    @property
    def pool(self) -> KVPool:
        """The KV pool of the draft head. It has the same page ids as the target's pool."""
        return self._pool

    def propose(self, batch: Batch, last_tokens: Tensor) -> Batch:
        """Return the batch with token ids in place of `DRAFT` and `UNKNOWN`. Its starts must be exact.

        The ids for `DRAFT` are proposed here. Those for `UNKNOWN` are read from `last_tokens`, int64 by sequence index.
        """
        self.alternatives = []
        rows, firsts, positions = _flat(batch)
        indices = batch.sequence_indices
        ids = np.where(batch.token_ids == UNKNOWN, last_tokens.numpy()[indices[rows]], batch.token_ids)
        ids = ids.astype(np.int32)
        batch = replace(batch, token_ids=ids)
        starts = batch.starts.astype(np.int64)
        # A row that does not begin within or right after the newest row of its sequence index belongs to a new sequence
        # or follows cached pages.
        drafted, counts = drafted_by_model(batch)
        is_prompt = batch.counts > 1
        if batch.drafts is not None:
            is_prompt[batch.drafts.rows] = False
        again = (starts == self._starts[indices]) & is_prompt
        fresh = (starts < self._starts[indices]) | (starts > self._ends[indices]) | again
        self._computed[indices[fresh]] = starts[fresh]
        self._keep_ids(batch, rows, positions)
        missing = starts - self._computed[indices]
        wanted = ~is_prompt & (missing > MISSING)
        wanted[drafted] = True
        [chosen] = np.nonzero(wanted)
        if not len(chosen):
            return batch
        ends = starts[chosen]
        begins = np.maximum(np.minimum(self._computed[indices[chosen]], ends - 1), ends - MISSING - 1)
        self._computed[indices[chosen]] = ends
        tokens, states = self._propose_from(batch, chosen, begins, ends, drafted)
        if not len(drafted):
            return batch
        for number in range(1, int(counts.max()) + 1):
            self.alternatives.append((drafted[counts >= number], self._likeliest))
            ids[firsts[drafted[counts >= number]] + number] = tokens
            more = counts > number
            if more.any():
                of_more = torch.from_numpy(np.flatnonzero(more[counts >= number]))
                step = one_token_each(batch, drafted[more], number, ids[firsts[drafted[more]] + number])
                step = replace(step, starts=step.starts - np.int32(1))
                tokens, states = self._compute(step, states[of_more])
        self._keep_ids(batch, rows, positions)
        return batch

    def observe(self, batch: Batch, states: Tensor) -> None:
        """Process the target's states of a step, [T, 3E] or [T, E]. `batch` must be the batch that `propose` got."""
        rows, firsts, positions = _flat(batch)
        indices = batch.sequence_indices
        states = self._head.project(states)
        starts = batch.starts.astype(np.int64)
        ends = starts + batch.counts
        is_prompt = batch.counts > 1
        if batch.drafts is not None:
            is_prompt[batch.drafts.rows] = False
        [prompts] = np.nonzero(is_prompt)
        if len(prompts):
            begins = self._computed[indices[prompts]]
            # Ids before the row are in a ring buffer, which has only the last `kept` positions up to the row's end.
            oldest = np.minimum(starts[prompts] - 1, ends[prompts] - self._kept)
            begins = np.maximum(begins, np.maximum(oldest, 0))
            last = ends[prompts] - 1
            some = last > begins
            if some.any():
                chosen = prompts[some]
                source, entries = _ranges(chosen, begins[some], last[some])
                own = entries >= starts[source]
                flat = np.clip(firsts[source] + entries - starts[source], 0, None)
                read = states[torch.from_numpy(flat)]
                if not own.all():
                    before = torch.from_numpy(np.flatnonzero(~own))
                    read[before] = self._states_at(indices[source[~own]], entries[~own])
                self._compute(self._step(batch, chosen, begins[some], last[some], firsts), read)
            self._computed[indices[prompts]] = last
        keep = positions >= ends[rows] - self._kept
        place = torch.from_numpy(indices[rows[keep]]).long(), torch.from_numpy(positions[keep] % self._kept)
        self._states[place] = states if keep.all() else states[torch.from_numpy(np.flatnonzero(keep))]
        self._starts[indices], self._ends[indices] = starts, ends

    def take(self, sequence_index: int, position: int, token_id: int, state: Tensor | None, first: int) -> None:
        """Record that the target accepted a branch's token at this position.

        `state` is the target's state there, or None if unknown. The pages from position `first` on are those of the
        branch, so their entries must be computed again.
        """
        self._computed[sequence_index] = min(self._computed[sequence_index], first)
        if state is not None:
            self._ids[sequence_index, position % self._kept] = token_id
            self._states[sequence_index, position % self._kept] = self._head.project(state[None])[0]

    def close(self) -> None:
        """End the threads of the CPU graph. Called after the last step."""
        if self._graph is not None:
            self._graph.close()

    def _keep_ids(self, batch: Batch, rows: Longs, positions: Longs) -> None:
        self._ids[batch.sequence_indices[rows], positions % self._kept] = batch.token_ids

    def _states_at(self, indices: Ints, positions: Longs) -> Tensor:
        return self._states[torch.from_numpy(indices).long(), torch.from_numpy(positions % self._kept)]

    def _propose_from(
        self, batch: Batch, rows: Longs, begins: Longs, ends: Longs, drafted: Ints
    ) -> tuple[Ints, Tensor]:
        """Compute cache entries from stored states.

        Return the first draft token of each row with draft tokens, and the head's states there.
        """
        source, entries = _ranges(rows, begins, ends)
        firsts = batch.counts.cumsum() - batch.counts
        step = self._step(batch, rows, begins, ends, firsts)
        if len(drafted):
            own = np.searchsorted(rows, drafted).astype(np.int32)
            last = (step.counts.cumsum(dtype=np.int32) - np.int32(1))[own]
            step = replace(step, sampling=draft_sampling(batch, drafted, 1, own, last))
        return self._compute(step, self._states_at(batch.sequence_indices[source], entries))

    def _step(self, batch: Batch, rows: Longs, begins: Longs, ends: Longs, firsts: NDArray[np.integer]) -> Batch:
        """Return the head's step that computes the entries `begins` .. `ends` - 1 of these rows."""
        source, entries = _ranges(rows, begins, ends)
        after = entries + 1  # position of the token from which an entry is computed
        own = after >= batch.starts[source]
        ids = batch.token_ids[np.clip(firsts[source] + after - batch.starts[source], 0, None)]
        ids = np.where(own, ids, self._ids[batch.sequence_indices[source], after % self._kept])
        return replace(
            batch,
            **NO_BATCH,
            starts=begins.astype(np.int32),
            counts=(ends - begins).astype(np.int32),
            sequence_indices=batch.sequence_indices[rows],
            token_ids=ids.astype(np.int32),
            page_table=batch.page_table[rows],
            sampling=None,
            unknown_starts=None,
        )

    def _compute(self, step: Batch, states: Tensor) -> tuple[Ints, Tensor]:
        """Compute a step of the head. Return the token at each sampled position, and the head's state there."""
        graph, sampling = self._graph, step.sampling
        if graph is not None and graph.takes(step):
            graph.write_states(states)
            if sampling is not None and graph.chooses and chooses_greedily(sampling) and self._topk == 1:
                ids = graph.choose(step, self._last_tokens)[0]
                return self._mapped(ids), graph.states_of(sampling.positions)
            hidden, _ = graph.states(step, self._last_tokens)
            own = None if sampling is None else graph.states_of(sampling.positions)
        else:
            inputs = prepare(step, self._pool, self._staging, self._last_tokens)
            hidden = self._head(replace(inputs.forward, states=states.contiguous()))[inputs.samples.index]
            own = self._head.states[inputs.samples.index]
        if sampling is None or own is None:
            return np.zeros(0, np.int32), states[:0]
        return self._chosen(hidden, step), own

    def _chosen(self, hidden: Tensor, step: Batch) -> Ints:
        """Choose a token for each sampled position from hidden states [N, E], as the target would."""
        logits = self._head.logits(hidden)
        if self._map is not None:
            whole = logits.new_full((len(logits), self._vocab_size), -torch.inf)
            logits = whole.index_copy_(1, self._map, logits)
        if self._topk > 1:
            self._likeliest = logits.topk(self._topk).indices.numpy().astype(np.int32)
        return self._sampler.sample(logits, step).ids.numpy().astype(np.int32)

    def _mapped(self, ids: Tensor) -> Ints:
        return (ids if self._map is None else self._map[ids]).numpy().astype(np.int32)


def _flat(batch: Batch) -> tuple[Longs, NDArray[np.integer], Longs]:
    """Return each token's row [T], each row's first token [B], and each token's position in its sequence [T]."""
    rows = np.repeat(np.arange(len(batch.counts)), batch.counts)
    firsts = batch.counts.cumsum() - batch.counts
    return rows, firsts, np.arange(len(rows)) + (batch.starts - firsts)[rows]


def _ranges(rows: Longs, begins: Longs, ends: Longs) -> tuple[Longs, Longs]:
    """Concatenate the ranges begins .. ends - 1. Return the row and the value of each element."""
    counts = ends - begins
    offsets = np.arange(int(counts.sum())) - np.repeat(counts.cumsum() - counts, counts)
    return np.repeat(rows, counts), np.repeat(begins, counts) + offsets
