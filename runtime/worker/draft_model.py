"""Proposes tokens with a draft model. The target verifies them in the same step (arXiv 2211.17192)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.batch import UNKNOWN, Batch, Ints, Sampling
from runtime.kv_cache.pools import KVPool
from runtime.modeling.decoder import Decoder
from runtime.speculative.model_drafts import DRAFT
from runtime.worker.cpu_graph import NO_POSITIONS, CpuGraph
from runtime.worker.device import Device
from runtime.worker.sampler import Sampler, chooses_greedily
from runtime.worker.step_inputs import Staging, prepare

KEPT = 256  # number of the last tokens of each sequence that are stored, so that the draft model can compute them later
NO_ALTERNATIVES = np.zeros((0, 0), np.int32)
NO_BATCH: Mapping[str, Any] = {  # fields of the target's batch that the draft model ignores
    "sequences": (), "prompt_logprobs": (), "embedding_rows": None, "row_values": {}, "kinds": {}, "drafts": None,
    "position_offsets": None, "media": (), "mutual_spans": None, "copies": (), "adapters": (),
}  # fmt: skip


class DraftModel:
    """A small model whose KV cache has the same pages as the target's. Only for CPUs, where all starts are known.

    It computes every prompt that the target computes. For a row with draft tokens, it first computes the row's known
    tokens, then proposes draft tokens one at a time. The target verifies all of them in its step. For sequences that
    are not greedy, the draft model samples with the target's parameters and random numbers. If the distributions of the
    two models are similar, both models then mostly choose the same token (as in arXiv 2408.07978, with another
    sampler).

    While a sequence has no draft tokens, the draft model does not compute its tokens, but stores them to compute them
    later. If more than `KEPT` tokens are missing, the next draft tokens are worse. The output stays correct, because
    the target verifies them.
    """

    def __init__(
        self,
        model: Decoder,
        pool: KVPool,
        device: Device,
        sampler: Sampler,
        num_sequences: int,
        graph: CpuGraph | None = None,
        topk: int = 1,
    ) -> None:
        """Create the drafter. With `topk` > 1, each proposal also sets `alternatives`."""
        # Alternatives to the last proposed tokens (see `branches.Alternatives`).
        self.alternatives: list[tuple[Ints, Ints]] = []
        self._topk = topk
        self._likeliest = NO_ALTERNATIVES  # the likeliest ids at each sampled position of the last step, [N, topk]
        self._model = model
        self._sampler = sampler
        self._pool = pool
        self._graph = graph
        self._staging = Staging(device)
        # By sequence index: last token in the draft model's own steps.
        self._last_tokens = torch.zeros(num_sequences, dtype=torch.int64)
        # By sequence index: the token id at position p is at index p % KEPT.
        self._ids = np.zeros((num_sequences, KEPT), np.int32)
        self._computed = np.zeros(num_sequences, np.int64)  # by sequence index: number of positions with KV

    def propose(self, batch: Batch, last_tokens: Tensor) -> Batch:
        """Return the batch with token ids in place of `DRAFT` and `UNKNOWN`. Its starts must be exact.

        The ids for `DRAFT` are proposed here. Those for `UNKNOWN` are read from `last_tokens`, int64 by sequence index.
        """
        rows = np.repeat(np.arange(len(batch.counts)), batch.counts)
        indices = batch.sequence_indices[rows]
        firsts = batch.counts.cumsum() - batch.counts
        positions = np.arange(len(rows)) + (batch.starts - firsts)[rows]
        ids = np.where(batch.token_ids == UNKNOWN, last_tokens.numpy()[indices], batch.token_ids).astype(np.int32)
        self._ids[indices, positions % KEPT] = ids
        batch = replace(batch, token_ids=ids)
        step = self._catch_up(batch, firsts)
        if step is not None:
            chosen = self._compute(step)
        self.alternatives = []
        if batch.drafts is None:
            return batch
        drafted, counts = drafted_by_model(batch)
        if not len(drafted):
            return batch
        for number in range(1, int(counts.max()) + 1):
            self.alternatives.append((drafted[counts >= number], self._likeliest))
            ids[firsts[drafted[counts >= number]] + number] = chosen
            if (counts > number).any():
                chosen = self._compute(one_token_each(batch, drafted[counts > number], number))
        self._ids[indices, positions % KEPT] = ids
        self._computed[batch.sequence_indices[drafted]] = batch.starts[drafted] + counts
        return batch

    def take(self, sequence_index: int, position: int, token_id: int, state: Tensor | None, first: int) -> None:
        """Record that the target accepted a branch's token at this position.

        The pages from position `first` on are those of the branch, so their KV must be computed again.
        """
        self._ids[sequence_index, position % KEPT] = token_id
        self._computed[sequence_index] = min(self._computed[sequence_index], first)

    @property
    def pool(self) -> KVPool:
        """The KV pool of the draft model. It has the same page ids as the target's pool."""
        return self._pool

    def close(self) -> None:
        """End the threads of the CPU graph. Called after the last step."""
        if self._graph is not None:
            self._graph.close()

    def _catch_up(self, batch: Batch, firsts: NDArray[np.integer]) -> Batch | None:
        """Return the step that computes prompts, and the known tokens of rows with draft tokens.

        For each row with draft tokens, the step chooses the first draft token. Returns None if there is nothing to
        compute.
        """
        computed = self._computed[batch.sequence_indices]
        missing = batch.starts - computed
        begins, counts = batch.starts.astype(np.int64), batch.counts.copy()
        # A row of one token is computed like a prompt if the earlier rows did not compute the positions before it.
        taken = (counts > 1) | (missing < 0) | (missing > KEPT)
        drafted, _ = drafted_by_model(batch)
        if batch.drafts is not None:
            known = np.setdiff1d(batch.drafts.rows, drafted)  # rows whose draft tokens come from prompt lookup
            taken[known] &= (missing[known] < 0) | (missing[known] > KEPT - batch.counts[known])
        if len(drafted):
            behind = np.where((missing > 0) & (missing < KEPT), missing, 0)[drafted]
            begins[drafted] -= behind
            counts[drafted] = 1 + behind
            taken[drafted] = True
        [rows] = np.nonzero(taken)
        if not len(rows):
            return None
        self._computed[batch.sequence_indices[rows]] = begins[rows] + counts[rows]
        ends = counts[rows].cumsum(dtype=np.int32)
        source = np.repeat(rows, counts[rows])
        positions = np.arange(len(source)) + np.repeat(begins[rows] - ends + counts[rows], counts[rows])
        own = batch.token_ids[np.clip(firsts[source] + positions - batch.starts[source], 0, None)]
        earlier = positions < batch.starts[source]
        own[earlier] = self._ids[batch.sequence_indices[source[earlier]], positions[earlier] % KEPT]
        sampled = np.searchsorted(rows, drafted).astype(np.int32)
        return replace(
            batch,
            **NO_BATCH,
            starts=begins[rows].astype(np.int32),
            counts=counts[rows],
            sequence_indices=batch.sequence_indices[rows],
            token_ids=own,
            page_table=batch.page_table[rows],
            sampling=draft_sampling(batch, drafted, 1, sampled, ends[sampled] - 1) if len(drafted) else None,
        )

    def _compute(self, batch: Batch) -> Ints:
        """Compute a step. Return the token at each sampled position, int32 [N]."""
        graph, sampling = self._graph, batch.sampling
        if graph is not None and graph.takes(batch):
            if sampling is not None and graph.chooses and chooses_greedily(sampling) and self._topk == 1:
                return graph.choose(batch, self._last_tokens)[0].numpy().astype(np.int32)
            hidden, _ = graph.states(batch, self._last_tokens)
        else:
            inputs = prepare(batch, self._pool, self._staging, self._last_tokens)
            hidden = self._model(inputs.forward)[inputs.samples.index]
        if sampling is None:
            return NO_POSITIONS
        logits = self._model.logits(hidden)
        if self._topk > 1:
            self._likeliest = logits.topk(self._topk).indices.numpy().astype(np.int32)
        chosen = self._sampler.sample(logits, batch).ids
        self._last_tokens[torch.from_numpy(batch.sequence_indices[sampling.row_of])] = chosen
        return chosen.numpy().astype(np.int32)


def drafted_by_model(batch: Batch) -> tuple[Ints, Ints]:
    """Return the rows for which the draft model proposes draft tokens, and the number of draft tokens of each."""
    drafts = batch.drafts
    if drafts is None:
        return NO_POSITIONS, NO_POSITIONS
    firsts = batch.counts.cumsum() - batch.counts
    own = batch.token_ids[firsts[drafts.rows] + 1] == DRAFT
    return drafts.rows[own], drafts.counts[own]


def one_token_each(batch: Batch, rows: Ints, number: int, ids: Ints | None = None) -> Batch:
    """Return a batch that computes draft token `number` (from 1) of each of these rows and chooses the next one.

    `ids` are the draft tokens to compute. If None, the tokens that the draft model chose last are computed.
    """
    count = len(rows)
    own = np.arange(count, dtype=np.int32)
    return replace(
        batch,
        **NO_BATCH,
        starts=batch.starts[rows] + np.int32(number),
        counts=np.ones(count, np.int32),
        sequence_indices=batch.sequence_indices[rows],
        token_ids=np.full(count, UNKNOWN, np.int32) if ids is None else ids,
        page_table=batch.page_table[rows],
        sampling=draft_sampling(batch, rows, number + 1, own, own),
    )


def draft_sampling(batch: Batch, rows: Ints, number: int, own_rows: Ints, positions: Ints) -> Sampling:
    """Return the sampling parameters for draft token `number` (from 1) of these rows.

    The parameters equal those of the target's token at the same position. `own_rows` and `positions` are the rows and
    the sampled positions in the draft model's own step.
    """
    target = batch.sampling
    if target is None:
        raise ValueError("A batch with drafts samples.")
    chosen = np.searchsorted(target.row_of, rows) + number - 1
    params = {name: values[chosen] for name, values in target.params.items()}
    return Sampling(positions, own_rows, target.greedy[chosen], target.uniform[chosen], params)
