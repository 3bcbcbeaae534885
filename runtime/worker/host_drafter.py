"""Proposes tokens with a draft model or a draft head on a CPU. The target verifies them in the same step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.batch import UNKNOWN, Batch, Ints, Longs
from runtime.kv_cache.pools import KVPool
from runtime.modeling.decoder import Decoder
from runtime.modeling.draft_head import DraftHead
from runtime.worker.cpu_graph import NO_POSITIONS, CpuGraph
from runtime.worker.device import Device
from runtime.worker.draft_entries import DraftEntries, draft_sampling, drafted_by_model
from runtime.worker.sampler import Sampler, chooses_greedily
from runtime.worker.step_inputs import Staging, prepare


class HostDrafter:
    """A draft model or draft head on a CPU. The starts of all rows are known when a step begins.

    A step does the following:

        propose   computes the missing entries of rows with draft tokens and (for a draft model) of prompts; then one
                  entry for each further draft token, for which a draft head reads its own states
        observe   (for a draft head) computes the entries of prompts, and stores the target's states of the step

    For sequences that are not greedy, the drafter samples with the target's parameters and random numbers. If the two
    distributions are similar, both then mostly choose the same token (as in arXiv 2408.07978, with another sampler).
    """

    def __init__(
        self,
        model: Decoder,
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
        self.pool = pool  # has the same page ids as the target's pool
        self._topk = topk
        # Likeliest ids at each sampled position of the last step, [N, topk].
        self._likeliest = np.zeros((0, 0), np.int32)
        self._model, self._sampler, self._graph, self._staging = model, sampler, graph, Staging(device)
        self._head = model if isinstance(model, DraftHead) else None
        self._map = None if self._head is None else self._head.token_ids
        self._entries = entries = DraftEntries(num_sequences, max_drafts, int(self.reads_states))
        # `prepare` and the CPU graph need this argument, but the drafter's steps do not read it.
        self._last_tokens = torch.zeros(num_sequences, dtype=torch.int64)
        # The last tokens and states of each sequence (see `DraftEntries`).
        self._ids = np.zeros((num_sequences, entries.kept), np.int32)
        size = model.hidden_size if self.reads_states else 0
        self._states = torch.zeros(num_sequences, entries.kept, size, dtype=model.dtype)

    @property
    def reads_states(self) -> bool:
        """Whether the drafter is a draft head, which reads the target's states."""
        return self._head is not None

    def propose(self, batch: Batch, last_tokens: Tensor) -> Batch:
        """Return the batch with token ids in place of `DRAFT` and `UNKNOWN`. Its starts must be exact.

        The ids for `DRAFT` are proposed here. Those for `UNKNOWN` are read from `last_tokens`, int64 by sequence index.
        """
        self.alternatives = []
        rows, firsts, positions = _flat(batch)
        owners = batch.sequence_indices[rows]
        ids = np.where(batch.token_ids == UNKNOWN, last_tokens.numpy()[owners], batch.token_ids).astype(np.int32)
        drafted, counts = drafted_by_model(batch)
        batch = replace(batch, token_ids=ids)
        stored = owners, positions % self._entries.kept
        self._ids[stored] = ids
        todo = self._entries.missing(batch, drafted)
        if not len(todo.rows):
            return batch
        step, places = self._entries.step(batch, todo)
        if len(drafted):
            own = np.searchsorted(todo.rows, drafted).astype(np.int32)
            last = (step.counts.cumsum(dtype=np.int32) - np.int32(1))[own]
            step = replace(step, sampling=draft_sampling(batch, drafted, 1, own, last))
        tokens, states = self._compute_entries(step, places, ids, None)
        for number in range(1, int(counts.max(initial=0)) + 1):
            has, more = counts >= number, counts > number
            self.alternatives.append((drafted[has], self._likeliest))
            ids[firsts[drafted[has]] + number] = tokens
            if more.any():
                of_more = torch.from_numpy(np.flatnonzero(more[has]))
                step = self._entries.next_step(batch, drafted[more], number, ids[firsts[drafted[more]] + number])
                tokens, states = self._compute(step, None if states is None else states[of_more])
        if len(drafted):
            self._ids[stored] = ids
            if not self.reads_states:
                self._entries.computed[batch.sequence_indices[drafted]] = batch.starts[drafted] + counts
        return batch

    def observe(self, batch: Batch, states: Tensor) -> None:
        """Process the target's states of a step, [T, 3E] or [T, E], for a draft head.

        `batch` must be the batch that `propose` returned.
        """
        if self._head is None:
            return
        states, kept = self._head.project(states), self._entries.kept
        todo = self._entries.of_prompts(batch)
        if len(todo.rows):
            self._compute_entries(*self._entries.step(batch, todo), batch.token_ids, states)
        rows, _, positions = _flat(batch)
        keep = positions >= (batch.starts + batch.counts)[rows] - kept
        place = torch.from_numpy(batch.sequence_indices[rows[keep]]).long(), torch.from_numpy(positions[keep] % kept)
        self._states[place] = states if keep.all() else states[torch.from_numpy(np.flatnonzero(keep))]

    def take(self, sequence_index: int, position: int, token_ids: Ints, states: Tensor | None, first: int) -> None:
        """Record that the target accepted at least the token of a branch at this position.

        `token_ids` int32 [K] are the branch's ids from this position on. For a draft head, `states` [K, ...] are the
        target's states. Later steps overwrite the ids and states of rejected tokens. From position `first` on, the
        sequence uses the branch's pages, so the entries in them must be computed again.
        """
        places = np.arange(position, position + len(token_ids)) % self._entries.kept
        self._entries.computed[sequence_index] = min(self._entries.computed[sequence_index], first)
        self._ids[sequence_index, places] = token_ids
        if self._head is not None and states is not None:
            self._states[sequence_index, torch.from_numpy(places)] = self._head.project(states)

    def close(self) -> None:
        """End the threads of the CPU graph. Must be called after the last step."""
        if self._graph is not None:
            self._graph.close()

    def _compute_entries(
        self, step: Batch, places: Mapping[str, np.ndarray], ids: Ints, states: Tensor | None
    ) -> tuple[Ints, Tensor | None]:
        """Compute a step of `DraftEntries.step`, with the ids and the states of the target's step (see `_compute`)."""
        owners, entries, kept = places["owners"], places["entries"], self._entries.kept
        stored = self._ids[owners, (entries + self._entries.shift) % kept]
        step = replace(step, token_ids=np.where(places["ids"] >= 0, ids[places["ids"]], stored))
        read = None
        if self.reads_states:
            read = self._states[torch.from_numpy(owners), torch.from_numpy(entries % kept)]
            own = np.flatnonzero(places["states"] >= 0)
            if states is not None and len(own):
                read[torch.from_numpy(own)] = states[torch.from_numpy(places["states"][own])]
        return self._compute(step, read)

    def _compute(self, step: Batch, states: Tensor | None) -> tuple[Ints, Tensor | None]:
        """Compute a step; `states` are a head's inputs. Return the token and a head's state at each sampled position.

        With `topk` > 1, also set the likeliest tokens.
        """
        graph, sampling, head, own = self._graph, step.sampling, self._head, None
        if graph is not None and graph.takes(step):
            if states is not None:
                graph.write_states(states)
            if sampling is not None and graph.chooses and chooses_greedily(sampling) and self._topk == 1:
                ids = graph.choose(step, self._last_tokens)[0]
                ids = (ids if self._map is None else self._map[ids]).numpy().astype(np.int32)
                return ids, None if head is None else graph.states_of(sampling.positions)
            hidden, _ = graph.states(step, self._last_tokens)
            if head is not None and sampling is not None:
                own = graph.states_of(sampling.positions)
        else:
            inputs = prepare(step, self.pool, self._staging, self._last_tokens)
            forward = inputs.forward if states is None else replace(inputs.forward, states=states.contiguous())
            hidden = self._model(forward)[inputs.samples.index]
            own = None if head is None else head.states[inputs.samples.index]
        if sampling is None:
            return NO_POSITIONS, None
        logits = self._model.logits(hidden)
        if self._topk > 1:
            self._likeliest = logits.topk(self._topk).indices.numpy().astype(np.int32)
        return self._sampler.sample(logits, step).ids.numpy().astype(np.int32), own


def _flat(batch: Batch) -> tuple[Longs, NDArray[np.integer], Longs]:
    """Return each token's row [T], each row's first token [B], and each token's position in its sequence [T]."""
    rows = np.repeat(np.arange(len(batch.counts)), batch.counts)
    firsts = batch.counts.cumsum() - batch.counts
    return rows, firsts, np.arange(len(rows)) + (batch.starts - firsts)[rows]
