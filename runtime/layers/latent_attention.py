"""Attention over latent vectors from which every head's keys and values follow (DeepSeek V2, arXiv 2405.04434)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from ops.attention import AttentionOptions
from ops.latent import LatentWeights, fewest_to_expand
from runtime.layers.build import Build
from runtime.layers.forward_batch import ForwardBatch, KVSpec
from runtime.layers.linear import Linear, from_heads
from runtime.layers.norm import RMSNorm
from runtime.layers.rope import Rope
from runtime.layers.sharding import TensorParallelGroup, shard_range, whole_range
from runtime.layers.weight import Shard, SubLayer, Weighted, frozen, parameter, whole

NORM_EPS = 1e-6  # of the norms of latent vectors, whatever that of the others is


class LatentAttention(Weighted):
    """Multi-head latent attention: the cache holds one vector a token for all heads, and a key that is rotated.

    Single tokens and short rows are absorbed: what makes keys and values of a latent vector is applied to queries and
    outputs instead. Rows of `expand_from` tokens or more have keys and values expanded for the while (`ops.latent`).

    `index` is the layer's number in the model. Of a head's query `plain_dim` dimensions meet the latent vector and
    `rope_dim` the rotated key. `query_rank` is the size of the queries' own latent vector; None: they have none.
    """

    absorbing: nn.Parameter
    values: nn.Parameter
    expanding: nn.Parameter

    def __init__(
        self,
        name: str,
        index: int,
        size: int,
        num_heads: int,
        build: Build,
        *,
        rank: int,
        query_rank: int | None,
        plain_dim: int,
        rope_dim: int,
        value_dim: int,
        rope: Rope,
        scale: float,
        bias: bool,
    ) -> None:
        super().__init__()
        self.name = name
        self.index = index
        self.num_heads = num_heads
        self.rank, self.plain_dim, self.rope_dim, self.value_dim = rank, plain_dim, rope_dim, value_dim
        self.rope = rope
        self.scale = scale
        self.kernels = build.kernels
        # On a GPU all rows are absorbed: where expanding pays there has not been measured.
        expands = build.device.type == "cpu" and not build.always_absorbed
        self.expand_from = fewest_to_expand(rank, plain_dim, value_dim) if expands else None
        self.qk_dim = plain_dim + rope_dim
        latents = [SubLayer(f"{name}.kv_a_proj_with_mqa", rank + rope_dim)]
        query = SubLayer(f"{name}.q_proj", num_heads * self.qk_dim, "heads", self.qk_dim)
        self.query_norm = None
        if query_rank is not None:
            latents.insert(0, SubLayer(f"{name}.q_a_proj", query_rank))
            query = query._replace(name=f"{name}.q_b_proj")
            self.query_norm = RMSNorm(f"{name}.q_a_layernorm", query_rank, NORM_EPS, build)
        self._sizes = (query_rank or 0, rank, rope_dim)
        self.latents = Linear(size, latents, build, bias=bias)
        self.query = Linear(query_rank or size, [query], build)
        self.norm = RMSNorm(f"{name}.kv_a_layernorm", rank, NORM_EPS, build)
        self.out = from_heads(f"{name}.o_proj", num_heads, value_dim, size, build, bias=bias)
        self._rows = whole_range(num_heads * (plain_dim + value_dim))
        self.allocate()

    @property
    def cache_spec(self) -> KVSpec:
        """The latent vector and the rotated key, in the place of one head's keys and values."""
        return KVSpec(1, self.rank + self.rope_dim, values_in_keys=True)

    def allocate(self) -> None:
        # Of each head its keys', then its values' rows.
        self.expansion = parameter(self._rows.size, self.rank)

    def split(self, group: TensorParallelGroup) -> None:
        """Keep this rank's heads."""
        unit = self.plain_dim + self.value_dim
        self._rows = shard_range("heads", self._rows.full, unit, group.rank, group.size)
        self.num_heads = self._rows.size // unit
        self.allocate()

    def shards(self) -> Iterator[Shard]:
        yield whole(f"{self.name}.kv_b_proj.weight", self.expansion, ("heads", None), self._rows)

    def prepare(self) -> None:
        heads = self.expansion.view(self.num_heads, -1, self.rank)
        prepare = self.kernels.prepare_heads
        keys, values = heads.split((self.plain_dim, self.value_dim), dim=1)  # [H, N, R], [H, V, R]
        self.absorbing, self.values = frozen(prepare(keys.transpose(1, 2))), frozen(prepare(values))
        self.expanding = frozen(prepare(keys) if self.expand_from is not None else keys.new_empty(0))
        self.expansion = frozen(self.expansion.new_empty(0, self.rank))

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, E] -> [T, E]; the tokens' latent vectors are in the cache then."""
        reduced, latent, rotated = self.latents(x, batch).split(self._sizes, dim=-1)
        if self.query_norm is not None:
            x = self.query_norm(reduced)
        query = self.query(x, batch).unflatten(-1, (self.num_heads, self.qk_dim))
        plain, turned = query.split((self.plain_dim, self.rope_dim), dim=-1)
        turned, rotated = self.rope(turned, rotated.unsqueeze(1), batch)
        kernels, cache = self.kernels, batch.cache[self.index]
        key = kernels.join(self.norm(latent), rotated.squeeze(1))  # [T, 1, R + rope_dim]
        cache.store(kernels, key, key, batch, {})
        weights = LatentWeights(self.absorbing, self.values, self.value_dim, self.expanding, self.expand_from)
        options = AttentionOptions(self.scale)
        return self.out(cache.attend_latent(kernels, plain, turned, weights, batch, options), batch)
