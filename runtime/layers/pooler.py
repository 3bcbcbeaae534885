"""Pooling: computes one vector from the hidden states of a text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from ops.sampling.native import to_device
from runtime.config.pooling import Pooling

ACTIVATIONS = {
    "": lambda x: x,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
}


class Pooler(nn.Module):
    """Pools the hidden states of each text, applies dense layers and normalises, in float32.

    `pooling` selects which of these steps are done, and how.
    `dense` holds the weight and bias of each layer in `pooling.dense`. `scorer` computes a classifier's scores; other
    models have none.
    """

    def __init__(
        self,
        pooling: Pooling | None = None,
        dense: Sequence[tuple[Tensor, Tensor | None]] = (),
        scorer: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.pooling = pooling or Pooling()
        self.dense = dense
        self._scorer = (scorer,)  # a tuple, because the scorer is already a submodule of the model

    def forward(self, hidden: Tensor, counts: NDArray[np.int32], rows: NDArray[np.int32]) -> Tensor:
        """Return the vectors of the M rows in `rows`, float32 [M, D].

        `hidden` [T, E] has the states of all B rows, one after another; row i has `counts[i]` tokens.
        """
        ends, lengths = np.cumsum(counts, dtype=np.int64)[rows], counts[rows].astype(np.int64)
        last = to_device(torch.from_numpy(ends - 1), hidden.device)
        if self.pooling.modes == ("last",):
            return self.finish(hidden[last])
        texts = _Texts(hidden, last, ends, lengths)
        return self.finish(torch.cat([texts.pooled(mode) for mode in self.pooling.modes], dim=-1))

    @property
    def only_scales(self) -> bool:
        """Whether `finish` at most scales vectors to length one: there are no dense layers and no scorer."""
        return not self.dense and self._scorer == (None,)

    def finish(self, pooled: Tensor) -> Tensor:
        """Apply the steps after pooling, [M, E] -> float32 [M, D]."""
        pooled = pooled.float()
        for layer, (weight, bias) in zip(self.pooling.dense, self.dense, strict=True):
            pooled = ACTIVATIONS[layer.activation](F.linear(pooled, weight, bias))
        [scorer] = self._scorer
        pooled = pooled if scorer is None else scorer(pooled)
        return F.normalize(pooled, dim=-1) if self.pooling.normalize else pooled


class _Texts:
    """The hidden states of M texts. The tokens of a text are consecutive rows of `hidden`."""

    def __init__(self, hidden: Tensor, last: Tensor, ends: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        index = np.concatenate([np.arange(end - count, end) for end, count in zip(ends, counts)])
        self.hidden, self.last, self.host_counts = hidden, last, counts
        self.counts = to_device(torch.from_numpy(counts), hidden.device)
        self.tokens = to_device(torch.from_numpy(index), hidden.device)
        self.text = to_device(torch.from_numpy(np.repeat(np.arange(len(counts)), counts)), hidden.device)

    def pooled(self, mode: str) -> Tensor:
        """Return the states pooled by one mode, float32 [M, E]."""
        if mode == "last":
            return self.hidden[self.last].float()
        if mode == "cls":
            return self.hidden[self.last - self.counts + 1].float()
        states = self.hidden[self.tokens].float()
        if mode == "max":
            shape = (len(self.host_counts), states.shape[1])
            index = self.text.unsqueeze(1).expand_as(states)
            lowest = torch.full(shape, -torch.inf, device=states.device)
            return lowest.scatter_reduce_(0, index, states, "amax")
        counts = self.counts.float().unsqueeze(1)
        if mode == "weighted_mean":  # the weight of a token is its position in the text, counted from 1
            position = self.tokens - (self.last - self.counts + 1)[self.text] + 1
            return self._sum(states * position.unsqueeze(1)) / (counts * (counts + 1) / 2)
        total = self._sum(states)
        return total / (counts.sqrt() if mode == "mean_sqrt_len" else counts)

    def _sum(self, states: Tensor) -> Tensor:
        zeros = torch.zeros(len(self.host_counts), states.shape[1], device=states.device)
        return zeros.index_add_(0, self.text, states)
