"""From token ids to vectors, and from vectors to logits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ops.select import Kernels
from runtime.layers.weight import Piece, whole


class Embedding(nn.Module):
    """token ids [T] -> [T, E]."""

    def __init__(self, name: str, vocab_size: int, size: int) -> None:
        super().__init__()
        self.name = name
        self.weight = nn.Parameter(torch.empty(vocab_size, size), requires_grad=False)  # [V, E]

    def pieces(self) -> Iterator[Piece]:
        yield whole(f"{self.name}.weight", self.weight, ("vocab", None))

    def forward(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.weight)


class Head(nn.Module):
    """hidden [R, E] -> float32 logits [R, V], with weights of its own or the embedding's (`tied`).

    Logits are multiplied by `scale`, then bounded to soft_cap * tanh(logit / soft_cap).
    """

    def __init__(
        self,
        name: str,
        embedding: Embedding,
        kernels: Kernels,
        *,
        tied: bool,
        scale: float | None = None,
        soft_cap: float | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.tied = tied
        self.scale = scale
        self.soft_cap = soft_cap
        self.kernels = kernels
        self._embedding = [embedding]  # in a list: a submodule only once in the tree
        self.weight = None if tied else nn.Parameter(torch.empty_like(embedding.weight), requires_grad=False)

    def pieces(self) -> Iterator[Piece]:
        if self.weight is not None and not self.tied:
            yield whole(f"{self.name}.weight", self.weight, ("vocab", None))

    def prepare(self) -> None:
        """A tied head gets a copy of its own where kernels want another layout; the embedding keeps the plain one."""
        plain = self._weight()
        weight = self.kernels.prepare(plain)
        if weight is not plain:
            self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.kernels.linear(hidden, self._weight()).float()
        if self.scale is not None:
            logits = logits * self.scale
        if self.soft_cap is not None:
            logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
        return logits

    def _weight(self) -> Tensor:
        return self._embedding[0].weight if self.weight is None else self.weight
