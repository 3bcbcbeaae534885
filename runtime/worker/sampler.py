"""From a step's logits to its tokens: penalties, biases, truncation, the draw, log-probabilities."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ops.sampling import Masks, SamplingArrays, Scores, native
from runtime.batch import Batch, Penalties, PromptLogprobs, Sampling
from runtime.request import Logprobs
from runtime.sampling_params import ROW_ARRAYS
from runtime.worker.device import Device
from runtime.worker.host_data import NOTHING, Arrived, HostDataGate
from runtime.worker.logits_dump import LogitsDump
from runtime.worker.logprobs import (
    ScoredPrompts,
    ScoredRows,
    prompt_arrays,
    requested_ids,
    score_prompts,
    score_rows,
)
from runtime.worker.step_inputs import NO_ARRAYS, Staged, Staging

logger = logging.getLogger("penstock.scheduler")

# Of the row arrays, those that choose a token from the logits, and those that change the logits before.
FIELDS = SamplingArrays._fields
PARAMS = tuple(name for name in FIELDS if name in ROW_ARRAYS)
PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")


def chooses_plainly(sampling: Sampling) -> bool:
    """Whether tokens follow from the logits and `SamplingArrays` alone, and nothing but tokens is asked for."""
    return (
        sampling.bias is None
        and sampling.penalties is None
        and sampling.logprobs is None
        and not sampling.host_data
        and sampling.params.keys() <= set(PARAMS)
    )


def chooses_greedily(sampling: Sampling) -> bool:
    """Whether nothing is asked for but each row's likeliest token."""
    return bool(sampling.greedy.all()) and chooses_plainly(sampling)


def sampling_arrays(there: Mapping[str, Tensor]) -> SamplingArrays:
    """Those of them that choose tokens."""
    return SamplingArrays(*(there[name] for name in FIELDS))


class HostTokens(NamedTuple):
    """The R sampled rows on the host."""

    tokens: list[list[int]]  # [R], one each; none where the row's host data was late
    failed: list[int]  # of the R rows, those whose logits were not finite numbers, or whose constraint failed
    logprobs: list[Logprobs | None] | None  # [R]; None: nobody asked
    stuck: list[int]  # of the failed rows, those whose constraint failed, or left nothing


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """The R sampled rows on the device. Copy `tensors()` to the host, wait, then `read` the copies."""

    ids: Tensor  # int64 [R], always valid ids
    sound: Tensor  # bool [R]
    scored: ScoredRows | None = None
    scored_rows: tuple[int, ...] = ()  # of the R rows, those in `scored`
    host_data: Arrived = NOTHING

    def tensors(self) -> list[Tensor]:
        """What must be copied to the host before `read`."""
        return [self.ids, self.sound, *(self.scored.tensors() if self.scored else ())]

    def read(self, host: Sequence[Tensor]) -> HostTokens:
        """Plain values from the copies of `tensors()`. Touches no device."""
        tokens, sound = [[token_id] for token_id in host[0].tolist()], host[1].tolist()
        without_token, failed = self.host_data.without_token, self.host_data.failed
        for row in without_token:
            tokens[row], sound[row] = [], True
        for row in failed:
            sound[row] = False
        unsound = [row for row, is_sound in enumerate(sound) if not is_sound]
        stuck = [row for row in unsound if self.host_data.is_stuck(row)] if unsound else []
        if self.scored is None:
            return HostTokens(tokens, unsound, None, stuck)
        logprobs: list[Logprobs | None] = [None] * len(tokens)
        for row, scores in zip(self.scored_rows, self.scored.read(host[2:])):
            logprobs[row] = scores if sound[row] and tokens[row] else None
        return HostTokens(tokens, unsound, logprobs, stuck)


class Sampler:
    """Chooses the tokens of every step. Owned by the thread that runs the forward.

    What a step brings from the host goes to the device with the step's inputs (`arrays`), or in one copy after the
    forward where it has to be waited for. Holds what penalised sequences have seen: 5 bytes for each token of the
    vocabulary and each sequence index that ever asked, 0.75 MB per sequence at V = 150,000. A full pool doubles, up
    to `num_sequences`.
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
        dump: LogitsDump | None = None,
    ) -> None:
        self._is_host = device.is_host
        self._staging = Staging(device)
        self._seen = SeenTokens(vocab_size, num_sequences, device.torch_device)
        self._gate = HostDataGate(device, vocab_size)
        self._choose, self._penalize, self._score = choose, penalize, score
        self._raw_logprobs = raw_logprobs
        self._dump = dump

    @property
    def must_see_logits(self) -> bool:
        """Whether every step's logits are wanted here, also of steps whose tokens could be chosen without."""
        return self._dump is not None

    def arrays(self, batch: Batch) -> Mapping[str, np.ndarray]:
        """What a step's rows need on the device, as far as it is known before the forward."""
        sampling = batch.sampling
        arrays = NO_ARRAYS
        if sampling is not None and not sampling.host_data:
            arrays = self._host_arrays(sampling, NOTHING)
        return {**arrays, **prompt_arrays(batch.prompt_logprobs)} if batch.prompt_logprobs else arrays

    def sample(self, logits: Tensor, batch: Batch, staged: Staged | None = None) -> Sampled:
        """Choose a token for each row of `logits` (float32 [R, V], altered in place) of a batch that samples.

        `staged` are the batch's `arrays`; None: nothing is on the device yet. Waits for nothing but the host data of
        rows with a constraint, and for that only until the forward is done. Logprobs are of the distribution after
        penalties, bias, host data and temperature, before truncation; greedy rows count as temperature 1. With
        `raw_logprobs` they are of `logits` as given.
        """
        sampling = batch.sampling
        if sampling is None:
            raise ValueError("No row of this batch is sampled.")
        arrived = self._gate.arrived(batch)
        if self._dump is not None:
            self._dump.write(logits, batch)
        if staged is None or sampling.host_data:
            host = self._host_arrays(sampling, arrived)
            staged = Staged(host, self._staging.copy(host))
        host, there = staged
        scored_logits = None
        if "scored_rows" in there and self._raw_logprobs:
            scored_logits = logits[there["scored_rows"]]  # a copy
        if "penalised_rows" in there:
            self._apply_penalties(logits, sampling, there)
        if "bias_rows" in there:
            logits.index_put_((there["bias_rows"], there["bias_ids"]), there["bias_values"], accumulate=True)
        failed = [row for row, process in arrived.processes.items() if not _process(process, logits[row])]
        masks = Masks(there["masked_rows"], there["bitmasks"]) if "masked_rows" in there else None
        plan = None if self._is_host else SamplingArrays(*(torch.from_numpy(host[name]) for name in FIELDS))
        ids, sound = self._choose(logits, sampling_arrays(there), plan, masks)
        if "penalised_rows" in there:
            self._seen.add(there["counted"], ids[there["penalised_rows"]])
        if failed:
            arrived = arrived._replace(failed={*arrived.failed, *failed})
        if sampling.logprobs is None or "scored_rows" not in there:
            return Sampled(ids, sound, host_data=arrived)
        rows, scored_ids = tuple(host["scored_rows"].tolist()), ids
        if len(rows) < len(ids):
            scored_ids = ids[there["scored_rows"]]
        if scored_logits is None:
            scored_logits = logits if len(rows) == len(ids) else logits[there["scored_rows"]]
        params = [params for params in sampling.logprobs if params is not None]
        temperature, requested = there["scored_temperature"], there["requested_ids"]
        scored = score_rows(scored_logits, scored_ids, temperature, requested, params, self._score)
        return Sampled(ids, sound, scored, rows, arrived)

    def score_prompts(
        self,
        hidden: Tensor,
        logits_of: Callable[[Tensor], Tensor],
        wanted: tuple[PromptLogprobs, ...],
        staged: Staged,
    ) -> ScoredPrompts:
        """Score prompt tokens by the raw logits before them; see `logprobs.score_prompts`."""
        return score_prompts(hidden, logits_of, wanted, staged.there, self._score)

    def _host_arrays(self, sampling: Sampling, arrived: Arrived) -> dict[str, np.ndarray]:
        """All that the device needs for these rows, by name."""
        arrays = {"greedy": sampling.greedy, "uniform": sampling.uniform, **sampling.params}
        for name in PARAMS:
            if name not in arrays:
                arrays[name] = _neutral(name, len(sampling.rows))
        if sampling.penalties is not None:
            self._add_penalties(arrays, sampling, sampling.penalties, arrived.without_token)
        if sampling.bias is not None:
            arrays["bias_rows"], arrays["bias_ids"], arrays["bias_values"] = sampling.bias
        if len(arrived.rows):
            arrays["masked_rows"], arrays["bitmasks"] = arrived.rows, arrived.bitmasks
        if sampling.logprobs is not None:
            wanted = [(row, params) for row, params in enumerate(sampling.logprobs) if params is not None]
            if wanted:
                rows = arrays["scored_rows"] = np.array([row for row, _ in wanted])
                plain = sampling.greedy[rows] | self._raw_logprobs
                arrays["scored_temperature"] = np.where(plain, np.float32(1), arrays["temperature"][rows])
                arrays["requested_ids"] = requested_ids([params for _, params in wanted])
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
        if without_token:  # no token of theirs is to be counted
            keep = np.array([row not in without_token for row in rows.tolist()], np.bool_)
            rows, sequence_indices = rows[keep], sequence_indices[keep]
        arrays["penalised_rows"], arrays["counted"] = rows, self._seen.indices_of(sequence_indices)
        for name in PENALTIES:
            arrays[f"penalised_{name}"] = _row_array(sampling, name)[rows]

    def _apply_penalties(self, logits: Tensor, sampling: Sampling, there: Mapping[str, Tensor]) -> None:
        for fresh in sampling.penalties.fresh if sampling.penalties is not None else ():
            self._seen.start(
                fresh.sequence_index,
                there[f"prompt {fresh.sequence_index}"],
                there[f"output {fresh.sequence_index}"],
            )
        if not len(there["penalised_rows"]):
            return
        self._penalize(
            logits,
            there["penalised_rows"],
            there["counted"],
            self._seen.counts,
            self._seen.in_prompt,
            *(there[f"penalised_{name}"] for name in PENALTIES),
        )


class SeenTokens:
    """What penalised sequences have seen, on the device. A sequence index that never asks takes no memory.

    A sequence index keeps its row of `counts` and `in_prompt` for good: sequences that get it later may ask as well.
    """

    def __init__(self, vocab_size: int, num_sequences: int, device: torch.device) -> None:
        self.counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)  # [C, V], generated
        self.in_prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)  # [C, V]
        self._num_sequences = num_sequences
        self._indices: dict[int, int] = {}  # by sequence index, into [C]

    def reserve(self, sequence_index: int) -> None:
        """Make room for what the sequences with this index see."""
        if self._indices.setdefault(sequence_index, len(self._indices)) == len(self.counts):
            self._grow()

    def start(self, sequence_index: int, prompt_ids: Tensor, output_ids: Tensor) -> None:
        """Forget what its index held and count what its new sequence has already seen: `known` ids, int64."""
        index = self._indices[sequence_index]
        self.in_prompt[index].zero_().index_fill_(0, prompt_ids, True)
        ones = torch.ones_like(output_ids, dtype=torch.int32)
        self.counts[index].zero_().index_add_(0, output_ids, ones)

    def indices_of(self, sequence_indices: np.ndarray) -> np.ndarray:
        """The rows of these sequences in `counts` and `in_prompt`. Raises KeyError for one that has none."""
        return np.array(
            [self._indices[sequence_index] for sequence_index in sequence_indices.tolist()], np.int64
        )

    def add(self, indices: Tensor, ids: Tensor) -> None:
        """Count one generated token in each of these distinct rows."""
        self.counts[indices, ids] = self.counts[indices, ids] + 1

    def known(self, ids: np.ndarray) -> np.ndarray:
        """Ids within the vocabulary, int64: placeholders of images lie beyond it."""
        if len(ids) and int(ids.min()) < 0:
            raise ValueError("a sequence can only start from known tokens")
        return ids[ids < self.counts.shape[1]].astype(np.int64)

    def _grow(self) -> None:
        size = min(max(1, 2 * len(self.counts)), self._num_sequences)
        for name in ("counts", "in_prompt"):
            old = getattr(self, name)
            new = old.new_zeros((size, old.shape[1]))
            new[: len(old)] = old
            setattr(self, name, new)


def _process(process: Callable[[Tensor], None], logits: Tensor) -> bool:
    """Run a custom logits processor on a row's logits [V]; False when it failed."""
    try:
        process(logits)
    except Exception as error:  # foreign code: it costs its own request, not the step
        logger.error("a custom logits processor failed", exc_info=error)
        return False
    return True


def _row_array(sampling: Sampling, name: str) -> np.ndarray:
    """A parameter of each row, [R]; not to be written to."""
    values = sampling.params.get(name)
    return _neutral(name, len(sampling.rows)) if values is None else values


@lru_cache(maxsize=4096)
def _neutral(name: str, num_rows: int) -> np.ndarray:
    array = ROW_ARRAYS[name]
    return np.full(num_rows, array.neutral, array.dtype)
