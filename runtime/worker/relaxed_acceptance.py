"""Accepts draft tokens that the model did not sample, if they are likely (`--speculative-accept-threshold-*`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ops.sampling import SamplingArrays
from ops.sampling.native import probabilities, second_uniform
from runtime.batch import Batch, Sampling


class RelaxedAcceptance(NamedTuple):
    """SGLang's thresholds for accepting a draft token of probability p.

    A draft token is accepted if p >= `single`, otherwise with probability min(1, p / `divisor`). Without thresholds, it
    is accepted if the model samples it, so with probability p. With thresholds more draft tokens are accepted, so
    outputs no longer have the model's distribution.
    """

    single: float  # in [0, 1]
    divisor: float  # in (0, 1]

    def choose(self, logits: Tensor, ids: Tensor, arrays: SamplingArrays, on_device: Mapping[str, Tensor]) -> Tensor:
        """Return the tokens int64 [N]: the sampled `ids`, or accepted draft tokens in their place.

        `logits` [N, V] are the logits from which `ids` were sampled. `on_device` has the arrays of `relaxed_arrays`.
        """
        rows, drafts = on_device["relaxed_rows"], on_device["relaxed_drafts"]
        own = SamplingArrays(*(field[rows] for field in arrays))
        p = probabilities(logits[rows], own, drafts)
        # Probability of acceptance if the model sampled another token.
        more = ((p / self.divisor).clamp(max=1) - p) / (1 - p).clamp(min=1e-12)
        accepted = (second_uniform(own.uniform) < more) | ((p >= self.single) & (p > 0))
        return ids.index_copy(0, rows, torch.where(accepted, drafts, ids[rows]))


def relaxed_arrays(batch: Batch, sampling: Sampling, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the sampled positions (of N) that a draft token follows, and these draft tokens, as arrays by name.

    Excludes greedy positions and positions with XTC sampling.
    """
    is_followed = np.zeros(len(sampling.row_of), np.bool_)
    is_followed[:-1] = sampling.row_of[:-1] == sampling.row_of[1:]
    [rows] = np.nonzero(is_followed & ~sampling.greedy & (arrays["xtc_probability"] == 0))
    if not len(rows):
        return {}
    places = sampling.positions[rows].astype(np.int64) + 1
    drafts = batch.token_ids[places].astype(np.int64)
    return {"relaxed_rows": rows.astype(np.int64), "relaxed_drafts": drafts, "relaxed_places": places}
