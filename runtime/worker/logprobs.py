"""Computes log-probabilities of sampled tokens and prompts, and reads them on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ops.sampling import Scores
from ops.sampling.native import score as native_score
from runtime.batch import PromptLogprobs
from runtime.request import LOWEST_LOGPROB, LogprobParams, Logprobs

# Maximum number of prompt positions for which logits are in memory at the same time.
CHUNK = 256


@dataclass(frozen=True, slots=True, eq=False)
class ScoredRows:
    """The scores of n positions on the device, with the log-probability parameters of each position."""

    scores: Scores  # scores of the n positions
    chosen_ids: Tensor  # int64 [n]
    params: tuple[LogprobParams, ...]  # [n]

    def tensors(self) -> list[Tensor]:
        """Return the tensors that must be copied to the host before `read`."""
        return [*self.scores, self.chosen_ids]

    def read(self, host: Sequence[Tensor]) -> list[Logprobs]:
        """Return one `Logprobs` for each position, from the host copies of `tensors()`."""
        chosen, top, top_ids, requested, chosen_ids = (tensor.tolist() for tensor in host)
        return [
            Logprobs(
                chosen=[(_finite(chosen[i]), chosen_ids[i])],
                top=[_pairs(top[i][: params.top], top_ids[i])] if params.top else [],
                requested=[_pairs(requested[i], params.token_ids)] if params.token_ids else [],
            )
            for i, params in enumerate(self.params)
        ]


def requested_ids(params: Sequence[LogprobParams]) -> np.ndarray:
    """Return the token ids whose log-probabilities each of the n rows requests, int64 [n, M], padded with 0."""
    padded = np.zeros((len(params), max(len(p.token_ids) for p in params)), np.int64)
    for row, p in zip(padded, params):
        row[: len(p.token_ids)] = p.token_ids
    return padded


def score_rows(
    logits: Tensor,
    chosen_ids: Tensor,
    temperature: Tensor,
    requested: Tensor,
    params: Sequence[LogprobParams],
    score: Callable[..., Scores] = native_score,
) -> ScoredRows:
    """Score n rows of `logits` [n, V] at the chosen ids [n] and at the ids that `params` request.

    `requested` is the result of `requested_ids(params)`, on the device of the logits.
    """
    num_top = max(p.top for p in params)
    return ScoredRows(score(logits, temperature, chosen_ids, num_top, requested), chosen_ids, tuple(params))


@dataclass(frozen=True, slots=True, eq=False)
class ScoredPrompts:
    """The scores of the requested prompt positions on the device, in chunks.

    A chunk may contain positions of several prompts.
    """

    requests: tuple[PromptLogprobs, ...]
    chunks: tuple[ScoredRows, ...]

    def tensors(self) -> list[Tensor]:
        """Return the tensors that must be copied to the host before `read`."""
        return [tensor for chunk in self.chunks for tensor in chunk.tensors()]

    def read(self, host: Sequence[Tensor]) -> list[tuple[int, Logprobs]]:
        """Return (row, log-probabilities of its positions) for each request, from the host copies of `tensors()`."""
        copies = iter(host)
        positions = (
            position for chunk in self.chunks for position in chunk.read([next(copies) for _ in chunk.tensors()])
        )
        return [(w.row, _join([next(positions) for _ in w.targets])) for w in self.requests]


def prompt_arrays(requests: Sequence[PromptLogprobs], chunk: int = CHUNK) -> dict[str, np.ndarray]:
    """Return the arrays that `score_prompts` needs on the device, by name."""
    lengths = [len(w.targets) for w in requests]
    return {
        "prompt_indices": prompt_indices(requests),
        "prompt_targets": np.concatenate([w.targets for w in requests]).astype(np.int64),
        "prompt_requested_ids": requested_ids([w.params for w in requests]),
        "prompt_owners": np.repeat(np.arange(len(requests)), lengths),
        "prompt_temperature": np.ones(chunk, np.float32),
    }


def score_prompts(
    hidden: Tensor,
    logits_of: Callable[[Tensor, Tensor], Tensor],
    requests: tuple[PromptLogprobs, ...],
    on_device: Mapping[str, Tensor],
    score: Callable[..., Scores] = native_score,
) -> ScoredPrompts:
    """Score prompt tokens by the raw logits of the positions before them.

    `hidden` is [T, E] of the flat batch. `logits_of` maps states [n, E] and their positions in the batch [n] to float32
    logits [n, V]. `on_device` has the arrays of `prompt_arrays`. The logits of at most `chunk` positions are in memory
    at the same time.
    """
    params = [w.params for w in requests for _ in w.targets]
    indices, temperature = on_device["prompt_indices"], on_device["prompt_temperature"]
    chunks = []
    for first in range(0, len(params), len(temperature)):
        part = slice(first, first + len(temperature))
        logits = logits_of(hidden[indices[part]], indices[part])
        requested = on_device["prompt_requested_ids"][on_device["prompt_owners"][part]]
        ones, targets = temperature[: len(logits)], on_device["prompt_targets"][part]
        chunks.append(score_rows(logits, targets, ones, requested, params[part], score))
    return ScoredPrompts(requests, tuple(chunks))


def prompt_indices(requests: Sequence[PromptLogprobs]) -> np.ndarray:
    """Return the positions of the flat batch whose logits are needed for prompt log-probabilities, int64."""
    return np.concatenate([np.arange(0), *(np.arange(w.offset, w.offset + len(w.targets)) for w in requests)])


def _join(positions: Sequence[Logprobs]) -> Logprobs:
    return Logprobs(
        chosen=[item for p in positions for item in p.chosen],
        top=[item for p in positions for item in p.top],
        requested=[item for p in positions for item in p.requested],
    )


def _pairs(values: Sequence[float], ids: Sequence[int]) -> list[tuple[float, int]]:
    return [(_finite(value), token_id) for value, token_id in zip(values, ids)]


def _finite(value: float) -> float:
    return max(value, LOWEST_LOGPROB)
