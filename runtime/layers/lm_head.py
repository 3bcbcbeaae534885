"""From hidden states to logits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.errors import CheckpointError
from runtime.layers.build import Build
from runtime.layers.embedding import Embedding, VocabularyWeight
from runtime.layers.sharding import TensorParallelGroup, shard_range
from runtime.layers.weight import Shard, frozen, parameter, whole


class LMHead(VocabularyWeight):
    """hidden [R, E] -> float32 logits [R, V], with weights of its own or the embedding's (`tied`).

    Logits are multiplied by `scale`, then bounded to soft_cap * tanh(logit / soft_cap), and a `bias` is added. Cut over
    ranks, each computes the logits of its part of the vocabulary; rank 0 gets all of them and the others their own.
    The vectors of a `unit` head, which has its own, are scaled to length one before all that.
    """

    def __init__(
        self,
        name: str,
        embedding: Embedding,
        build: Build,
        *,
        tied: bool,
        bias: bool = False,
        scale: float | None = None,
        soft_cap: float | None = None,
        unit: bool = False,
    ) -> None:
        super().__init__()
        self.name = name
        self.unit = unit
        self.has_bias = bias
        self.scale = scale
        self.soft_cap = soft_cap
        self.kernels = build.kernels
        self.method = build.quantization
        self._embedding = [embedding]  # in a list: a submodule only once in the tree
        embedding.tied = self.tied = tied
        self._ids = embedding.ids
        self.allocate()
        self._group: TensorParallelGroup | None = None

    def allocate(self) -> None:
        self.weight, self.kept = None, nn.ModuleList()
        if not self.tied:
            self.weight = self.make_weight(self.name, self._ids, self._embedding[0].size)
        self.bias = parameter(self._ids.size) if self.has_bias else None

    def split(self, group: TensorParallelGroup) -> None:
        """Keep this rank's part of the vocabulary."""
        self._group = group
        self._ids = shard_range("vocab", self._ids.full, 1, group.rank, group.size)
        self.allocate()

    def shards(self) -> Iterator[Shard]:
        if self.weight is not None and not self.kept:
            yield whole(f"{self.name}.weight", self.weight, ("vocab", None), self._ids)
        if self.bias is not None:
            yield whole(f"{self.name}.bias", self.bias, ("vocab",), self._ids)

    def prepare(self) -> None:
        """Raises CheckpointError for a unit head in groups, whose scales are read with its codes."""
        if self.unit and (self.weight is None or self.kept):
            raise CheckpointError(
                f"{self.name}.weight must be in full precision: its vectors are scaled to length one."
            )
        if self.weight is not None and not self.kept:
            weight = F.normalize(self.weight, dim=1) if self.unit else self.weight
            self.weight = frozen(self.method.prepare_weight(weight, self.kernels))

    @property
    def prepared(self) -> Tensor:
        """The weight as kernels take it, [V, E]."""
        if self.weight is not None:
            return self.weight
        embedding = self._embedding[0]
        return embedding.weight if embedding.head_weight is None else embedding.head_weight

    @property
    def is_plain(self) -> bool:
        """Whether logits are products and nothing more, all of them on this rank."""
        return self._group is None and self.scale is None and self.soft_cap is None and self.bias is None

    def forward(self, hidden: Tensor) -> Tensor:
        products = self.kernels.logits(hidden, self.prepared)
        logits = self.kernels.as_logits(products, scale=self.scale, soft_cap=self.soft_cap)
        logits = logits if self.bias is None else logits + self.bias
        return logits if self._group is None else _gather(logits, self._ids.full, self._group)


def _gather(logits: Tensor, vocab_size: int, group: TensorParallelGroup) -> Tensor:
    """logits [R, own] -> [R, V] on rank 0. Shares may differ by one id; they travel at one width."""
    sizes = [shard_range("vocab", vocab_size, 1, rank, group.size).size for rank in range(group.size)]
    shares = group.gather(F.pad(logits, (0, max(sizes) - logits.shape[1])))
    if shares is None:
        return logits
    return torch.cat([share[:, :size] for share, size in zip(shares, sizes, strict=True)], dim=1)
