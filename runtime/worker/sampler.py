"""From a step's logits to its tokens: penalties, biases, the choice, log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ops.sampling import Choice, Choose, Penalize, Score, native
from ops.sampling.native import to_device
from runtime.batch import Bias, FreshSlot, Penalties, Sampling
from runtime.request import Logprobs
from runtime.worker.logprobs import ScoredRows, score_rows


class HostTokens(NamedTuple):
    """The R sampled rows on the host."""

    ids: list[int]  # [R]
    broken: list[int]  # of the R rows, those whose logits were not finite numbers
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
        broken = [row for row, is_sound in enumerate(sound) if not is_sound]
        if self.scored is None:
            return HostTokens(ids, broken, None)
        logprobs: list[Logprobs | None] = [None] * len(ids)
        for row, scores in zip(self.scored_rows, self.scored.read(host[2:])):
            logprobs[row] = scores if sound[row] else None
        return HostTokens(ids, broken, logprobs)


class Sampler:
    """Chooses the tokens of every step. Owned by the thread that runs the forward.

    Holds what the sequences of penalised slots have seen: 5 bytes for each token of the vocabulary and each
    slot that ever asked, 0.75 MB per slot at V = 150,000. A full pool doubles, up to `num_slots`.
    """

    def __init__(
        self,
        vocab_size: int,
        num_slots: int,
        device: torch.device,
        *,
        choose: Choose = native.choose,
        penalize: Penalize = native.penalize,
        score: Score = native.score,
    ) -> None:
        self._device = device
        self._seen = SeenTokens(vocab_size, num_slots, device)
        self._choose, self._penalize, self._score = choose, penalize, score

    def sample(self, logits: Tensor, sampling: Sampling) -> Sampled:
        """Choose a token for each row of `logits` (float32 [R, V], altered in place) without waiting.

        Logprobs are of the distribution after penalties, bias and temperature, before truncation; greedy rows
        count as temperature 1.
        """
        lanes = None
        if sampling.penalties is not None:
            lanes = self._apply_penalties(logits, sampling.penalties)
        if sampling.bias is not None:
            self._apply_bias(logits, sampling.bias)
        choice = _choice(sampling)
        ids, sound = self._choose(logits, choice)
        if sampling.penalties is not None and lanes is not None:
            self._seen.add(lanes, ids[self._there(sampling.penalties.rows)])
        rows = tuple(row for row, params in enumerate(sampling.logprobs or ()) if params is not None)
        return Sampled(ids, sound, self._score_rows(logits, sampling, choice, ids, rows), rows)

    def _apply_penalties(self, logits: Tensor, penalties: Penalties) -> Tensor:
        for fresh in penalties.fresh:
            self._seen.start(fresh)
        lanes = self._there(self._seen.lanes_of(penalties.slots))
        self._penalize(
            logits,
            self._there(penalties.rows),
            lanes,
            self._seen.counts,
            self._seen.in_prompt,
            *(self._there(p) for p in (penalties.frequency, penalties.presence, penalties.repetition)),
        )
        return lanes

    def _apply_bias(self, logits: Tensor, bias: Bias) -> None:
        rows, token_ids, values = (self._there(field) for field in bias)
        logits.index_put_((rows, token_ids), values, accumulate=True)

    def _score_rows(
        self, logits: Tensor, sampling: Sampling, choice: Choice, ids: Tensor, rows: tuple[int, ...]
    ) -> ScoredRows | None:
        if not rows:
            return None
        params = [p for p in sampling.logprobs or () if p is not None]
        temperature = torch.where(choice.greedy, 1.0, choice.temperature)[list(rows)]
        if len(rows) < len(logits):
            there = self._there(np.array(rows))
            logits, ids = logits[there], ids[there]
        return score_rows(logits, to_device(temperature, self._device), ids, params, self._score)

    def _there(self, host: np.ndarray) -> Tensor:
        return to_device(torch.tensor(host), self._device)


class SeenTokens:
    """What penalised sequences have seen, on the device. A slot that never asks takes no memory.

    A slot keeps its lane for good, since the sequences that use it later may ask as well.
    """

    def __init__(self, vocab_size: int, num_slots: int, device: torch.device) -> None:
        self.counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)  # [C, V], generated
        self.in_prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)  # [C, V]
        self._num_slots = num_slots
        self._lanes: dict[int, int] = {}  # by slot

    def start(self, fresh: FreshSlot) -> None:
        """Forget what the slot held and count what its new sequence has already seen."""
        lane = self._lanes.setdefault(fresh.slot, len(self._lanes))
        if lane == len(self.counts):
            self._grow()
        prompt, output = self._ids(fresh.prompt_ids), self._ids(fresh.output_ids)
        self.in_prompt[lane].zero_().index_fill_(0, prompt, True)
        self.counts[lane].zero_().index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def lanes_of(self, slots: np.ndarray) -> np.ndarray:
        """Where these slots' rows of `counts` and `in_prompt` are. Raises KeyError for one never started."""
        return np.array([self._lanes[slot] for slot in slots.tolist()], np.int64)

    def add(self, lanes: Tensor, ids: Tensor) -> None:
        """Count one generated token for each of these distinct lanes."""
        self.counts[lanes, ids] = self.counts[lanes, ids] + 1

    def _grow(self) -> None:
        size = min(max(1, 2 * len(self.counts)), self._num_slots)
        for name in ("counts", "in_prompt"):
            old = getattr(self, name)
            new = old.new_zeros((size, old.shape[1]))
            new[: len(old)] = old
            setattr(self, name, new)

    def _ids(self, ids: np.ndarray) -> Tensor:
        """Ids within the vocabulary: placeholders of images lie beyond it."""
        if len(ids) and int(ids.min()) < 0:
            raise ValueError("a slot can only start from known tokens")
        known = ids[ids < self.counts.shape[1]].astype(np.int64)
        return to_device(torch.from_numpy(known), self.counts.device)


def _choice(sampling: Sampling) -> Choice:
    return Choice(
        greedy=torch.from_numpy(sampling.greedy),
        temperature=torch.from_numpy(sampling.temperature),
        top_k=torch.from_numpy(sampling.top_k),
        top_p=torch.from_numpy(sampling.top_p),
        min_p=torch.from_numpy(sampling.min_p),
        uniform=torch.from_numpy(sampling.uniform),
    )
