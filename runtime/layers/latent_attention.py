"""Multi-head latent attention, MLA (DeepSeek V2, arXiv 2405.04434)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from ops.attention import AttentionOptions
from ops.latent import LatentWeights, min_tokens_to_expand
from ops.rope import LatentNorm
from runtime.layers.build import Build
from runtime.layers.forward_batch import ForwardBatch, KVSpec
from runtime.layers.linear import Linear, from_heads
from runtime.layers.norm import RMSNorm
from runtime.layers.rope import Rope
from runtime.layers.sharding import TensorParallelGroup, shard_range, whole_range
from runtime.layers.weight import Shard, SubLayer, Weighted, frozen, parameter, whole

NORM_EPS = 1e-6  # epsilon of the norms of latent vectors; config.json's rms_norm_eps does not apply to them


class LatentAttention(Weighted):
    """Attention whose cache holds, for each token, one latent vector and one rotated key shared by all heads.

    Decode tokens and short rows use absorption: the matrices that expand a latent vector into keys and values are
    applied to queries and outputs instead. For rows of at least `expand_from` tokens the layer temporarily expands the
    keys and values (`ops.latent`).

    `index` is the layer's number in the model. A head's query has `nope_dim` dimensions for the key that is computed
    from the latent vector, and `rope_dim` dimensions for the rotated key. `query_rank` is the size of the latent vector
    from which queries are computed, or None if queries are computed from x directly.
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
        nope_dim: int,
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
        self.rank, self.nope_dim, self.rope_dim, self.value_dim = rank, nope_dim, rope_dim, value_dim
        self.rope = rope
        self.scale = scale
        self.kernels = build.kernels
        # On a GPU all rows use absorption, because it is not known from which length on expansion would be faster.
        expands = build.device.type == "cpu" and not build.always_absorbed
        self.expand_from = min_tokens_to_expand(rank, nope_dim, value_dim) if expands else None
        self.qk_dim = nope_dim + rope_dim
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
        self._rows = whole_range(num_heads * (nope_dim + value_dim))
        self.allocate()

    @property
    def cache_spec(self) -> KVSpec:
        """One kv head, whose key is the latent vector followed by the rotated key."""
        return KVSpec(1, self.rank + self.rope_dim, values_in_keys=True)

    def allocate(self) -> None:
        # For each head, the checkpoint's tensor holds first the rows of the keys, then the rows of the values.
        self.expansion = parameter(self._rows.size, self.rank)

    def split(self, group: TensorParallelGroup) -> None:
        """Keep this rank's heads. The linear layers are split separately."""
        unit = self.nope_dim + self.value_dim
        self._rows = shard_range("heads", self._rows.full, unit, group.rank, group.size)
        self.num_heads = self._rows.size // unit
        self.allocate()

    def shards(self) -> Iterator[Shard]:
        yield whole(f"{self.name}.kv_b_proj.weight", self.expansion, ("heads", None), self._rows)

    def prepare(self) -> None:
        heads = self.expansion.view(self.num_heads, -1, self.rank)
        prepare = self.kernels.prepare_heads
        keys, values = heads.split((self.nope_dim, self.value_dim), dim=1)  # [H, N, R], [H, V, R]
        self.absorbing, self.values = frozen(prepare(keys.transpose(1, 2))), frozen(prepare(values))
        self.expanding = frozen(prepare(keys) if self.expand_from is not None else keys.new_empty(0))
        self.expansion = frozen(self.expansion.new_empty(0, self.rank))

    @property
    def first_product(self) -> Linear:
        """The linear layer that reads the input. The norm before it may round this input (`RMSNorm.round_for`)."""
        return self.latents

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Return the attention output, x [T, E] -> [T, E], and store the tokens' latent vectors in the cache."""
        reduced, latent, k_pe = self.latents(x, batch).split(self._sizes, dim=-1)
        if self.query_norm is not None:
            x = self.query_norm(reduced)
        query = self.query(x, batch).unflatten(-1, (self.num_heads, self.qk_dim))
        q_nope, q_pe = query.split((self.nope_dim, self.rope_dim), dim=-1)
        kernels, cache, rotation = self.kernels, batch.cache[self.index], self.rope.rotation(batch)
        norm = LatentNorm(self.norm.weight, self.norm.eps)
        q_pe = cache.rotate_store_latent(kernels, q_pe, latent, k_pe, norm, rotation, batch)
        weights = LatentWeights(self.absorbing, self.values, self.value_dim, self.expanding, self.expand_from)
        options = AttentionOptions(self.scale)
        return self.out(cache.attend_latent(kernels, q_nope, q_pe, weights, batch, options), batch)
