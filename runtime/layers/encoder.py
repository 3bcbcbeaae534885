"""Parts of encoders: attention within each row, nothing cached, and the sum of embeddings that they begin with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from runtime.layers.build import Build
from runtime.layers.embedding import Embedding
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.linear import Linear
from runtime.layers.norm import Norm
from runtime.layers.rope import Rope
from runtime.layers.sharding import ShardRange
from runtime.layers.weight import Shard, SubLayer, Weighted, parameter, whole


class EncoderAttention(nn.Module):
    """Project, rotate where there is a `rope`, attend to the whole row or to `reach` positions on each side, project.

    `qkv` are the sub-layers of q, k and v, one after the other, `out` that of the result. `bias_by_distance`, which
    layers may share, is added to scores.
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
        """x [T, E] -> [T, E]."""
        heads = self.qkv(x, batch).unflatten(-1, (3 * self.num_heads, -1))  # [T, 3H, D]
        q, k, v = heads.split(self.num_heads, dim=1)
        if self.rope is not None:
            q, k = self.rope(q, k, batch)
        options = {} if self.bias_by_distance is None else {"bias": self.bias_by_distance.of(batch)}
        attended = self.kernels.attend_texts(
            q, k, v, batch.attention, scale=self.scale, reach=self.reach, **options
        )
        return self.out(attended.flatten(1), batch)


class BiasByDistance(Weighted):
    """What is added to scores of each head by how far apart two tokens are: learned for each of `num_buckets` ranges of
    distances, half of them behind a token (T5's, arXiv 1910.10683, section 2.1; without its decoders).
    """

    MAX_DISTANCE = 128

    def __init__(self, name: str, num_buckets: int, num_heads: int) -> None:
        super().__init__()
        self.name = name
        self.weight = parameter(num_buckets, num_heads)

    def shards(self) -> Iterator[Shard]:
        yield whole(f"{self.name}.weight", self.weight, (None, None))

    def of(self, batch: ForwardBatch) -> Callable[[int], Tensor]:
        """The bias [H, L, L] of a row of L tokens, made once in a step for each length."""
        kept = batch.attention.plan_cache

        def made(length: int) -> Tensor:
            key = (self.name, length)
            if key not in kept:
                kept[key] = self._bias(length)
            return kept[key]

        return made

    def _bias(self, length: int) -> Tensor:
        positions = torch.arange(length, device=self.weight.device)
        distance = positions.unsqueeze(0) - positions.unsqueeze(1)  # of a key from the query
        half = len(self.weight) // 2
        exact, far = half // 2, distance.abs().clamp(min=1)
        spread = (far / exact).log() / math.log(self.MAX_DISTANCE / exact) * (half - exact)
        wide = (exact + spread.long()).clamp(max=half - 1)
        bucket = (distance > 0) * half + torch.where(far < exact, distance.abs(), wide)
        return self.weight[bucket].permute(2, 0, 1).contiguous()


class EncoderEmbedding(Weighted):
    """The vectors of words, of positions and of the text (first or second) that a token is of, summed and normalised.

    The first `skipped` positions of the checkpoint's table are nobody's. Without `num_positions` or `num_types` there
    is no such table. `words` is the name of the table of words.
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

    def shards(self) -> Iterator[Shard]:
        if self.positions is not None:
            num_positions, _ = self.positions.shape
            rows = ShardRange(self.skipped, num_positions, self.skipped + num_positions)
            yield whole(f"{self.name}.position_embeddings.weight", self.positions, (None, None), rows)
        if self.types is not None:
            yield whole(f"{self.name}.token_type_embeddings.weight", self.types, (None, None))

    def forward(self, batch: ForwardBatch) -> Tensor:
        """-> [T, E]."""
        types, places, embed = self.types, self.positions, self.kernels.embed_placed
        if types is None and places is None:
            return self.norm(self.words(batch))
        type = None if types is None else types[0]
        if types is not None and batch.token_types is not None and len(types) > 1:
            words = embed(batch.token_ids, self.words.weight, batch.positions, places, None)
            return self.norm(words + types[batch.token_types])
        return self.norm(embed(batch.token_ids, self.words.weight, batch.positions, places, type))
