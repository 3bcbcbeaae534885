"""One layer of a decoder."""

from __future__ import annotations

from torch import Tensor, nn

from ops.attention import AttentionInputs
from runtime.layers.norm import RMSNorm


class PreNormBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); each addition is fused into the norm that follows it.

    So a block takes and gives a pair: what the last part computed, and the sum to which it is still to be
    added.
    """

    def __init__(
        self, attention_norm: RMSNorm, attention: nn.Module, mlp_norm: RMSNorm, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        inputs: AttentionInputs,
        k_pool: Tensor,
        v_pool: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """x [T, E], residual [T, E] or None before the first block -> the same pair."""
        x, residual = self.attention_norm.add(x, residual)
        x = self.attention(x, positions, inputs, k_pool, v_pool)
        x, residual = self.mlp_norm.add(x, residual)
        return self.mlp(x), residual
