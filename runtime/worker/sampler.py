"""From a step's logits to its tokens: penalties, biases, truncation, the draw, log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ops.sampling import Choose, Penalize, SamplingArrays, Score, native
from runtime.batch import PromptLogprobs, Sampling
from runtime.request import Logprobs
from runtime.sampling_params import ROW_ARRAYS
from runtime.worker.device import Device
from runtime.worker.forward_batch import Staging
from runtime.worker.logprobs import ScoredPrompts, ScoredRows, requested_ids, score_prompts, score_rows

# Of the row arrays, those that choose a token from the logits, and those that change the logits before.
PARAMS = tuple(name for name in SamplingArrays._fields if name in ROW_ARRAYS)
PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")


class HostTokens(NamedTuple):
    """The R sampled rows on the host."""

    ids: list[int]  # [R]
    failed: list[int]  # of the R rows, those whose logits were not finite numbers
    logprobs: list[Logprobs | None] | None  # [R]; None: nobody asked


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """The R sampled rows on the device. Copy `tensors()` to the host, wait, then `read` the copies."""

    ids: Tensor  # int64 [R], always valid ids
    sound: Tensor  # bool [R]
    scored: ScoredRows | None
    scored_rows: tuple[int, ...]  # of the R rows, those in `scored`

    def tensors(self) -> list[Tensor]:
        """What must be copied to the host before `read`."""
        return [self.ids, self.sound, *(self.scored.tensors() if self.scored else ())]

    def read(self, host: Sequence[Tensor]) -> HostTokens:
        """Plain values from the copies of `tensors()`. Touches no device."""
        ids, sound = host[0].tolist(), host[1].tolist()
        failed = [row for row, is_sound in enumerate(sound) if not is_sound]
        if self.scored is None:
            return HostTokens(ids, failed, None)
        logprobs: list[Logprobs | None] = [None] * len(ids)
        for row, scores in zip(self.scored_rows, self.scored.read(host[2:])):
            logprobs[row] = scores if sound[row] else None
        return HostTokens(ids, failed, logprobs)


class Sampler:
    """Chooses the tokens of every step. Owned by the thread that runs the forward.

    Everything that a step brings from the host is copied to the device at once. Holds what penalised sequences
    have seen: 5 bytes for each token of the vocabulary and each sequence index that ever asked, 0.75 MB per
    sequence at V = 150,000. A full pool doubles, up to `num_slots`.
    """

    def __init__(
        self,
        vocab_size: int,
        num_slots: int,
        device: Device,
        *,
        choose: Choose = native.choose,
        penalize: Penalize = native.penalize,
        score: Score = native.score,
    ) -> None:
        self._is_host = device.is_host
        self._staging = Staging(device)
        self._seen = SeenTokens(vocab_size, num_slots, device.torch_device)
        self._choose, self._penalize, self._score = choose, penalize, score

    def sample(self, logits: Tensor, sampling: Sampling) -> Sampled:
        """Choose a token for each row of `logits` (float32 [R, V], altered in place) without waiting.

        Logprobs are of the distribution after penalties, bias and temperature, before truncation; greedy rows
        count as temperature 1.
        """
        host = self._host_arrays(sampling)
        there = self._staging.copy(host)
        penalties = sampling.penalties
        if penalties is not None:
            for fresh in penalties.fresh:
                self._seen.start(fresh.slot, there[f"prompt {fresh.slot}"], there[f"output {fresh.slot}"])
            self._penalize(
                logits,
                there["penalised_rows"],
                there["counted"],
                self._seen.counts,
                self._seen.in_prompt,
                *(there[f"penalised_{name}"] for name in PENALTIES),
            )
        if sampling.bias is not None:
            logits.index_put_((there["bias_rows"], there["bias_ids"]), there["bias_values"], accumulate=True)
        arrays = SamplingArrays(*(there[name] for name in SamplingArrays._fields))
        plan = None
        if not self._is_host:
            plan = SamplingArrays(*(torch.from_numpy(host[name]) for name in SamplingArrays._fields))
        ids, sound = self._choose(logits, arrays, plan)
        if penalties is not None:
            self._seen.add(there["counted"], ids[there["penalised_rows"]])
        rows = tuple(row for row, params in enumerate(sampling.logprobs or ()) if params is not None)
        scored = None
        if rows:
            of_rows = (logits, ids)
            if len(rows) < len(logits):
                of_rows = (logits[there["scored_rows"]], ids[there["scored_rows"]])
            params = [p for p in sampling.logprobs or () if p is not None]
            scored = score_rows(
                *of_rows, there["scored_temperature"], there["requested_ids"], params, self._score
            )
        return Sampled(ids, sound, scored, rows)

    def score_prompts(
        self, hidden: Tensor, logits_of: Callable[[Tensor], Tensor], wanted: tuple[PromptLogprobs, ...]
    ) -> ScoredPrompts:
        """Score prompt tokens by the raw logits before them; see `logprobs.score_prompts`."""
        return score_prompts(hidden, logits_of, wanted, self._staging, self._score)

    def _host_arrays(self, sampling: Sampling) -> dict[str, np.ndarray]:
        """All that the device needs for these rows, by name."""
        arrays: dict[str, np.ndarray] = {"greedy": sampling.greedy, "uniform": sampling.uniform}
        for name in PARAMS:
            arrays[name] = _row_array(sampling, name)
        penalties = sampling.penalties
        if penalties is not None:
            arrays["penalised_rows"] = penalties.rows
            for name in PENALTIES:
                arrays[f"penalised_{name}"] = _row_array(sampling, name)[penalties.rows]
            for fresh in penalties.fresh:
                self._seen.reserve(fresh.slot)
                arrays[f"prompt {fresh.slot}"] = self._seen.known(fresh.prompt_ids)
                arrays[f"output {fresh.slot}"] = self._seen.known(fresh.output_ids)
            arrays["counted"] = self._seen.indices_of(penalties.slots)
        if sampling.bias is not None:
            arrays["bias_rows"], arrays["bias_ids"], arrays["bias_values"] = sampling.bias
        wanted = [(row, params) for row, params in enumerate(sampling.logprobs or ()) if params is not None]
        if wanted:
            rows = arrays["scored_rows"] = np.array([row for row, _ in wanted])
            temperature = arrays["temperature"][rows]
            arrays["scored_temperature"] = np.where(sampling.greedy[rows], np.float32(1), temperature)
            arrays["requested_ids"] = requested_ids([params for _, params in wanted])
        return arrays


class SeenTokens:
    """What penalised sequences have seen, on the device. A slot that never asks takes no memory.

    A slot keeps its row of `counts` and `in_prompt` for good, since the sequences that use it later may ask as well.
    """

    def __init__(self, vocab_size: int, num_slots: int, device: torch.device) -> None:
        self.counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)  # [C, V], generated
        self.in_prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)  # [C, V]
        self._num_slots = num_slots
        self._indices: dict[int, int] = {}  # by slot, into [C]

    def reserve(self, slot: int) -> None:
        """Make room for what this slot's sequences see."""
        if self._indices.setdefault(slot, len(self._indices)) == len(self.counts):
            self._grow()

    def start(self, slot: int, prompt_ids: Tensor, output_ids: Tensor) -> None:
        """Forget what the slot held and count what its new sequence has already seen: `known` ids, int64."""
        index = self._indices[slot]
        self.in_prompt[index].zero_().index_fill_(0, prompt_ids, True)
        ones = torch.ones_like(output_ids, dtype=torch.int32)
        self.counts[index].zero_().index_add_(0, output_ids, ones)

    def indices_of(self, slots: np.ndarray) -> np.ndarray:
        """The rows of these slots in `counts` and `in_prompt`. Raises KeyError for one that has none."""
        return np.array([self._indices[slot] for slot in slots.tolist()], np.int64)

    def add(self, indices: Tensor, ids: Tensor) -> None:
        """Count one generated token in each of these distinct rows."""
        self.counts[indices, ids] = self.counts[indices, ids] + 1

    def known(self, ids: np.ndarray) -> np.ndarray:
        """Ids within the vocabulary, int64: placeholders of images lie beyond it."""
        if len(ids) and int(ids.min()) < 0:
            raise ValueError("a slot can only start from known tokens")
        return ids[ids < self.counts.shape[1]].astype(np.int64)

    def _grow(self) -> None:
        size = min(max(1, 2 * len(self.counts)), self._num_slots)
        for name in ("counts", "in_prompt"):
            old = getattr(self, name)
            new = old.new_zeros((size, old.shape[1]))
            new[: len(old)] = old
            setattr(self, name, new)


def _row_array(sampling: Sampling, name: str) -> np.ndarray:
    """A parameter of each row, [R]; not to be written to."""
    values = sampling.params.get(name)
    return _neutral(name, len(sampling.rows)) if values is None else values


@lru_cache(maxsize=4096)
def _neutral(name: str, num_rows: int) -> np.ndarray:
    array = ROW_ARRAYS[name]
    return np.full(num_rows, array.neutral, array.dtype)
