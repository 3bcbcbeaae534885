"""Classifier head: computes one score per label from the pooled hidden state of a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.layers.pooler import ACTIVATIONS
from runtime.layers.weight import Shard, Weighted, parameter, whole


class ScoreLayer(NamedTuple):
    """A linear layer of the checkpoint with an optional activation and norm."""

    name: str
    size: int  # size of the output
    bias: bool = True
    activation: str = ""
    norm: str | None = None  # checkpoint name of a layer norm without bias, applied after the activation; None: no norm
    norm_eps: float = 1e-5


class ScoreHead(nn.Module):
    """Applies score layers one after another, [M, E] -> [M, labels], always in float32."""

    def __init__(self, in_size: int, layers: Sequence[ScoreLayer]) -> None:
        super().__init__()
        self.parts = nn.ModuleList()
        for layer in layers:
            self.parts.append(_Product(layer, in_size))
            in_size = layer.size

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


class _Product(Weighted):
    def __init__(self, layer: ScoreLayer, in_size: int) -> None:
        super().__init__()
        self.layer = layer
        self.weight = parameter(layer.size, in_size, dtype=torch.float32)
        self.bias = parameter(layer.size, dtype=torch.float32) if layer.bias else None
        self.norm = parameter(layer.size, dtype=torch.float32) if layer.norm else None

    def shards(self) -> Iterator[Shard]:
        yield whole(f"{self.layer.name}.weight", self.weight, (None, None))
        if self.bias is not None:
            yield whole(f"{self.layer.name}.bias", self.bias, (None,))
        if self.norm is not None:
            yield whole(f"{self.layer.norm}.weight", self.norm, (None,))

    def forward(self, x: Tensor) -> Tensor:
        x = ACTIVATIONS[self.layer.activation](F.linear(x, self.weight, self.bias))
        return x if self.norm is None else F.layer_norm(x, self.norm.shape, self.norm, eps=self.layer.norm_eps)
