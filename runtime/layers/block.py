"""One layer of a decoder, in the arrangements that there are.

A block takes (x, residual, batch) and gives the pair that the next one takes: what it computed last, and the sum to
which that is still to be added, or the whole sum and None.
"""

from __future__ import annotations

from torch import Tensor, nn

from ops.select import Kernels
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.norm import NoNorm, Norm


class Block(nn.Module):
    """What every arrangement has: an attention, an MLP and their norms."""

    def __init__(
        self, attention_norm: Norm | NoNorm, attention: nn.Module, mlp_norm: Norm, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp


class PreNormBlock(Block):
    """x + attention(norm(x)), then x + mlp(norm(x)); each addition is fused into the norm that follows it.

    So a block takes and gives a pair: what the last part computed, and the sum to which it is still to be added. With
    norms behind them, attention and MLP are normalised again before they are added.
    """

    def __init__(
        self,
        attention_norm: Norm | NoNorm,
        attention: nn.Module,
        mlp_norm: Norm,
        mlp: nn.Module,
        *,
        post_attention_norm: Norm | None = None,
        post_mlp_norm: Norm | None = None,
    ) -> None:
        super().__init__(attention_norm, attention, mlp_norm, mlp)
        self.post_attention_norm = post_attention_norm
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


class PostNormBlock(Block):
    """x + norm(attention(x)), then x + norm(mlp(x)): nothing is normalised before it is computed with (OLMo 2)."""

    def __init__(
        self, attention: nn.Module, attention_norm: Norm, mlp: nn.Module, mlp_norm: Norm, kernels: Kernels
    ) -> None:
        super().__init__(attention_norm, attention, mlp_norm, mlp)
        self.kernels = kernels

    def forward(self, x: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """x [T, E], residual [T, E] or None -> the same pair."""
        total = x if residual is None else self.kernels.add(x, residual)
        total = self.kernels.add(self.attention_norm(self.attention(total, batch)), total)
        return self.mlp_norm(self.mlp(total, batch)), total


class NormedSumBlock(Block):
    """norm(x + attention(x)), then norm(x + mlp(x)) (BERT, arXiv 1810.04805)."""

    def forward(self, x: Tensor, residual: None, batch: ForwardBatch) -> tuple[Tensor, None]:
        """x [T, E] -> (the same, None)."""
        x, _ = self.attention_norm.add(self.attention(x, batch), x)
        x, _ = self.mlp_norm.add(self.mlp(x, batch), x)
        return x, None


class ParallelBlock(nn.Module):
    """x + attention(norm(x)) + mlp(norm(x)), with one norm for both or one for each (GPT-J, PaLM)."""

    def __init__(
        self,
        attention_norm: Norm,
        attention: nn.Module,
        mlp: nn.Module,
        kernels: Kernels,
        *,
        mlp_norm: Norm | None = None,
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.kernels = kernels

    def forward(self, x: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """x [T, E], residual [T, E] or None -> the same pair."""
        x, total = self.attention_norm.add(x, residual)
        attended = self.attention(x, batch)
        if self.mlp_norm is not None:
            x = self.mlp_norm(total)
        return self.kernels.add(attended, self.mlp(x, batch)), total


class ScaledBlock(Block):
    """x + m * attention(norm(x)), then x + m * mlp(norm(x)) (Granite, arXiv 2203.03466)."""

    def __init__(
        self,
        attention_norm: Norm,
        attention: nn.Module,
        mlp_norm: Norm,
        mlp: nn.Module,
        kernels: Kernels,
        *,
        multiplier: float,
    ) -> None:
        super().__init__(attention_norm, attention, mlp_norm, mlp)
        self.kernels = kernels
        self.multiplier = multiplier

    def forward(self, x: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, None]:
        """x [T, E], residual [T, E] or None -> (the whole sum, None)."""
        x = x if residual is None else self.kernels.add(x, residual)
        x = self.kernels.add(self.attention(self.attention_norm(x), batch), x, scale=self.multiplier)
        return self.kernels.add(self.mlp(self.mlp_norm(x), batch), x, scale=self.multiplier), None
