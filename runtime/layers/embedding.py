"""From tokens to vectors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ops.select import Kernels
from runtime.layers.build import Build
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.quantization import LinearLayout, QuantizationMethod, Unquantized
from runtime.layers.sharding import ShardRange, TensorParallelGroup, shard_range, whole_range
from runtime.layers.weight import Shard, SubLayer, Weighted, frozen, parameter, whole

ROWS_AT_ONCE = 4096  # of a vocabulary that are unpacked, a multiple of what kernels pack together


class VocabularyWeight(Weighted):
    """A layer with a weight [V', E] for a part of a vocabulary.

    It stays in the groups that the checkpoint has it in where the method keeps them, and then is packed piece by piece.
    """

    kernels: Kernels
    method: QuantizationMethod

    def make_weight(self, name: str, ids: ShardRange, size: int) -> nn.Parameter:
        """What `weight` is to be: without rows where those are packed into it of what is `kept`."""
        layout = LinearLayout((SubLayer(name, ids.full, "vocab"),), (ids,), whole_range(size), None)
        keeps = self.method.keeps(layout)
        starts = range(0, ids.size if keeps else 0, ROWS_AT_ONCE)
        self.kept = nn.ModuleList(KeptRows(self, layout, start) for start in starts)
        return parameter(0 if keeps else ids.size, size)


class KeptRows(Weighted):
    """Some rows of a vocabulary's weight, in groups until they are packed behind those before them."""

    by_itself = True

    def __init__(self, owner: VocabularyWeight, layout: LinearLayout, first: int) -> None:
        super().__init__()
        [ids] = layout.rows
        size = min(ROWS_AT_ONCE, ids.size - first)
        self._owner = [owner]  # in a list: it is no part of this one
        self._first, self._num_ids = first, ids.size
        self._layout = layout._replace(rows=(ShardRange(ids.start + first, size, ids.full),))
        owner.method.allocate(self, self._layout)

    def shards(self) -> Iterator[Shard]:
        return self._owner[0].method.shards(self, self._layout)

    def prepare(self) -> None:
        owner, first = self._owner[0], self._first
        weight = owner.get_parameter("weight")
        place = {"into": weight, "first": first} if first else {"out_size": self._num_ids}
        packed = owner.kernels.prepare_grouped(owner.method.take(self), weight.dtype, **place)
        owner.weight = frozen(packed)


class Embedding(VocabularyWeight):
    """The tokens' vectors [T, E], times `scale`, which is rounded to the model's dtype as transformers does it.

    Cut over ranks, each looks up its own ids and the sum is everybody's. If the LM head is `tied`, the weight is
    prepared for that as well: once for both where the lookup reads that layout, else the head has one of its own.
    """

    def __init__(
        self,
        name: str,
        vocab_size: int,
        size: int,
        build: Build,
        *,
        scale: float | None = None,
        quantized: bool = True,
    ) -> None:
        super().__init__()
        self.name = name
        self.kernels = build.kernels
        self.method = build.quantization if quantized else Unquantized()
        self.scale = scale
        self.tied = False
        self.size = size
        self.ids = whole_range(vocab_size)
        self.allocate()
        self._group: TensorParallelGroup | None = None

    def allocate(self) -> None:
        self.weight = self.make_weight(self.name, self.ids, self.size)
        # Of a tied head, in a layout that the lookup cannot read.
        self.head_weight: nn.Parameter | None = None

    def split(self, group: TensorParallelGroup) -> None:
        """Keep this rank's part of the vocabulary."""
        self.ids = shard_range("vocab", self.ids.full, 1, group.rank, group.size)
        self.allocate()
        self._group = group

    def shards(self) -> Iterator[Shard]:
        if not self.kept:
            yield whole(f"{self.name}.weight", self.weight, ("vocab", None), self.ids)

    def prepare(self) -> None:
        if self.scale is not None:
            self.scale = torch.tensor(self.scale, dtype=self.weight.dtype, device="cpu").item()
        if self.kept or not self.tied:
            return
        prepared = self.method.prepare_weight(self.weight, self.kernels)
        if prepared is self.weight:
            return
        if self.kernels.reads(prepared):
            self.weight = frozen(prepared)
        else:
            self.head_weight = frozen(prepared)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """The vectors of the batch's ids, and in their places those that the batch brings itself."""
        if batch.input_embeds is None:
            return self._look_up(batch.token_ids)
        vectors = batch.input_embeds.to(self.weight.dtype)
        if batch.embeds_mask is None:
            return vectors
        given = batch.embeds_mask
        looked_up = self._look_up(batch.token_ids.masked_fill(given, 0))
        return torch.where(given.unsqueeze(1), vectors, looked_up)

    def _look_up(self, token_ids: Tensor) -> Tensor:
        embed = self.kernels.embed
        if self._group is None:
            return embed(token_ids, self.weight, scale=self.scale)
        return self._group.all_reduce(embed(token_ids, self.weight, self.ids.start, scale=self.scale))
