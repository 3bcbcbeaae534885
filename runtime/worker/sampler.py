"""Samples the tokens of a step from its logits: penalties, biases, truncation, random choice and log-probabilities."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ops.sampling import NO_LIMIT, Masks, SamplingArrays, Scores, native
from runtime.batch import Batch, Bias, Penalties, PromptLogprobs, Sampling
from runtime.request import Logprobs
from runtime.sampling_params import ROW_ARRAYS, RowArray
from runtime.worker.device import Device
from runtime.worker.drafts import Verified, drafts_before, with_drafts
from runtime.worker.host_data import NO_HOST_DATA, Arrived, HostDataGate
from runtime.worker.logprobs import (
    ScoredPrompts,
    ScoredRows,
    prompt_arrays,
    requested_ids,
    score_prompts,
    score_rows,
)
from runtime.worker.relaxed_acceptance import RelaxedAcceptance, relaxed_arrays
from runtime.worker.step_inputs import NO_ARRAYS, NOT_STAGED, Staged, Staging

logger = logging.getLogger("penstock.scheduler")

FIELDS = SamplingArrays._fields  # names of the arrays that `choose` reads
PARAMS = tuple(name for name in FIELDS if name in ROW_ARRAYS)
ROWS_WITH_DRAFTS = 64  # token counts are copied for at most this many rows with draft tokens at a time
# names of the row arrays that `penalize` applies to the logits before `choose`
PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")


def check_row_arrays(declared: Mapping[str, RowArray]) -> None:
    """Raise TypeError if the sampler ignores a declared row array, or needs one that is not declared."""
    for name, array in declared.items():
        if name not in FIELDS and name not in PENALTIES:
            raise TypeError(f"{name} has a RowArray, but ops.sampling.SamplingArrays has no field {name}.")
        if NO_LIMIT.get(name, array.neutral) != array.neutral:
            raise TypeError(f"{name} is off at {NO_LIMIT[name]:g} in ops.sampling, not at {array.neutral:g}.")
    for name in {*FIELDS, *NO_LIMIT, *PENALTIES} - {"greedy", "uniform"} - declared.keys():
        raise TypeError(f"The sampler needs {name}, but no sampling parameter has this RowArray.")


check_row_arrays(ROW_ARRAYS)


def chooses_plainly(sampling: Sampling) -> bool:
    """Return whether the step requests only tokens, and the tokens depend only on the logits and `SamplingArrays`."""
    return (
        sampling.bias is None
        and sampling.penalties is None
        and sampling.logprobs is None
        and not sampling.host_data
        and sampling.params.keys() <= set(PARAMS)
    )


def chooses_greedily(sampling: Sampling) -> bool:
    """Return whether the step requests only the likeliest token of each position."""
    return bool(sampling.greedy.all()) and chooses_plainly(sampling)


def sampling_arrays(on_device: Mapping[str, Tensor]) -> SamplingArrays:
    """Return the arrays that sampling reads, from the step's arrays."""
    return SamplingArrays(*(on_device[name] for name in FIELDS))


class HostTokens(NamedTuple):
    """The results at the N sampled positions, on the host."""

    tokens: list[list[int]]  # [N], the id of each position; empty if its host data was late
    failed: list[int]  # positions (of N) whose logits were not finite, or whose constraint failed
    logprobs: list[Logprobs | None] | None  # [N]; None: no row requested log-probabilities
    stuck: list[int]  # positions among `failed` whose constraint failed or allowed no token
    accepted: list[int] | None = None  # [D], number of accepted draft tokens of each row
    taken: list[int] | None = None  # [D], the branch that each row continues with or -1; None: no branches


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """The results at the N sampled positions, on the device.

    To read them, copy `tensors()` to the host, wait for the copies, and pass them to `read`.
    """

    ids: Tensor  # int64 [N], always valid ids
    sound: Tensor  # bool [N], whether the logits were finite and at least one token was allowed
    scored: ScoredRows | None = None
    scored_rows: tuple[int, ...] = ()  # positions (of N) whose log-probabilities are in `scored`
    host_data: Arrived = NO_HOST_DATA
    verified: Verified | None = None  # None: no row has draft tokens
    # The step's arrays, if penalised rows have draft tokens: their tokens can be counted only after verification.
    uncounted: Mapping[str, Tensor] | None = None

    def tensors(self) -> list[Tensor]:
        """Return the tensors that must be copied to the host before `read`."""
        return [
            self.ids,
            self.sound,
            *(self.scored.tensors() if self.scored else ()),
            *self._of_drafts(),
        ]

    def read(self, host: Sequence[Tensor]) -> HostTokens:
        """Convert the host copies of `tensors()` to plain values."""
        tokens, sound = [[token_id] for token_id in host[0].tolist()], host[1].tolist()
        without_token, failed = self.host_data.without_token, self.host_data.failed
        for row in without_token:
            tokens[row], sound[row] = [], True
        for row in failed:
            sound[row] = False
        unsound = [row for row, is_sound in enumerate(sound) if not is_sound]
        stuck = [row for row in unsound if self.host_data.is_stuck(row)] if unsound else []
        end = len(host) - len(self._of_drafts())
        scored, (accepted, taken, *_) = host[2:end], (*(each.tolist() for each in host[end:]), None, None)
        if self.scored is None:
            return HostTokens(tokens, unsound, None, stuck, accepted, taken)
        logprobs: list[Logprobs | None] = [None] * len(tokens)
        for row, scores in zip(self.scored_rows, self.scored.read(scored)):
            logprobs[row] = scores if sound[row] and tokens[row] else None
        return HostTokens(tokens, unsound, logprobs, stuck, accepted, taken)

    def _of_drafts(self) -> list[Tensor]:
        return [] if self.verified is None else self.verified.tensors()


class Sampler:
    """Samples the tokens of every step. Owned by the thread that runs the forward pass.

    Host arrays are copied to the device with the step's inputs (`arrays`), or after the forward pass if the step waits
    for host data. Sequences with penalties need token counts: 5 bytes per vocabulary entry (0.75 MB at V = 150,000),
    for each sequence index that was ever used with penalties. These tables grow by doubling, up to `num_sequences`
    rows.
    """

    def __init__(
        self,
        vocab_size: int,
        num_sequences: int,
        device: Device,
        *,
        choose: Callable[..., tuple[Tensor, Tensor]] = native.choose,
        penalize: Callable[..., None] = native.penalize,
        score: Callable[..., Scores] = native.score,
        raw_logprobs: bool = False,
        relaxed: RelaxedAcceptance | None = None,
    ) -> None:
        self._relaxed = relaxed
        self._is_host = device.is_host
        self._staging = Staging(device)
        self._seen = SeenTokens(vocab_size, num_sequences, device.torch_device)
        self._gate = HostDataGate(device, vocab_size)
        self._choose, self._penalize, self._score = choose, penalize, score
        self._raw_logprobs = raw_logprobs

    def arrays(self, batch: Batch) -> Mapping[str, np.ndarray]:
        """Return the arrays of a step that are known before the forward pass, by name."""
        sampling = batch.sampling
        arrays = NO_ARRAYS
        if sampling is not None and not sampling.host_data:
            arrays = self._host_arrays(batch, sampling, NO_HOST_DATA)
        return {**arrays, **prompt_arrays(batch.prompt_logprobs)} if batch.prompt_logprobs else arrays

    def sample(self, logits: Tensor, batch: Batch, staged: Staged = NOT_STAGED) -> Sampled:
        """Sample a token for each row of `logits` (float32 [N, V], changed in place).

        `staged` has the batch's `arrays` if they are already on the device, and the ids of draft tokens that only the
        device knows. For rows with a constraint, the method waits for host data (grammar masks, logits processors,
        biases) until shortly after the forward pass; late rows get no token. Log-probabilities are those of the
        distribution after penalties, biases, masks, logits processors and temperature (1 for greedy rows), but before
        the truncation by top-k, top-p and min-p. With `raw_logprobs`, they are computed from the given `logits`
        without these changes.
        """
        sampling = batch.sampling
        if sampling is None:
            raise ValueError("No row of this batch is sampled.")
        arrived = self._gate.arrived(batch)
        if "greedy" not in staged.host:
            host = self._host_arrays(batch, sampling, arrived)
            on_device = self._staging.copy(host)
            if staged.token_ids is not None:
                on_device = with_drafts(on_device, staged.token_ids)
        else:
            host, on_device = staged.host, staged.on_device
        scored_logits = None
        if "scored_rows" in on_device and self._raw_logprobs:
            scored_logits = logits[on_device["scored_rows"]]  # a copy
        if "penalised_rows" in on_device:
            self._apply_penalties(logits, sampling, on_device)
        if "bias_rows" in on_device:
            logits.index_put_(
                (on_device["bias_rows"], on_device["bias_ids"]), on_device["bias_values"], accumulate=True
            )
        failed = [row for row, process in arrived.processes.items() if not _process(process, logits[row])]
        masks = Masks(on_device["masked_rows"], on_device["bitmasks"]) if "masked_rows" in on_device else None
        plan = None if self._is_host else SamplingArrays(*(torch.from_numpy(host[name]) for name in FIELDS))
        ids, sound = self._choose(logits, sampling_arrays(on_device), plan, masks)
        if self._relaxed is not None and "relaxed_rows" in on_device:
            ids = self._relaxed.choose(logits, ids, sampling_arrays(on_device), on_device)
        uncounted = None
        if "draft_offsets" in on_device:
            uncounted = on_device
        elif "penalised_rows" in on_device:
            self._seen.add(on_device["counted"], ids[on_device["penalised_rows"]])
        if failed:
            arrived = arrived._replace(failed={*arrived.failed, *failed})
        if sampling.logprobs is None or "scored_rows" not in on_device:
            return Sampled(ids, sound, host_data=arrived, uncounted=uncounted)
        rows, scored_ids = tuple(host["scored_rows"].tolist()), ids
        if len(rows) < len(ids):
            scored_ids = ids[on_device["scored_rows"]]
        if scored_logits is None:
            scored_logits = logits if len(rows) == len(ids) else logits[on_device["scored_rows"]]
        params = [params for params in sampling.logprobs if params is not None]
        temperature, requested = on_device["scored_temperature"], on_device["requested_ids"]
        scored = score_rows(scored_logits, scored_ids, temperature, requested, params, self._score)
        return Sampled(ids, sound, scored, rows, arrived, uncounted=uncounted)

    def warm_up(self, num_rows: int) -> None:
        """Compile the device's sampling kernels (penalties, masks, choice, scores): run them on `num_rows` rows."""
        vocab_size = self._seen.counts.shape[1]
        host: dict[str, np.ndarray] = {
            "greedy": np.zeros(num_rows, np.bool_),
            "uniform": np.zeros(num_rows, np.float32),
        }
        host |= {name: _neutral(name, num_rows) for name in (*PARAMS, *PENALTIES)}
        host["rows"], host["words"] = np.arange(num_rows), np.full((num_rows, -(-vocab_size // 32)), -1, np.int32)
        on_device = self._staging.copy(host)
        rows, penalties = on_device["rows"], [on_device[name] for name in PENALTIES]
        logits = torch.zeros(num_rows, vocab_size, device=rows.device)
        counts = logits.new_zeros((1, vocab_size), dtype=torch.int32)  # shared by all rows, to save memory
        self._penalize(logits, rows, torch.zeros_like(rows), counts, counts > 0, *penalties)
        plan = None if self._is_host else SamplingArrays(*(torch.from_numpy(host[name]) for name in FIELDS))
        ids, _ = self._choose(logits, sampling_arrays(on_device), plan, Masks(rows, on_device["words"]))
        self._score(logits, on_device["temperature"], ids, 1, rows[:, None])

    def count(self, sampled: Sampled) -> None:
        """Count the accepted tokens of penalised rows in a step with verified draft tokens."""
        arrays, verified = sampled.uncounted, sampled.verified
        if arrays is None or verified is None:
            return
        # Rows without draft tokens have the owner D: they accept 0 draft tokens.
        accepted = torch.cat([verified.accepted, verified.accepted.new_zeros(1)])
        used = arrays["draft_offsets"] <= accepted[arrays["draft_owners"]]
        self._seen.add_if(used, arrays["counted"], sampled.ids[arrays["penalised_rows"]])

    def score_prompts(
        self,
        hidden: Tensor,
        logits_of: Callable[[Tensor, Tensor], Tensor],
        requests: tuple[PromptLogprobs, ...],
        staged: Staged,
    ) -> ScoredPrompts:
        """Score prompt tokens by the raw logits of the positions before them (see `logprobs.score_prompts`)."""
        on_device = staged.on_device
        if "prompt_indices" not in on_device:  # steps in the CPU graph copy no arrays in advance
            on_device = self._staging.copy(prompt_arrays(requests))
        return score_prompts(hidden, logits_of, requests, on_device, self._score)

    def _host_arrays(self, batch: Batch, sampling: Sampling, arrived: Arrived) -> dict[str, np.ndarray]:
        """Return all arrays that the device needs to sample these positions, by name."""
        arrays = {"greedy": sampling.greedy, "uniform": sampling.uniform, **sampling.params}
        for name in PARAMS:
            if name not in arrays:
                arrays[name] = _neutral(name, len(sampling.positions))
        if sampling.penalties is not None:
            self._add_penalties(arrays, sampling, sampling.penalties, arrived.without_token)
            rows = arrays["penalised_rows"]
            if batch.drafts is not None and np.isin(sampling.row_of[rows], batch.drafts.rows).any():
                arrays |= drafts_before(batch, batch.drafts, sampling, rows)
        if self._relaxed is not None and batch.drafts is not None:
            arrays |= relaxed_arrays(batch, sampling, arrays)
        if sampling.bias is not None or arrived.biases:
            bias = _joined_biases(sampling.bias, arrived.biases)
            arrays["bias_rows"], arrays["bias_ids"], arrays["bias_values"] = bias
        if len(arrived.rows):
            arrays["masked_rows"], arrays["bitmasks"] = arrived.rows, arrived.bitmasks
        if sampling.logprobs is not None:
            scored = [(row, params) for row, params in enumerate(sampling.logprobs) if params is not None]
            if scored:
                rows = arrays["scored_rows"] = np.array([row for row, _ in scored])
                unscaled = sampling.greedy[rows] | self._raw_logprobs
                arrays["scored_temperature"] = np.where(unscaled, np.float32(1), arrays["temperature"][rows])
                arrays["requested_ids"] = requested_ids([params for _, params in scored])
        return arrays

    def _add_penalties(
        self,
        arrays: dict[str, np.ndarray],
        sampling: Sampling,
        penalties: Penalties,
        without_token: Collection[int],
    ) -> None:
        for fresh in penalties.fresh:
            self._seen.reserve(fresh.sequence_index)
            arrays[f"prompt {fresh.sequence_index}"] = self._seen.known(fresh.prompt_ids)
            arrays[f"output {fresh.sequence_index}"] = self._seen.known(fresh.output_ids)
        rows, sequence_indices = penalties.rows, penalties.sequence_indices
        if without_token:  # leave out rows that get no token, so that none is counted
            keep = np.array([row not in without_token for row in rows.tolist()], np.bool_)
            rows, sequence_indices = rows[keep], sequence_indices[keep]
        arrays["penalised_rows"], arrays["counted"] = rows, self._seen.indices_of(sequence_indices)
        for name in PENALTIES:
            arrays[f"penalised_{name}"] = _row_array(sampling, name)[rows]

    def _apply_penalties(self, logits: Tensor, sampling: Sampling, on_device: Mapping[str, Tensor]) -> None:
        for fresh in sampling.penalties.fresh if sampling.penalties is not None else ():
            self._seen.start(
                fresh.sequence_index,
                on_device[f"prompt {fresh.sequence_index}"],
                on_device[f"output {fresh.sequence_index}"],
            )
        rows, indices = on_device["penalised_rows"], on_device["counted"]
        if not len(rows):
            return
        strengths = [on_device[f"penalised_{name}"] for name in PENALTIES]
        if "draft_offsets" not in on_device:
            self._penalize(logits, rows, indices, self._seen.counts, self._seen.in_prompt, *strengths)
            return
        for piece in torch.arange(len(rows), device=rows.device).split(ROWS_WITH_DRAFTS):
            counts = self._seen.with_drafts(indices[piece], on_device["drafts_before"][piece])
            own = torch.arange(len(piece), device=rows.device)
            in_prompt = self._seen.in_prompt[indices[piece]]
            self._penalize(logits, rows[piece], own, counts, in_prompt, *(each[piece] for each in strengths))


class SeenTokens:
    """Token counts of sequences with penalties, on the device. Other sequence indices take no memory.

    Once a sequence index has a row of `counts` and `in_prompt`, it keeps this row for later sequences.
    """

    def __init__(self, vocab_size: int, num_sequences: int, device: torch.device) -> None:
        # [C, V], number of generated tokens by token id.
        self.counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        # [C, V], whether the prompt contains the token id.
        self.in_prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self._num_sequences = num_sequences
        self._indices: dict[int, int] = {}  # sequence index -> row, an index into [C]

    def reserve(self, sequence_index: int) -> None:
        """Give this sequence index a row, if it has none."""
        if self._indices.setdefault(sequence_index, len(self._indices)) == len(self.counts):
            self._grow()

    def start(self, sequence_index: int, prompt_ids: Tensor, output_ids: Tensor) -> None:
        """Initialise a row with the tokens of a new sequence. The int64 ids must come from `known`."""
        index = self._indices[sequence_index]
        self.in_prompt[index].zero_().index_fill_(0, prompt_ids, True)
        ones = torch.ones_like(output_ids, dtype=torch.int32)
        self.counts[index].zero_().index_add_(0, output_ids, ones)

    def indices_of(self, sequence_indices: np.ndarray) -> np.ndarray:
        """Return the rows of these sequence indices. Raises KeyError for an index without a row."""
        return np.array([self._indices[sequence_index] for sequence_index in sequence_indices.tolist()], np.int64)

    def add(self, indices: Tensor, ids: Tensor) -> None:
        """Count one generated token in each of these rows, which must be distinct."""
        self.counts[indices, ids] = self.counts[indices, ids] + 1

    def add_if(self, used: Tensor, indices: Tensor, ids: Tensor) -> None:
        """Count a generated token wherever `used`, bool [P], is true. A row may occur several times."""
        self.counts.index_put_((indices, ids), used.to(self.counts.dtype), accumulate=True)

    def with_drafts(self, indices: Tensor, drafts: Tensor) -> Tensor:
        """Return the counts [P, V] of these rows plus the draft tokens int64 [P, K]. -1 is padding."""
        is_draft = drafts >= 0
        counts = self.counts[indices]  # a copy
        return counts.scatter_add_(1, drafts.clamp(min=0), is_draft.to(counts.dtype))

    def known(self, ids: np.ndarray) -> np.ndarray:
        """Return the ids that are in the vocabulary, int64, without placeholders of media."""
        if len(ids) and int(ids.min()) < 0:
            raise ValueError("A sequence can only start from known tokens.")
        return ids[ids < self.counts.shape[1]].astype(np.int64)

    def _grow(self) -> None:
        size = min(max(1, 2 * len(self.counts)), self._num_sequences)
        for name in ("counts", "in_prompt"):
            old = getattr(self, name)
            new = old.new_zeros((size, old.shape[1]))
            new[: len(old)] = old
            setattr(self, name, new)


def _process(process: Callable[[Tensor], None], logits: Tensor) -> bool:
    """Run a custom logits processor on a row's logits [V]. Return False if it fails."""
    try:
        process(logits)
    except Exception as error:  # an error in a client's code: only this request fails
        logger.error("A custom logits processor failed.", exc_info=error)
        return False
    return True


def _joined_biases(bias: Bias | None, more: Mapping[int, tuple[np.ndarray, np.ndarray]]) -> Bias:
    """Merge the biases of the step with the biases from host data."""
    parts = [] if bias is None else [bias]
    parts += [Bias(np.full(len(ids), row, np.int64), ids, values) for row, (ids, values) in more.items()]
    return Bias(*(np.concatenate(arrays) for arrays in zip(*parts))) if len(parts) > 1 else parts[0]


def _row_array(sampling: Sampling, name: str) -> np.ndarray:
    """Return the values of a parameter at each position, [N], as a read-only array."""
    values = sampling.params.get(name)
    return _neutral(name, len(sampling.positions)) if values is None else values


@lru_cache(maxsize=4096)
def _neutral(name: str, num_rows: int) -> np.ndarray:
    array = ROW_ARRAYS[name]
    return np.full(num_rows, array.neutral, array.dtype)
