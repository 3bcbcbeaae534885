"""From tokens to vectors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from runtime.layers.build import Build
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.sharding import TensorParallelGroup, shard_range, whole_range
from runtime.layers.weight import Shard, Weighted, frozen, parameter, whole


class Embedding(Weighted):
    """The tokens' vectors [T, E], times `scale`, which is rounded to the model's dtype as transformers does it.

    Cut over ranks, each looks up its own ids and the sum is everybody's. If the LM head is `tied`, the weight is
    prepared for that as well: once for both where the lookup reads that layout, else the head has one of its own.
    """

    def __init__(
        self, name: str, vocab_size: int, size: int, build: Build, *, scale: float | None = None
    ) -> None:
        super().__init__()
        self.name = name
        self.kernels = build.kernels
        self.method = build.quantization
        self.scale = scale
        self.tied = False
        self.size = size
        self.ids = whole_range(vocab_size)
        self.allocate()
        self._group: TensorParallelGroup | None = None

    def allocate(self) -> None:
        self.weight = parameter(self.ids.size, self.size)  # [V, E]
        self.head_weight: nn.Parameter | None = (
            None  # of a tied head, in a layout that the lookup cannot read
        )

    def split(self, group: TensorParallelGroup) -> None:
        """Keep this rank's part of the vocabulary."""
        self.ids = shard_range("vocab", self.ids.full, 1, group.rank, group.size)
        self.allocate()
        self._group = group

    def shards(self) -> Iterator[Shard]:
        yield whole(f"{self.name}.weight", self.weight, ("vocab", None), self.ids)

    def prepare(self) -> None:
        if self.scale is not None:
            self.scale = torch.tensor(self.scale, dtype=self.weight.dtype, device="cpu").item()
        if not self.tied:
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
