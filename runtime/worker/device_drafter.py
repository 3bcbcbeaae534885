"""Proposes draft tokens on a GPU, without waiting for their ids on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from runtime.batch import Batch, Ints
from runtime.kv_cache.pools import KVPool
from runtime.modeling.decoder import Decoder
from runtime.modeling.draft_head import DraftHead
from runtime.worker.branches import alternative_arrays, choose_alternatives, trunks
from runtime.worker.cuda_graph import CudaGraphRunner
from runtime.worker.device import Device
from runtime.worker.draft_entries import DraftEntries, EntryRows, draft_sampling, drafted_by_model
from runtime.worker.drafts import Verified, with_drafts
from runtime.worker.sampler import Sampler
from runtime.worker.step_inputs import Forward, Staging, StepInputs, prepare


class _Proposed(NamedTuple):
    """One proposed draft token of several rows, and the alternatives to it."""

    ids: Tensor  # int64 [n]
    states: Tensor  # [n, E], the drafter's states at these tokens' positions
    targets: Tensor  # int64 [n], indices of the ids in the step's token ids, without branches
    alternatives: Tensor | None  # int64 [A], ids of alternatives, or None if there are none
    places: Tensor | None  # int64 [A], indices of the alternatives in [T]


class DeviceDrafter:
    """A draft model or draft head on a GPU.

    Only the device knows which draft tokens were accepted, so the last tokens and states of each sequence are stored on
    the device. The host knows only lower bounds on the numbers of computed entries, so a step may compute some entries
    again.

    A step does the following:

        propose   computes the missing entries of rows with draft tokens and (for a draft model) of prompts; then one
                  entry for each further draft token
        observe   (for a draft head) computes the entries of prompts, and stores the target's states of the step

    Branches (`sequence.Branch`) have no entries. After a step, the ids and states of accepted branches replace those of
    the trunk.

    All steps of the drafter go through `forward`, which replays CUDA graphs. The proposed ids are written into the
    target's step on the device, without a copy to the host.
    """

    def __init__(
        self,
        model: Decoder,
        pool: KVPool,
        device: Device,
        sampler: Sampler,
        num_sequences: int,
        max_drafts: int,
        forward: Forward,
        topk: int = 1,
    ) -> None:
        """Create the drafter. Its alternatives are among the `topk` likeliest ids."""
        self.pool = pool  # has the same page ids as the target's pool
        self._model, self._sampler, self._forward = model, sampler, forward
        self._head, self._topk = model if isinstance(model, DraftHead) else None, topk
        self._entries = DraftEntries(num_sequences, max_drafts, int(self.reads_states))
        self._kept = kept = self._entries.kept
        self._stagings = [Staging(device) for _ in range(max_drafts + 1)]
        where = device.torch_device
        with torch.inference_mode(), device.forward():
            # `prepare` needs this argument, but the drafter's steps do not read it.
            self._last_tokens = torch.zeros(num_sequences, dtype=torch.int64, device=where)
            self._ids = torch.zeros(num_sequences, kept, dtype=torch.int64, device=where)
            size = model.hidden_size if self._head is not None else 0
            self._states = torch.zeros(num_sequences, kept, size, dtype=model.dtype, device=where)

    @staticmethod
    def table_bytes(model: Decoder, num_sequences: int, max_drafts: int) -> int:
        """Return the number of bytes of the tables of stored tokens and states."""
        kept = DraftEntries(0, max_drafts, 0).kept
        state_bytes = model.hidden_size * model.dtype.itemsize if isinstance(model, DraftHead) else 0
        return num_sequences * (kept * (8 + state_bytes) + 8)

    @property
    def graphs(self) -> CudaGraphRunner | None:
        """The drafter's CUDA graphs, or None if there are none."""
        return self._forward if isinstance(self._forward, CudaGraphRunner) else None

    @property
    def reads_states(self) -> bool:
        """Whether the drafter is a draft head, which reads the target's states."""
        return self._head is not None

    def propose(self, batch: Batch, inputs: StepInputs, lengths: Tensor) -> StepInputs:
        """Return the inputs of the target's step with proposed ids in place of `DRAFT`.

        `lengths`, int32 by sequence index, has the exact starts of the rows whose starts the host does not know.
        """
        trunk, own = _without_branches(batch, inputs)
        token_ids = own.forward.token_ids
        self._store(trunk, own, self._ids, token_ids)
        rows, counts = drafted_by_model(trunk)
        todo, alternatives = self._entries.missing(trunk, rows), list[_Proposed]()
        if len(todo.rows):
            places = alternative_arrays(batch, rows, counts)
            token_ids, alternatives = self._propose(trunk, token_ids, todo, rows, counts, lengths, places)
        if not len(rows):
            return inputs
        self._store(trunk, own, self._ids, token_ids)
        if trunk is not batch and inputs.samples.drafts is not None:
            token_ids = inputs.forward.token_ids.index_copy(0, inputs.samples.drafts["branch_trunks"], token_ids)
            for found in alternatives:
                if found.places is not None and found.alternatives is not None:
                    token_ids.index_copy_(0, found.places, found.alternatives)
        return with_token_ids(inputs, token_ids)

    def observe(self, batch: Batch, inputs: StepInputs, states: Tensor | None, verified: Verified | None) -> None:
        """Process a step after its draft tokens are `verified`.

        For a draft head, `states` are the target's states of the step's tokens, [T, 3E] or [T, E].
        """
        if self._head is not None and states is not None:
            trunk, own = _without_branches(batch, inputs)
            # A copy, because the drafter's own graphs may overwrite the results of the target's graph.
            states = self._head.project(states.clone())
            of_trunk = states
            if trunk is not batch and inputs.samples.drafts is not None:
                of_trunk = states[inputs.samples.drafts["branch_trunks"]]
            todo = self._entries.of_prompts(trunk)
            if len(todo.rows):
                step, places = self._entries.step(trunk, todo)
                self._compute(step, places, own.forward.token_ids, of_trunk, self._last_tokens, 0)
            self._store(trunk, own, self._states, of_trunk)
        if verified is not None and verified.taken is not None and inputs.samples.drafts is not None:
            self._take(inputs, inputs.samples.drafts, verified.taken, states)

    def _take(self, inputs: StepInputs, arrays: Mapping[str, Tensor], taken: Tensor, states: Tensor | None) -> None:
        """Store the ids and states of the accepted branches `taken` [D] in place of the trunk's."""
        chosen = taken.clamp(min=0)
        used = (arrays["branch_ids"][chosen] >= 0) & (taken >= 0)[:, None]
        # Unused places store the trunk's first token again. An index thus never gets two different values.
        places = torch.where(used, arrays["branch_places"][chosen], arrays["draft_places"][:, :1] - 1).flatten()
        stored = inputs.sequences[places], inputs.forward.positions[places] % self._kept
        self._ids[stored] = inputs.forward.token_ids[places]
        if states is not None:
            self._states[stored] = states[places].to(self._states.dtype)

    def _propose(
        self,
        batch: Batch,
        token_ids: Tensor,
        todo: EntryRows,
        rows: Ints,
        counts: Ints,
        lengths: Tensor,
        alternatives: Mapping[int, Mapping[str, np.ndarray]],
    ) -> tuple[Tensor, list[_Proposed]]:
        """Compute the entries `todo`, then propose draft tokens and `alternatives` (see `alternative_arrays`).

        Return the target's token ids with the draft tokens, int64 [T], and what was proposed. `batch` has no branches.
        """
        step, places = self._entries.step(batch, todo)
        firsts = batch.counts.cumsum() - batch.counts
        if len(rows):
            own = np.searchsorted(todo.rows, rows).astype(np.int32)
            begins = step.counts.cumsum(dtype=np.int64)[own] - step.counts[own]
            # Base + the start of the row = index of the entry that yields the first draft token.
            base = begins - self._entries.shift - todo.begins[own]
            starts = batch.starts[rows].astype(np.int64)
            step = replace(step, sampling=draft_sampling(batch, rows, 1, own, (base + starts).astype(np.int32)))
            places |= {"base": base, "starts": starts, "sequences": batch.sequence_indices[rows].astype(np.int64)}
            if batch.unknown_starts is not None:
                places["unknown"] = batch.unknown_starts[rows]
            places["targets"] = (firsts[rows] + 1).astype(np.int64)
            places |= _named(alternatives.get(1))
        found, proposed = self._compute(step, places, token_ids, None, lengths, 0), list[_Proposed]()
        for number in range(1, int(counts.max(initial=0)) + 1):
            if found is None:
                break
            proposed.append(found)
            token_ids = token_ids.index_copy(0, found.targets, found.ids)
            more = counts > number
            if not more.any():
                break
            kept = np.flatnonzero(more[counts >= number])
            step = self._entries.next_step(batch, rows[more], number)
            places = {"kept": kept, "targets": (firsts[rows[more]] + number + 1).astype(np.int64)}
            places |= _named(alternatives.get(number + 1))
            ends = lengths + (number - self._entries.shift)
            found = self._compute(step, places, found.ids, found.states, ends, number)
        return token_ids, proposed

    def _compute(
        self,
        step: Batch,
        places: Mapping[str, np.ndarray],
        ids: Tensor,
        states: Tensor | None,
        lengths: Tensor,
        number: int,
    ) -> _Proposed | None:
        """Compute a step of the drafter. Return its proposals at the sampled positions, or None if there are none.

        If `places` has "kept", each row computes one of the proposed `ids` with the drafter's own `states`. Otherwise,
        `ids` and `states` are those of the target's step.
        """
        more = {**self._sampler.arrays(step), **{f"drafter.{name}": array for name, array in places.items()}}
        inputs = prepare(step, self.pool, self._stagings[number], self._last_tokens, more, lengths=lengths)
        on_device = {name.removeprefix("drafter."): array for name, array in inputs.samples.more.on_device.items()}
        if "kept" in on_device:
            tokens = ids[on_device["kept"]]
            read = None if self._head is None or states is None else states[on_device["kept"]]
        else:
            tokens = self._read(self._ids, on_device, ids, "ids", self._entries.shift)
            read = None if self._head is None else self._read(self._states, on_device, states, "states", 0)
        hidden = self._forward(
            replace(
                inputs.forward,
                token_ids=tokens,
                states=None if read is None else read.contiguous(),
                token_rows=on_device.get("rows"),
            )
        )
        if step.sampling is None:
            return None
        index = inputs.samples.index
        if "base" in on_device:
            starts = on_device["starts"]
            if "unknown" in on_device:
                starts = torch.where(on_device["unknown"], lengths[on_device["sequences"]].long(), starts)
            index = on_device["base"] + starts
        own = hidden[index] if self._head is None else self._own_states(hidden)[index]
        logits, alternatives, rows = self._model.logits(hidden[index]), None, on_device.get("alternative_rows")
        likeliest = None if rows is None else logits[rows].topk(self._topk).indices
        ids = self._sampler.sample(logits, step, inputs.samples.more).ids
        if likeliest is not None:
            alternatives = choose_alternatives(likeliest, ids[rows], on_device["alternative_ranks"])
        return _Proposed(ids, own, on_device["targets"], alternatives, on_device.get("alternative_places"))

    def _read(
        self, stored: Tensor, places: Mapping[str, Tensor], of_step: Tensor | None, name: str, shift: int
    ) -> Tensor:
        """Return the tokens or states that entries need: from `of_step` if present, else from `stored`."""
        kept = stored[places["owners"], (places["entries"] + shift) % self._kept]
        if of_step is None:
            return kept
        own = places[name]
        is_own = (own >= 0).reshape(-1, *[1] * (kept.ndim - 1))
        return torch.where(is_own, of_step[own.clamp(0, len(of_step) - 1)], kept)

    def _own_states(self, hidden: Tensor) -> Tensor:
        if isinstance(self._forward, CudaGraphRunner):
            return hidden if self._forward.states is None else self._forward.states
        return hidden if self._head is None else self._head.states

    def _store(self, batch: Batch, inputs: StepInputs, stored: Tensor, values: Tensor) -> None:
        """Store the values [T, ...] of the last tokens of each row."""
        for part in last_parts(batch.counts, self._kept):
            places = inputs.forward.positions[part] % self._kept
            stored[inputs.sequences[part], places] = values[part].to(stored.dtype)


def last_parts(counts: Ints, kept: int) -> list[slice]:
    """Return slices of [T] with the last `kept` tokens of each row. Longer rows begin a new slice."""
    ends, [longer] = counts.cumsum(), np.nonzero(counts > kept)
    firsts, stops = ends[longer] - kept, ends[longer] - counts[longer]
    return [slice(*part) for part in zip([0, *firsts.tolist()], [*stops.tolist(), int(ends[-1])], strict=True)]


def _named(arrays: Mapping[str, np.ndarray] | None) -> dict[str, np.ndarray]:
    return {f"alternative_{name}": array for name, array in (arrays or {}).items()}


def _without_branches(batch: Batch, inputs: StepInputs) -> tuple[Batch, StepInputs]:
    """Return a step without its branches: the batch, and its inputs with the ids and positions of the other tokens."""
    if batch.drafts is None or batch.drafts.branches is None or inputs.samples.drafts is None:
        return batch, inputs
    kept, forward = inputs.samples.drafts["branch_trunks"], inputs.forward
    forward = replace(forward, token_ids=forward.token_ids[kept], positions=forward.positions[kept])
    return trunks(batch), inputs._replace(forward=forward, sequences=inputs.sequences[kept])


def with_token_ids(inputs: StepInputs, token_ids: Tensor) -> StepInputs:
    """Return a step's inputs with the token ids int64 [T], also in place of DRAFT in the arrays of draft tokens."""
    samples, more = inputs.samples, inputs.samples.more
    samples = samples._replace(
        drafts=None if samples.drafts is None else with_drafts(samples.drafts, token_ids),
        more=more._replace(on_device=with_drafts(more.on_device, token_ids), token_ids=token_ids),
    )
    return inputs._replace(forward=replace(inputs.forward, token_ids=token_ids), samples=samples)
