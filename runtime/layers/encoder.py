"""Layers of encoders: bidirectional attention without a cache, and the sum of token, position and type embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from runtime.batch import SECOND_START
from runtime.layers.build import Build
from runtime.layers.embedding import Embedding
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.linear import Linear
from runtime.layers.norm import Norm
from runtime.layers.rope import Rope
from runtime.layers.sharding import ShardRange
from runtime.layers.weight import Shard, SubLayer, Weighted, parameter, whole


class EncoderAttention(nn.Module):
    """Bidirectional attention: project, rotate if there is a `rope`, attend to all tokens of the row, project.

    If `reach` is set, a token attends only to the nearest `reach` positions on each side. `qkv` lists the sub-layers of
    q, k and v in this order; `out` is the output projection. `bias_by_distance` is added to the attention scores;
    several layers may share one `BiasByDistance`.
    """

    def __init__(
        self,
        qkv: Sequence[SubLayer],
        out: SubLayer,
        num_heads: int,
        build: Build,
        *,
        bias: bool,
        rope: Rope | None = None,
        reach: int | None = None,
        bias_by_distance: BiasByDistance | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scale = (out.size // num_heads) ** -0.5
        self.kernels = build.kernels
        self.rope = rope
        self.reach = reach
        self.bias_by_distance = bias_by_distance
        self.qkv = Linear(out.size, qkv, build, bias=bias)
        self.out = Linear(out.size, [out], build, bias=bias)

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Return the attention output, x [T, E] -> [T, E]."""
        heads = self.qkv(x, batch).unflatten(-1, (3 * self.num_heads, -1))  # [T, 3H, D]
        q, k, v = heads.split(self.num_heads, dim=1)
        if self.rope is not None:
            q, k = self.rope(q, k, batch)
        options = {} if self.bias_by_distance is None else {"bias": self.bias_by_distance.of(batch)}
        attended = self.kernels.attend_bidirectional(
            q, k, v, batch.attention, scale=self.scale, reach=self.reach, **options
        )
        return self.out(attended.flatten(1), batch)


class BiasByDistance(Weighted):
    """Learned relative position bias of each head (T5's encoder, arXiv 1910.10683, section 2.1).

    Each of `num_buckets` buckets covers a range of distances. Half of the buckets are for keys after the query.
    """

    MAX_DISTANCE = 128

    def __init__(self, name: str, num_buckets: int, num_heads: int) -> None:
        super().__init__()
        self.name = name
        self.weight = parameter(num_buckets, num_heads)

    def shards(self) -> Iterator[Shard]:
        yield whole(f"{self.name}.weight", self.weight, (None, None))

    def of(self, batch: ForwardBatch) -> Callable[[int], Tensor]:
        """Return a function from a row's length L to the bias [H, L, L]. Rows of equal length share one bias."""
        plan_cache = batch.attention.plan_cache

        def bias(length: int) -> Tensor:
            key = (self.name, length)
            if key not in plan_cache:
                plan_cache[key] = self._bias(length)
            return plan_cache[key]

        return bias

    def _bias(self, length: int) -> Tensor:
        positions = torch.arange(length, device=self.weight.device)
        distance = positions.unsqueeze(0) - positions.unsqueeze(1)  # key position minus query position
        half = len(self.weight) // 2
        exact, far = half // 2, distance.abs().clamp(min=1)
        spread = (far / exact).log() / math.log(self.MAX_DISTANCE / exact) * (half - exact)
        wide = (exact + spread.long()).clamp(max=half - 1)
        bucket = (distance > 0) * half + torch.where(far < exact, distance.abs(), wide)
        return self.weight[bucket].permute(2, 0, 1).contiguous()


class EncoderEmbedding(Weighted):
    """Normalised sum of token, position and token type embeddings.

    The first `skipped` rows of the checkpoint's position table are unused. If `num_positions` is 0, there is no
    position table; if `num_types` is 0, there is no token type table. `words` is the checkpoint's name of the token
    embedding.
    """

    def __init__(
        self,
        name: str,
        vocab_size: int,
        num_positions: int,
        size: int,
        norm: Norm,
        build: Build,
        *,
        skipped: int = 0,
        num_types: int = 0,
        words: str = "word_embeddings",
    ) -> None:
        super().__init__()
        self.name = name
        self.kernels = build.kernels
        self.words = Embedding(f"{name}.{words}", vocab_size, size, build, quantized=False)
        self.norm = norm
        self.skipped = skipped
        self.positions = parameter(num_positions, size) if num_positions else None
        self.types = parameter(num_types, size) if num_types else None
        self.row_values = (SECOND_START,) if num_types > 1 else ()

    def shards(self) -> Iterator[Shard]:
        if self.positions is not None:
            num_positions, _ = self.positions.shape
            rows = ShardRange(self.skipped, num_positions, self.skipped + num_positions)
            yield whole(f"{self.name}.position_embeddings.weight", self.positions, (None, None), rows)
        if self.types is not None:
            yield whole(f"{self.name}.token_type_embeddings.weight", self.types, (None, None))

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return the normalised embeddings [T, E] of the batch's tokens."""
        if self.types is None and self.positions is None:
            return self.norm(self.words(batch))
        second_starts = batch.values_of_tokens(SECOND_START) if self.row_values else None
        x = self.kernels.embed_with_positions(
            batch.token_ids, self.words.weight, batch.positions, self.positions, self.types, second_starts
        )
        return self.norm(x)
