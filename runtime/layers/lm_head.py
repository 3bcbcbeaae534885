"""LM head. Computes logits from hidden states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.errors import CheckpointError
from runtime.layers.build import Build
from runtime.layers.embedding import Embedding, VocabularyWeight
from runtime.layers.sharding import ShardRange, TensorParallelGroup, shard_range, whole_range
from runtime.layers.weight import Shard, frozen, parameter, whole

NOT_ADAPTED: Mapping[int, Tensor] = MappingProxyType({})


class LMHead(VocabularyWeight):
    """Maps hidden [R, E] to float32 logits [R, V]. A `tied` head uses the embedding's weight.

    Logits are multiplied by `scale`, then replaced by soft_cap * tanh(logit / soft_cap). Then `bias` is added. With
    tensor parallelism each rank computes the logits of its part of the vocabulary; rank 0 returns all logits, other
    ranks return their part. `unit` scales the rows or the columns of the weight to length one; such a head cannot be
    tied. To scale columns, each rank reads the weight of the whole vocabulary and then keeps its part.
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
        unit: Literal["rows", "columns"] | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.unit = unit
        self.has_bias = bias
        self.scale = scale
        self.soft_cap = soft_cap
        self.kernels = build.kernels
        self.method = build.quantization
        self._embedding = [embedding]  # a list, so that the embedding does not become a submodule twice
        embedding.tied = self.tied = tied
        self._ids = embedding.ids
        self.allocate()
        self._group: TensorParallelGroup | None = None

    def allocate(self) -> None:
        self.weight, self.kept = None, nn.ModuleList()
        if not self.tied:
            self.weight = self.make_weight(self.name, self._ids_read, self._embedding[0].size)
        self.bias = parameter(self._ids.size) if self.has_bias else None

    def split(self, group: TensorParallelGroup) -> None:
        """Keep this rank's part of the vocabulary."""
        self._group = group
        self._ids = shard_range("vocab", self._ids.full, 1, group.rank, group.size)
        self.allocate()

    def shards(self) -> Iterator[Shard]:
        if self.weight is not None and not self.kept:
            yield whole(f"{self.name}.weight", self.weight, ("vocab", None), self._ids_read)
        if self.bias is not None:
            yield whole(f"{self.name}.bias", self.bias, ("vocab",), self._ids)

    def prepare(self) -> None:
        """Prepare the weight. Raises CheckpointError if a `unit` head is tied or its weight is quantised."""
        if self.unit and (self.weight is None or self.kept):
            raise CheckpointError(
                f"{self.name}.weight must be in full precision, because its {self.unit} are scaled to length one."
            )
        if self.weight is not None and not self.kept:
            self.weight = frozen(self.method.prepare_weight(self._scaled(self.weight), self.kernels))

    def _scaled(self, weight: Tensor) -> Tensor:
        """Return this rank's rows of the loaded weight, after scaling its rows or columns as `unit` says."""
        if self.unit != "columns":
            return F.normalize(weight, dim=1) if self.unit else weight
        lengths = weight.float().square().sum(0).sqrt().clamp_min(1e-7)
        return (weight[self._ids.slice].float() / lengths).to(weight.dtype)

    @property
    def _ids_read(self) -> ShardRange:
        """The part of the vocabulary whose rows of the weight this rank reads."""
        return whole_range(self._ids.full) if self.unit == "columns" else self._ids

    @property
    def prepared(self) -> Tensor:
        """The weight [V, E] in the layout that kernels take."""
        if self.weight is not None:
            return self.weight
        embedding = self._embedding[0]
        return embedding.weight if embedding.head_weight is None else embedding.head_weight

    @property
    def is_plain(self) -> bool:
        """Whether this rank computes all logits, as the product with the weight alone (no scale, cap or bias)."""
        return self._group is None and self.scale is None and self.soft_cap is None and self.bias is None

    @property
    def size(self) -> int:
        """E, the size of hidden states."""
        return self._embedding[0].size

    @property
    def device(self) -> torch.device:
        return self.prepared.device

    @property
    def ids(self) -> ShardRange:
        """This rank's part of the vocabulary."""
        return self._ids

    def forward(self, hidden: Tensor, adapted: Mapping[int, Tensor] = NOT_ADAPTED) -> Tensor:
        """Return the logits. `adapted` maps the slot of each adapter that may change the head to its rows, [n]."""
        products = self.kernels.logits(hidden, self.prepared)
        for slot, rows in adapted.items():
            change = self.changes.get(slot)
            if change is not None:
                products = products.float()
                states = hidden[rows].float()
                changed = products[rows] + (states @ change.a.float().T) @ change.b.float().T
                changed[:, change.ids] = states @ change.rows.float().T
                products[rows] = changed
        logits = self.kernels.as_logits(products, scale=self.scale, soft_cap=self.soft_cap)
        logits = logits if self.bias is None else logits + self.bias
        return logits if self._group is None else _gather(logits, self._ids.full, self._group)


def _gather(logits: Tensor, vocab_size: int, group: TensorParallelGroup) -> Tensor:
    """Gather each rank's logits into [R, V] on rank 0. Shards differ by at most one id and are padded to one width."""
    sizes = [shard_range("vocab", vocab_size, 1, rank, group.size).size for rank in range(group.size)]
    shards = group.gather(F.pad(logits, (0, max(sizes) - logits.shape[1])))
    if shards is None:
        return logits
    return torch.cat([shard[:, :size] for shard, size in zip(shards, sizes, strict=True)], dim=1)
