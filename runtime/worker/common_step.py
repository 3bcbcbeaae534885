"""Common steps (data-parallel attention): ranks attend to different sequences, and compute the other layers together.

Every rank belongs to one attention group, which has the sequences and the KV cache of one replica. The first rank of
each group proposes draft tokens for the group's rows, if there is a draft model or head. Rank 0 samples for all groups,
so that all ranks get the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ops.sampling.native import to_device
from runtime.batch import Batch, Ints, StepOutput, StepShare
from runtime.kv_cache.pools import KVPool
from runtime.kv_cache.registry import KINDS
from runtime.mesh.mesh import Mesh
from runtime.modeling.decoder import Decoder
from runtime.speculative.model_drafts import DRAFT
from runtime.worker.cpu_graph import NO_POSITIONS
from runtime.worker.device import Read
from runtime.worker.drafts import (
    Verified,
    accept_limits,
    proposed_ids,
    with_drafts,
    with_exact_starts,
    with_proposed_ids,
)
from runtime.worker.logprobs import CHUNK, ScoredPrompts
from runtime.worker.model_runner import StepExecutor
from runtime.worker.sampler import Sampled, Sampler
from runtime.worker.step_inputs import Staged, Staging, StepInputs, samples_on_host
from runtime.worker.step_outputs import copy_out


class _Own(NamedTuple):
    """The batch of a rank's group in a common step."""

    batch: Batch  # with draft tokens
    proposed: Batch  # the draft model's batch


class _Computed(NamedTuple):
    """The result of the forward pass on one rank."""

    inputs: StepInputs
    hidden: Tensor  # [T, E]
    needed: _Needed


class _Needed(NamedTuple):
    """The hidden states of one group that are read after the forward pass, by use."""

    sampled: Tensor
    embedded: Tensor
    scored: Tensor


class CommonStep:
    """A rank's part of every common step. Must be used on the thread that enqueues steps.

    Rank 0 calls `CommonStepLeader.run` for each step. All other ranks call `take_part` with the same shares.
    """

    def __init__(self, executor: StepExecutor, model: Decoder, pool: KVPool, mesh: Mesh) -> None:
        self._executor = executor
        self._model = model
        self._idle = idle_batch(pool)
        self._group = mesh.rank_info.coordinate("dp").rank
        self._tp, self._groups, self._stage = mesh.axis("tp"), mesh.axis("dp"), mesh.axis("stage")
        self._head_by_group = model.head is None or model.head.tied or mesh.rank_info.head_by_group

    def take_part(self, batch: Batch | None, shares: Sequence[StepShare]) -> None:
        """Compute this rank's part of a step. `batch` is the batch of the rank's group; None if it is idle."""
        with self._executor.enqueueing():
            own, _ = self.propose(batch, shares)
            computed, verified = self.compute(own, shares), None
            self.share_drafts(own, computed, shares)
            needed = computed.needed
            self.logits(needed.sampled, [share.sampled for share in shares])
            num_sampled = sum(share.sampled for share in shares)
            ids = torch.empty(num_sampled, dtype=torch.int64, device=self._executor.device.torch_device)
            if num_sampled:
                verified = self.keep(own, computed, self.share_tokens(ids), shares)
            for group, share in enumerate(shares):
                scored = needed.scored if group == self._group else needed.scored[:0]
                for first in range(0, share.scored, CHUNK):
                    count = min(CHUNK, share.scored - first)
                    self.logits(scored[first : first + count], _only(group, count, len(shares)))
            self.vectors(needed.embedded, [share.embedded for share in shares])
            self.observe(own, computed, verified)

    def propose(self, batch: Batch | None, shares: Sequence[StepShare]) -> tuple[_Own | None, Sequence[Ints]]:
        """Propose the draft tokens of this rank's group.

        Return the group's batch with them (None if the group is idle), and on rank 0 the proposed ids of each group.
        On a GPU, the draft tokens are proposed later, and `share_drafts` sends them. All ranks must call this method at
        the same time.
        """
        own = None if batch is None else _Own(*self._executor.propose(batch))
        counts = [share.drafted for share in shares]
        if not any(counts) or self._tp.rank or not self._executor.device.is_host:
            return own, ()
        ids = NO_POSITIONS if own is None or batch is None else proposed_ids(batch, own.batch)
        parts = self._groups.gather(torch.from_numpy(ids), counts)
        return own, () if parts is None else [part.numpy() for part in parts]

    def compute(self, own: _Own | None, shares: Sequence[StepShare]) -> _Computed:
        """Compute the hidden states of the group's tokens. `own` is the first result of `propose`."""
        tokens = tuple(share.tokens for share in shares)
        inputs, hidden = self._executor.forward(self._idle if own is None else own.batch, tokens)
        share = StepShare() if own is None else shares[self._group]
        needed = _Needed(*hidden[inputs.requested].split([share.sampled, share.embedded, share.scored]))
        return _Computed(inputs, hidden, needed)

    def share_drafts(self, own: _Own | None, computed: _Computed, shares: Sequence[StepShare]) -> list[Tensor] | None:
        """On a GPU, return on rank 0 the proposed ids of each group, int64 [n], or None if there are none.

        All ranks must call this method at the same time.
        """
        counts = [share.drafted for share in shares]
        if not any(counts) or self._tp.rank or self._executor.device.is_host:
            return None
        ids = computed.inputs.forward.token_ids
        return self._groups.gather(ids[:0] if own is None else ids[draft_places(own.batch, ids.device)], counts)

    def observe(self, own: _Own | None, computed: _Computed, verified: Verified | None) -> None:
        """Give the group's draft model or head the results of the step (see `StepExecutor.observe`)."""
        if own is not None:
            self._executor.observe(own.batch, own.proposed, computed.inputs, computed.hidden, verified)

    def logits(self, states: Tensor, counts: Sequence[int]) -> Tensor | None:
        """Return the logits of all groups on rank 0, float32 [N, V].

        `states` are the hidden states of this rank's group, and `counts` has the number of states of each group. All
        ranks must call this method at the same time.
        """
        if not sum(counts):
            return None
        if not self._head_by_group:
            logits = self._model.logits(self._groups.all_gather(states, counts))
            return logits if self._stage.rank == 0 else None
        count = len(states)
        # Kernels need at least one row. If a group has no states, the logits of a row of zeros are computed and
        # dropped.
        own = self._model.logits(states if count else states.new_zeros(1, states.shape[1]))[:count]
        if self._tp.rank:
            return None
        parts = self._groups.gather(own.contiguous(), counts)
        return None if parts is None else torch.cat(parts)

    def vectors(self, states: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """Return the hidden states of the embedding rows of each group.

        All ranks must call this method at the same time.
        """
        if not sum(counts):
            return [states[:0] for _ in counts]
        return list(self._groups.all_gather(states, counts).split(list(counts)))

    def share_tokens(self, ids: Tensor) -> Tensor:
        """Return the sampled ids [N] of all groups. Rank 0 passes them as `ids` and sends them to every rank."""
        return self._stage.broadcast(ids)

    def keep(
        self,
        own: _Own | None,
        computed: _Computed,
        ids: Tensor,
        shares: Sequence[StepShare],
        limits: np.ndarray | None = None,
    ) -> Verified | None:
        """Store the last tokens of this group's sequences (see `SampleInputs.keep`).

        `ids` [N] are the sampled ids of all groups.
        """
        ids = ids.split([share.sampled for share in shares])[self._group]
        if own is None or not len(ids):
            return None
        return computed.inputs.samples.keep(ids, self._executor.last_tokens, self._executor.lengths, limits)


class CommonStepLeader:
    """Rank 0's part of common steps: samples for all groups, and returns the output of each group."""

    def __init__(self, step: CommonStep, executor: StepExecutor, model: Decoder, samplers: Sequence[Sampler]) -> None:
        self._step = step
        self._executor = executor
        self._model = model
        self._ends = [_GroupEnd(executor, sampler, is_own=not group) for group, sampler in enumerate(samplers)]

    def run(self, batches: Sequence[Batch | None]) -> Read[list[StepOutput | None]]:
        """Enqueue a step with one batch per group; the batch of an idle group is None.

        Return a function that reads the outputs.
        """
        executor, step = self._executor, self._step
        shares = [StepShare.of(batch) for batch in batches]
        with executor.enqueueing(), executor.profiled(next(batch for batch in batches if batch is not None)):
            batches = [end.with_starts(batch) for end, batch in zip(self._ends, batches, strict=True)]
            own, ids = step.propose(batches[0], shares)
            batches = [None if own is None else own.batch, *batches[1:]]
            for group, (end, batch, share) in enumerate(zip(self._ends, batches, shares, strict=True)):
                if group and batch is not None and share.drafted and ids:
                    batches[group] = batch = with_proposed_ids(batch, ids[group])
                end.stage(batch)
            computed = step.compute(own, shares)
            drafts = step.share_drafts(own, computed, shares)
            if drafts is not None:
                for end, batch, found in zip(self._ends, batches, drafts, strict=True):
                    end.take_drafts(batch, found)
            needed, verified = computed.needed, None
            logits = step.logits(needed.sampled, [share.sampled for share in shares])
            sampled: list[Sampled | None] = [None for _ in batches]
            if logits is not None:
                parts = logits.split([share.sampled for share in shares])
                ends = zip(self._ends, batches, parts, strict=True)
                sampled = [end.sample(part, batch) for end, batch, part in ends]
                verified = self._share_tokens(own, computed, sampled, batches, shares)
            prompts = [
                end.score_prompts(batch, self._prompt_logits(group, needed.scored, shares))
                for group, (end, batch) in enumerate(zip(self._ends, batches, strict=True))
            ]
            states = step.vectors(needed.embedded, [share.embedded for share in shares])
            reads = [
                None if batch is None else copy_out(executor.device, batch, tokens, scores, self._pool(batch, hidden))
                for batch, tokens, scores, hidden in zip(batches, sampled, prompts, states, strict=True)
            ]
            step.observe(own, computed, verified)
        return lambda: [None if read is None else read() for read in reads]

    def _share_tokens(
        self,
        own: _Own | None,
        computed: _Computed,
        sampled: list[Sampled | None],
        batches: Sequence[Batch | None],
        shares: Sequence[StepShare],
    ) -> Verified | None:
        """Send the sampled tokens to all ranks, and verify the draft tokens. Return the result of rank 0's group."""
        found = None
        chosen = self._step.share_tokens(torch.cat([each.ids for each in sampled if each is not None]))
        for group, (end, batch, each) in enumerate(zip(self._ends, batches, sampled, strict=True)):
            if each is None or batch is None:
                continue
            limits = accept_limits(batch, each.host_data.without_token)
            if group:
                verified = end.keep(batch, each.ids, limits)
            else:
                verified = found = self._step.keep(own, computed, chosen, shares, limits)
            sampled[group] = each = replace(each, verified=verified)
            end.sampler.count(each)
        return found

    def _prompt_logits(self, group: int, own: Tensor, shares: Sequence[StepShare]) -> Iterator[Tensor | None]:
        """Yield the logits of a group's prompt positions with log-probabilities, in chunks of `CHUNK` positions."""
        own = own if not group else own[:0]
        for first in range(0, shares[group].scored, CHUNK):
            count = min(CHUNK, shares[group].scored - first)
            yield self._step.logits(own[first : first + count], _only(group, count, len(shares)))

    def _pool(self, batch: Batch, states: Tensor) -> Tensor | None:
        """Return the embedding vectors of a batch's embedding rows, or None if it has no such rows.

        `states` [M, E] are the hidden states of the rows' last tokens.
        """
        if batch.embedding_rows is None:
            return None
        count = len(states)
        return self._model.pooler(states, np.ones(count, np.int32), np.arange(count, dtype=np.int32))


class _GroupEnd:
    """Rank 0's sampler for one group, with the state that sampling needs."""

    def __init__(self, executor: StepExecutor, sampler: Sampler, *, is_own: bool) -> None:
        self.sampler = sampler
        self._staging = Staging(executor.device)
        self._is_host = executor.device.is_host
        self._staged = Staged({}, {})
        # Last tokens and lengths by sequence index. The ranks of a group have them, and rank 0 has a copy for every
        # other group, to verify draft tokens.
        tables = (executor.last_tokens, executor.lengths)
        self._last_tokens, self._lengths = tables if is_own else tuple(map(torch.zeros_like, tables))

    def with_starts(self, batch: Batch | None) -> Batch | None:
        """On a CPU, return the batch with exact starts. On a GPU, return it unchanged."""
        return batch if batch is None or not self._is_host else with_exact_starts(batch, self._lengths)

    def stage(self, batch: Batch | None) -> None:
        """Copy the sampling parameters to the device before the forward pass. The batch must have its draft tokens."""
        if batch is not None:
            arrays = self.sampler.arrays(batch)
            self._staged = Staged(arrays, self._staging.copy(arrays))

    def take_drafts(self, batch: Batch | None, ids: Tensor) -> None:
        """On a GPU, replace `DRAFT` in the arrays of this step by these ids [n]."""
        if batch is not None and len(ids):
            token_ids = ids.new_zeros(len(batch.token_ids))
            token_ids[draft_places(batch, ids.device)] = ids
            on_device = with_drafts(self._staged.on_device, token_ids)
            self._staged = self._staged._replace(on_device=on_device, token_ids=token_ids)

    def sample(self, logits: Tensor, batch: Batch | None) -> Sampled | None:
        """Sample the batch's tokens from its logits [N, V]."""
        if batch is None or batch.sampling is None:
            return None
        return self.sampler.sample(logits, batch, self._staged)

    def keep(self, batch: Batch, ids: Tensor, limits: np.ndarray | None) -> Verified | None:
        """Store the last tokens of another group in the copy of its tables (see `SampleInputs.keep`)."""
        samples, arrays = samples_on_host(batch), {}
        if samples.sequences is not None:
            arrays["sequences"] = samples.sequences.numpy().astype(np.int64)
        of_drafts = {name: tensor.numpy() for name, tensor in (samples.drafts or {}).items()}
        on_device = self._staging.copy(arrays | of_drafts)
        drafts = None if samples.drafts is None else {name: on_device[name] for name in of_drafts}
        if drafts is not None and self._staged.token_ids is not None:
            drafts = with_drafts(drafts, self._staged.token_ids)
        samples = samples._replace(sequences=on_device.get("sequences"), drafts=drafts)
        return samples.keep(ids, self._last_tokens, self._lengths, limits)

    def score_prompts(self, batch: Batch | None, logits: Iterator[Tensor | None]) -> ScoredPrompts | None:
        """Score the batch's prompts. `logits` yields the logits of all positions in order."""
        if batch is None or not batch.prompt_logprobs:
            return None
        nothing = torch.zeros(1, 0, device=self._last_tokens.device).expand(len(batch.token_ids), 0)

        def next_logits(states: Tensor, positions: Tensor) -> Tensor:
            part = next(logits)
            if part is None or len(part) != len(positions):
                raise RuntimeError("The logits of the scored prompts are not on rank 0.")
            return part

        return self.sampler.score_prompts(nothing, next_logits, batch.prompt_logprobs, self._staged)


def draft_places(batch: Batch, device: torch.device) -> Tensor:
    """Return the indices of `DRAFT` in the batch's token ids, int64 [n]."""
    return to_device(torch.from_numpy(np.flatnonzero(batch.token_ids == DRAFT)), device)


def _only(group: int, count: int, num_groups: int) -> list[int]:
    """Return the number of rows of each group: `count` for `group`, and 0 for all others."""
    return [count if each == group else 0 for each in range(num_groups)]


def idle_batch(pool: KVPool) -> Batch:
    """Return a batch for an idle group: one padding token that uses only scratch units. Its result is dropped."""
    kinds: dict[str, Mapping[str, Any]] = {
        name: KINDS[name].scratch_arrays([1], units) for name, units in pool.kinds.items()
    }
    one, zero = np.ones(1, np.int32), np.zeros(1, np.int32)
    return Batch(
        number=-1,
        sequences=(),
        starts=zero,
        counts=one,
        sequence_indices=zero,
        token_ids=zero,
        page_table=np.full((1, 1), pool.scratch_page, np.int32),
        sampling=None,
        kinds=kinds,
    )
