"""Self-attention over the paged cache."""

from __future__ import annotations

from torch import Tensor, nn

from ops.attention import AttentionInputs
from ops.select import Kernels
from runtime.layers.linear import Linear, Part
from runtime.layers.norm import RMSNorm
from runtime.layers.rope import Rope
from runtime.layers.split import Team, span


class Attention(nn.Module):
    """Grouped-query attention: project, normalise q and k per head if asked, rotate, store, attend, project.

    `window` limits a token to the last so many positions, `scale` is 1 / sqrt(head_dim) unless given.
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
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.window = window
        self.scale = head_dim**-0.5 if scale is None else scale
        self.soft_cap = soft_cap
        self.kernels = kernels
        self.rope = rope
        q = Part(f"{name}.q_proj", num_heads * head_dim, "heads", head_dim)
        k, v = (
            Part(f"{name}.{part}", num_kv_heads * head_dim, "kv_heads", head_dim)
            for part in ("k_proj", "v_proj")
        )
        self.qkv = Linear(size, (q, k, v), kernels, bias=bias)
        self.out = Linear(
            num_heads * head_dim,
            [Part(f"{name}.o_proj", size)],
            kernels,
            bias=out_bias,
            in_axis="heads",
            in_unit=head_dim,
        )
        self.q_norm = self.k_norm = None
        if qk_norm_eps is not None:
            self.q_norm = RMSNorm(f"{name}.q_norm", head_dim, qk_norm_eps, kernels)
            self.k_norm = RMSNorm(f"{name}.k_norm", head_dim, qk_norm_eps, kernels)

    def split(self, team: Team) -> None:
        """Keep this rank's heads; the linear layers are cut by themselves."""
        self.num_heads = span("heads", self.num_heads, 1, team.rank, team.size).size
        self.num_kv_heads = span("kv_heads", self.num_kv_heads, 1, team.rank, team.size).size

    def forward(
        self, x: Tensor, positions: Tensor, inputs: AttentionInputs, k_pool: Tensor, v_pool: Tensor
    ) -> Tensor:
        """x [T, E] -> [T, E]; writes the tokens' KV into the layer's pools [P, K, page, D]."""
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))  # [T, H + 2K, D]
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rope(q, k, positions, inputs.memo)
        self.kernels.store(k, v, k_pool, v_pool, inputs)
        out = self.kernels.attend(
            q, k_pool, v_pool, inputs, scale=self.scale, window=self.window, soft_cap=self.soft_cap
        )  # [T, H, D]
        return self.out(out.flatten(1))
