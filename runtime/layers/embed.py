"""From token ids to vectors, and from vectors to logits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ops.select import Kernels
from runtime.layers.sharding import Span, Team, span, whole_span
from runtime.layers.weight import Piece, whole


class Embedding(nn.Module):
    """token ids [T] -> [T, E]. Cut over ranks, each looks up its own ids and the sum is everybody's."""

    def __init__(self, name: str, vocab_size: int, size: int, kernels: Kernels) -> None:
        super().__init__()
        self.name = name
        self.kernels = kernels
        self.weight = nn.Parameter(torch.empty(vocab_size, size), requires_grad=False)  # [V, E]
        self._ids = whole_span(vocab_size)
        self._team: Team | None = None

    def split(self, team: Team) -> None:
        """Keep this rank's part of the vocabulary."""
        self._ids, self.weight = _own_rows(self.weight, team)
        self._team = team

    def pieces(self) -> Iterator[Piece]:
        yield whole(f"{self.name}.weight", self.weight, ("vocab", None), self._ids)

    def forward(self, token_ids: Tensor) -> Tensor:
        if self._team is None:
            return self.kernels.embed(token_ids, self.weight)
        return self._team.all_reduce(self.kernels.embed(token_ids, self.weight, self._ids.start))


class Head(nn.Module):
    """hidden [R, E] -> float32 logits [R, V], with weights of its own or the embedding's (`tied`).

    Logits are multiplied by `scale`, then bounded to soft_cap * tanh(logit / soft_cap). Cut over ranks, each
    computes the logits of its part of the vocabulary; rank 0 gets all of them and the others their own.
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
        self._ids = whole_span(len(embedding.weight))
        self._team: Team | None = None

    def split(self, team: Team) -> None:
        """Keep this rank's part of the vocabulary."""
        self._team = team
        if self.weight is not None:
            self._ids, self.weight = _own_rows(self.weight, team)

    def pieces(self) -> Iterator[Piece]:
        if self.weight is not None and not self.tied:
            yield whole(f"{self.name}.weight", self.weight, ("vocab", None), self._ids)

    def prepare(self) -> None:
        """The weight as kernels want it. A tied head gets its own only where the embedding cannot read that one."""
        plain = self._weight()
        weight = self.kernels.prepare(plain)
        if weight is plain:
            return
        prepared = nn.Parameter(weight, requires_grad=False)
        if self.tied and self.kernels.reads(weight):
            self._embedding[0].weight = prepared
        else:
            self.weight = prepared

    @property
    def prepared(self) -> Tensor:
        """The weight as kernels take it, [V, E]."""
        return self._weight()

    @property
    def is_plain(self) -> bool:
        """Whether logits are products and nothing more, all of them on this rank."""
        return self._team is None and self.scale is None and self.soft_cap is None

    def forward(self, hidden: Tensor) -> Tensor:
        products = self.kernels.logits(hidden, self._weight())
        logits = self.kernels.as_logits(products, scale=self.scale, soft_cap=self.soft_cap)
        return logits if self._team is None else _gather(logits, self._ids.full, self._team)

    def _weight(self) -> Tensor:
        return self._embedding[0].weight if self.weight is None else self.weight


def _own_rows(weight: nn.Parameter, team: Team) -> tuple[Span, nn.Parameter]:
    ids = span("vocab", len(weight), 1, team.rank, team.size)
    return ids, nn.Parameter(weight.new_empty(ids.size, weight.shape[1]), requires_grad=False)


def _gather(logits: Tensor, vocab_size: int, team: Team) -> Tensor:
    """logits [R, own] -> [R, V] on rank 0. Parts may differ by one id; they travel at one width."""
    sizes = [span("vocab", vocab_size, 1, rank, team.size).size for rank in range(team.size)]
    parts = team.gather(F.pad(logits, (0, max(sizes) - logits.shape[1])))
    if parts is None:
        return logits
    return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1)
