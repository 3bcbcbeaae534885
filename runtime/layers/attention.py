"""Self-attention over the paged cache."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ops.attention import AttentionInputs
from ops.select import Kernels
from runtime.errors import CheckpointError
from runtime.layers.linear import Linear, SubLayer
from runtime.layers.norm import RMSNorm
from runtime.layers.rope import Rope
from runtime.layers.sharding import TensorParallelGroup, shard_range, whole_range
from runtime.layers.weight import Shard, whole


class Attention(nn.Module):
    """Grouped-query attention: project, normalise q and k per head if asked, rotate, store, attend, project.

    `window` limits a token to the last so many positions, `scale` is 1 / sqrt(head_dim) unless given. With `sinks`
    each head has a learned score that takes part in its softmax.
    """

    def __init__(
        self,
        name: str,
        size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        kernels: Kernels,
        *,
        rope: Rope,
        bias: bool = False,
        out_bias: bool = False,
        qk_norm_eps: float | None = None,
        window: int | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: bool = False,
    ) -> None:
        super().__init__()
        self.name = name
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.window = window
        self.scale = head_dim**-0.5 if scale is None else scale
        self.soft_cap = soft_cap
        self.kernels = kernels
        self.rope = rope
        q = SubLayer(f"{name}.q_proj", num_heads * head_dim, "heads", head_dim)
        k, v = (
            SubLayer(f"{name}.{part}", num_kv_heads * head_dim, "kv_heads", head_dim)
            for part in ("k_proj", "v_proj")
        )
        self.qkv = Linear(size, (q, k, v), kernels, bias=bias)
        self.out = Linear(
            num_heads * head_dim,
            [SubLayer(f"{name}.o_proj", size)],
            kernels,
            bias=out_bias,
            in_axis="heads",
            in_unit=head_dim,
        )
        self.q_norm = self.k_norm = None
        if qk_norm_eps is not None:
            self.q_norm = RMSNorm(f"{name}.q_norm", head_dim, qk_norm_eps, kernels)
            self.k_norm = RMSNorm(f"{name}.k_norm", head_dim, qk_norm_eps, kernels)
        self._heads = whole_range(num_heads)
        self.sinks = nn.Parameter(torch.empty(num_heads), requires_grad=False) if sinks else None  # [H]
        self.kv_scales = KVScales(name)

    def split(self, group: TensorParallelGroup) -> None:
        """Keep this rank's heads; the linear layers are cut by themselves."""
        self._heads = shard_range("heads", self.num_heads, 1, group.rank, group.size)
        self.num_heads = self._heads.size
        if self.sinks is not None:
            self.sinks = nn.Parameter(self.sinks.new_empty(self.num_heads), requires_grad=False)
        self.num_kv_heads = shard_range("kv_heads", self.num_kv_heads, 1, group.rank, group.size).size

    def shards(self) -> Iterator[Shard]:
        if self.sinks is not None:
            yield whole(f"{self.name}.sinks", self.sinks, ("heads",), self._heads)

    def prepare(self) -> None:
        if self.sinks is not None:
            self.sinks = nn.Parameter(self.sinks.float(), requires_grad=False)  # as kernels take them

    def forward(
        self, x: Tensor, positions: Tensor, inputs: AttentionInputs, k_pool: Tensor, v_pool: Tensor
    ) -> Tensor:
        """x [T, E] -> [T, E]; writes the tokens' KV into the layer's pools [P, K, page, D]."""
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))  # [T, H + 2K, D]
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rope(q, k, positions, inputs.memo)
        kv_scales = self.kv_scales.of(k_pool)
        self.kernels.store(k, v, k_pool, v_pool, inputs, **kv_scales)
        out = self.kernels.attend(
            q,
            k_pool,
            v_pool,
            inputs,
            scale=self.scale,
            window=self.window,
            soft_cap=self.soft_cap,
            sinks=self.sinks,
            **kv_scales,
        )  # [T, H, D]
        return self.out(out.flatten(1))


class KVScales(nn.Module):
    """What keys and values are divided by before an fp8 cache takes them: the checkpoint's numbers, or 1."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        # Until they are plain numbers, so that no step waits for a device.
        self.k_scale: nn.Parameter | None = nn.Parameter(torch.ones(1), requires_grad=False)
        self.v_scale: nn.Parameter | None = nn.Parameter(torch.ones(1), requires_grad=False)
        self._values: Mapping[str, float] = {}

    def shards(self) -> Iterator[Shard]:
        for part, scale in (("k_scale", self.k_scale), ("v_scale", self.v_scale)):
            if scale is not None:
                yield whole(f"{self.name}.{part}", scale, (None,))._replace(default=1.0)

    def prepare(self) -> None:
        """Raises CheckpointError for scales that are no positive numbers."""
        self._values = {shard.name.rpartition(".")[2]: shard.target.item() for shard in self.shards()}
        for part, value in self._values.items():
            if not (math.isfinite(value) and value > 0):
                raise CheckpointError(f"{self.name}.{part} must be a positive number, not {value:g}.")
        self.k_scale = self.v_scale = None

    def of(self, pool: Tensor) -> Mapping[str, float]:
        """The keyword arguments of `store` and `attend` for this pool."""
        return self._values if pool.dtype.itemsize == 1 else {}
