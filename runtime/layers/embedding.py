"""From token ids to vectors, and from vectors to logits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ops.select import Kernels
from runtime.layers.sharding import ShardRange, TensorParallelGroup, shard_range, whole_range
from runtime.layers.weight import Shard, whole


class Embedding(nn.Module):
    """token ids [T] -> [T, E]. Cut over ranks, each looks up its own ids and the sum is everybody's."""

    def __init__(self, name: str, vocab_size: int, size: int, kernels: Kernels) -> None:
        super().__init__()
        self.name = name
        self.kernels = kernels
        self.weight = nn.Parameter(torch.empty(vocab_size, size), requires_grad=False)  # [V, E]
        self._ids = whole_range(vocab_size)
        self._group: TensorParallelGroup | None = None

    def split(self, group: TensorParallelGroup) -> None:
        """Keep this rank's part of the vocabulary."""
        self._ids, self.weight = _own_rows(self.weight, group)
        self._group = group

    def shards(self) -> Iterator[Shard]:
        yield whole(f"{self.name}.weight", self.weight, ("vocab", None), self._ids)

    def forward(self, token_ids: Tensor) -> Tensor:
        if self._group is None:
            return self.kernels.embed(token_ids, self.weight)
        return self._group.all_reduce(self.kernels.embed(token_ids, self.weight, self._ids.start))


class LMHead(nn.Module):
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
        self._ids = whole_range(len(embedding.weight))
        self._group: TensorParallelGroup | None = None

    def split(self, group: TensorParallelGroup) -> None:
        """Keep this rank's part of the vocabulary."""
        self._group = group
        if self.weight is not None:
            self._ids, self.weight = _own_rows(self.weight, group)

    def shards(self) -> Iterator[Shard]:
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
        return self._group is None and self.scale is None and self.soft_cap is None

    def forward(self, hidden: Tensor) -> Tensor:
        products = self.kernels.logits(hidden, self._weight())
        logits = self.kernels.as_logits(products, scale=self.scale, soft_cap=self.soft_cap)
        return logits if self._group is None else _gather(logits, self._ids.full, self._group)

    def _weight(self) -> Tensor:
        return self._embedding[0].weight if self.weight is None else self.weight


def _own_rows(weight: nn.Parameter, group: TensorParallelGroup) -> tuple[ShardRange, nn.Parameter]:
    ids = shard_range("vocab", len(weight), 1, group.rank, group.size)
    return ids, nn.Parameter(weight.new_empty(ids.size, weight.shape[1]), requires_grad=False)


def _gather(logits: Tensor, vocab_size: int, group: TensorParallelGroup) -> Tensor:
    """logits [R, own] -> [R, V] on rank 0. Parts may differ by one id; they travel at one width."""
    sizes = [shard_range("vocab", vocab_size, 1, rank, group.size).size for rank in range(group.size)]
    parts = group.gather(F.pad(logits, (0, max(sizes) - logits.shape[1])))
    if parts is None:
        return logits
    return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1)
