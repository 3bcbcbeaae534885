"""One layer of a decoder."""

from __future__ import annotations

from torch import Tensor, nn

from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.norm import RMSNorm


class PreNormBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); each addition is fused into the norm that follows it.

    So a block takes and gives a pair: what the last part computed, and the sum to which it is still to be added. With
    norms behind them, attention and MLP are normalised again before they are added.
    """

    def __init__(
        self,
        attention_norm: RMSNorm,
        attention: nn.Module,
        mlp_norm: RMSNorm,
        mlp: nn.Module,
        *,
        post_attention_norm: RMSNorm | None = None,
        post_mlp_norm: RMSNorm | None = None,
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.post_attention_norm = post_attention_norm
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.post_mlp_norm = post_mlp_norm

    def forward(self, x: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """x [T, E], residual [T, E] or None before the first block -> the same pair."""
        x, residual = self.attention_norm.add(x, residual)
        x = self.attention(x, batch)
        if self.post_attention_norm is not None:
            x = self.post_attention_norm(x)
        x, residual = self.mlp_norm.add(x, residual)
        x = self.mlp(x, batch)
        if self.post_mlp_norm is not None:
            x = self.post_mlp_norm(x)
        return x, residual
