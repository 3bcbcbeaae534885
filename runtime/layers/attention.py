"""Causal self-attention that reads and writes the KV cache."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ops.attention import AttentionOptions
from ops.rope import HeadNorms
from runtime.errors import CheckpointError
from runtime.layers.build import Build
from runtime.layers.forward_batch import ForwardBatch, KVSpec
from runtime.layers.linear import Linear, from_heads
from runtime.layers.norm import Norm, RMSNorm
from runtime.layers.rope import QueryScale, Rope
from runtime.layers.sharding import TensorParallelGroup, shard_range, whole_range
from runtime.layers.weight import (
    Shard,
    SubLayer,
    Weighted,
    frozen,
    in_groups,
    in_one_tensor,
    parameter,
    whole,
)


class Attention(Weighted):
    """Grouped-query attention: project, normalise and rotate q and k, store k and v in the cache, attend, project.

    index        number of the layer in the whole model; `batch.cache` uses it as the key
    window       a token attends to the last `window` positions; if `chunked`, to its own chunk of `window` positions
    scale        defaults to 1 / sqrt(head_dim)
    sinks        each head has a learned attention sink: one more score in its softmax
    fused        name of the checkpoint tensor that holds q, k and v together; None: three tensors
    by_group     the fused tensor holds, for each kv head, its query heads, its key and its value
    qk_norm      norms of q and k, per head or over all heads; applied before the rotation unless `norm_last`
    query_scale  applied to q after norm and rotation
    gated        the q tensor holds a gate after each head; the head's output is multiplied by the gate's sigmoid
    out_size     size of the output; None: the size of the input
    slopes       ALiBi: decrease of each head's scores per position of distance; not allowed with a soft cap
    """

    slopes: Tensor | None  # float32 [H]; None without ALiBi

    def __init__(
        self,
        name: str,
        index: int,
        size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        build: Build,
        *,
        rope: Rope | None,
        bias: bool = False,
        out_bias: bool = False,
        qk_norm: tuple[Norm, Norm] | None = None,
        norm_last: bool = False,
        window: int | None = None,
        chunked: bool = False,
        query_scale: QueryScale | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: bool = False,
        fused: str | None = None,
        by_group: bool = False,
        gated: bool = False,
        slopes: Sequence[float] | None = None,
        out_name: str = "o_proj",
        out_size: int | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.index = index
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.window, self.chunked = window, chunked
        self.query_scale = query_scale
        self.scale = head_dim**-0.5 if scale is None else scale
        self.soft_cap = soft_cap
        if slopes is not None and soft_cap is not None:
            raise ValueError("Attention with ALiBi slopes does not support a soft cap.")
        numbers = None if slopes is None else torch.tensor(slopes, dtype=torch.float32, device=build.device)
        self.register_buffer("slopes", numbers, persistent=False)
        self.kernels = build.kernels
        self.rope = rope
        qkv = [SubLayer(f"{name}.q_proj", num_heads * head_dim, "heads", head_dim)]
        for part in ("k_proj", "v_proj"):
            qkv.append(SubLayer(f"{name}.{part}", num_kv_heads * head_dim, "kv_heads", head_dim))
        if fused is not None:
            layout = in_groups if by_group else in_one_tensor
            qkv = layout(f"{name}.{fused}", qkv)
        self.gated = gated
        if gated:
            rows, pair = 2 * num_heads * head_dim, {"piece": head_dim, "stride": 2 * head_dim}
            qkv[0] = qkv[0]._replace(tensor_rows=rows, **pair)
            qkv.append(qkv[0]._replace(first_row=head_dim))
        self.qkv = Linear(size, qkv, build, bias=bias)
        self.out = from_heads(f"{name}.{out_name}", num_heads, head_dim, out_size or size, build, bias=out_bias)
        self.q_norm, self.k_norm = qk_norm or (None, None)
        self.norm_last = norm_last
        # True: the call that rotates q and k also normalises them.
        self._norms_heads = rope is not None and not norm_last and _norm_heads(self.q_norm, self.k_norm, head_dim)
        self._heads = whole_range(num_heads)
        self.has_sinks = sinks
        self.allocate()
        self.kv_scales = KVScales(name)

    def allocate(self) -> None:
        self.sinks = parameter(self.num_heads) if self.has_sinks else None  # [H]

    def split(self, group: TensorParallelGroup) -> None:
        """Keep this rank's heads. The linear layers and norms are split separately."""
        self._heads = shard_range("heads", self.num_heads, 1, group.rank, group.size)
        self.num_heads = self._heads.size
        if self.slopes is not None:
            self.slopes = self.slopes[self._heads.slice].clone()
        self.allocate()
        self.num_kv_heads = shard_range("kv_heads", self.num_kv_heads, 1, group.rank, group.size).size

    def shards(self) -> Iterator[Shard]:
        if self.sinks is not None:
            yield whole(f"{self.name}.sinks", self.sinks, ("heads",), self._heads)

    def prepare(self) -> None:
        if self.sinks is not None:
            self.sinks = frozen(self.sinks.float())  # kernels take float32

    @property
    def cache_spec(self) -> KVSpec:
        """Shape of the keys and values that this layer caches, and its window."""
        return KVSpec(self.num_kv_heads, self.head_dim, self.window)

    @property
    def first_product(self) -> Linear:
        """The linear layer that reads the input. The norm before it may round this input (`RMSNorm.round_for`)."""
        return self.qkv

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Return the attention output, x [T, E] -> [T, E], and store the tokens' keys and values in the cache."""
        heads = self.qkv(x, batch).unflatten(-1, (-1, self.head_dim))  # [T, H + 2K, D], plus H gates
        sizes = (self.num_heads, self.num_kv_heads, self.num_kv_heads, self.num_heads * self.gated)
        q, k, v, gates = heads.split(sizes, dim=1)
        cache, kernels, scales = batch.cache[self.index], self.kernels, self.kv_scales.values
        norms = None
        if self._norms_heads:
            norms = self._head_norms()
        elif not self.norm_last:
            q, k = self._normed(q, k)
        if self.rope is not None and not self.norm_last:
            q = cache.rotate_store(kernels, q, k, v, self.rope.rotation(batch, norms), batch, scales)
        else:
            if self.rope is not None:
                q, k = self.rope(q, k, batch)
            if self.norm_last:
                q, k = self._normed(q, k)
            cache.store(kernels, k, v, batch, scales)
        if self.query_scale is not None:
            q = self.query_scale(q, batch)
        options = AttentionOptions(self.scale, self.window, self.chunked, self.soft_cap, self.sinks, self.slopes)
        out = cache.attend(kernels, q, batch, scales, options).flatten(1)  # [T, H * D]
        if self.gated:
            out = self.kernels.modulate(out, gates.flatten(1), "sigmoid")
        return self.out(out, batch)

    def _head_norms(self) -> HeadNorms:
        q, k = self.q_norm, self.k_norm
        if not isinstance(q, RMSNorm) or not isinstance(k, RMSNorm):
            raise TypeError("This layer has no RMS norms of heads.")
        return HeadNorms(q.weight, k.weight, q.eps, q.unit_offset)

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return q [T, H, D] and k [T, K, D], normalised if the layer has norms."""
        if self.q_norm is None or self.k_norm is None:
            return q, k
        if self.q_norm.weight.shape[-1] == self.head_dim:
            return self.q_norm(q), self.k_norm(k)
        q, k = self.q_norm(q.flatten(1)), self.k_norm(k.flatten(1))  # one norm over all heads
        return q.unflatten(1, (-1, self.head_dim)), k.unflatten(1, (-1, self.head_dim))


def _norm_heads(q: Norm | None, k: Norm | None, head_dim: int) -> bool:
    """Return whether q and k have RMS norms of single heads that are equal except for their weights."""
    if not isinstance(q, RMSNorm) or not isinstance(k, RMSNorm):
        return False
    same = (q.eps, q.unit_offset) == (k.eps, k.unit_offset)
    return same and q.weight.shape[-1] == k.weight.shape[-1] == head_dim and not (q.spans_ranks or k.spans_ranks)


def alibi_slopes(num_heads: int, steepest: float = 8.0) -> list[float]:
    """Return the ALiBi slope of each head (arXiv 2108.12409, section 3).

    For n heads, n a power of two, head i = 1 .. n has the slope 2 ** (-steepest * i / n). For other numbers of heads,
    the first n heads, with n the next lower power of two, have these slopes. The remaining heads take every other
    slope of the series for 2n heads, as in the authors' code.
    """
    full = 1 << (num_heads.bit_length() - 1)
    slopes = [2 ** (-steepest * head / full) for head in range(1, full + 1)]
    between = [2 ** (-steepest * head / (2 * full)) for head in range(1, 2 * full, 2)]
    return slopes + between[: num_heads - full]


class KVScales(Weighted):
    """The scales by which keys and values are divided before an 8-bit cache stores them.

    `values` maps "k_scale" and "v_scale" to Python floats, so that steps need not copy them from the device. A scale
    that the checkpoint lacks is 1.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.values: Mapping[str, float] = {}
        self.allocate()

    def allocate(self) -> None:
        self._numbers = torch.ones(2, device="cpu")

    def shards(self) -> Iterator[Shard]:
        for row, part in enumerate(("k_scale", "v_scale")):
            yield Shard(f"{self.name}.{part}", self._numbers, row, 1, (None,), default=1.0)

    def prepare(self) -> None:
        """Read the scales. Raises CheckpointError if one is not a positive number."""
        self.values = dict(zip(("k_scale", "v_scale"), self._numbers.tolist(), strict=True))
        for part, value in self.values.items():
            if not (math.isfinite(value) and value > 0):
                raise CheckpointError(f"{self.name}.{part} must be a positive number, not {value:g}.")
