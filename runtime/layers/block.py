"""Transformer blocks: arrangements of attention, MLP and norms.

A block maps (x, residual, batch) to a pair (x, residual), the input of the next block. In most blocks, x is the output
of the last sub-layer, and the next block adds it to the residual, so that its norm can fuse the addition. In other
blocks, x is the complete sum, and the residual is None.
"""

from __future__ import annotations

from torch import Tensor, nn

from ops.select import Kernels
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.norm import NoNorm, Norm, RMSNorm


class Block(nn.Module):
    """Base class of blocks that consist of an attention layer, an MLP and one norm for each."""

    def __init__(self, attention_norm: Norm | NoNorm, attention: nn.Module, mlp_norm: Norm, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp


class PreNormBlock(Block):
    """x + attention(norm(x)), then x + mlp(norm(x)); each addition is fused into the norm that follows it.

    `post_attention_norm` and `post_mlp_norm` normalise the outputs of attention and MLP before the addition.
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
        for norm, layer in ((attention_norm, attention), (mlp_norm, mlp)):
            reader = getattr(layer, "first_product", None)
            if isinstance(norm, RMSNorm) and reader is not None:
                norm.round_for(reader)

    def forward(self, x: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Map x [T, E] and residual [T, E] (None in the first block) to the next block's pair."""
        x, residual = self.attention_norm.add(x, residual)
        x = self.attention(x, batch)
        if self.post_attention_norm is not None:
            x = self.post_attention_norm(x)
        x, residual = self.mlp_norm.add(x, residual)
        x = self.mlp(x, batch)
        if self.post_mlp_norm is not None:
            x = self.post_mlp_norm(x)
        return x, residual


class SubLayerBlock(nn.Module):
    """x + layer(norm(x)): a block that has only attention, or only an MLP."""

    def __init__(self, norm: Norm, layer: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.layer = layer

    def forward(self, x: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Map x [T, E] and residual [T, E] or None to the next block's pair."""
        x, residual = self.norm.add(x, residual)
        return self.layer(x, batch), residual


class Identity(nn.Module):
    """A block without attention and MLP."""

    def forward(self, x: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        """Return the pair unchanged."""
        return x, residual


class PostNormBlock(Block):
    """x + norm(attention(x)), then x + norm(mlp(x)): only outputs are normalised (OLMo 2)."""

    def __init__(
        self, attention: nn.Module, attention_norm: Norm, mlp: nn.Module, mlp_norm: Norm, kernels: Kernels
    ) -> None:
        super().__init__(attention_norm, attention, mlp_norm, mlp)
        self.kernels = kernels

    def forward(self, x: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Map x [T, E] and residual [T, E] or None to the next block's pair."""
        total = x if residual is None else self.kernels.add(x, residual)
        total = self.kernels.add(self.attention_norm(self.attention(total, batch)), total)
        return self.mlp_norm(self.mlp(total, batch)), total


class NormedSumBlock(Block):
    """norm(x + attention(x)), then norm(x + mlp(x)) (BERT, arXiv 1810.04805)."""

    def forward(self, x: Tensor, residual: None, batch: ForwardBatch) -> tuple[Tensor, None]:
        """Return the block's output [T, E] and None."""
        x, _ = self.attention_norm.add(self.attention(x, batch), x)
        x, _ = self.mlp_norm.add(self.mlp(x, batch), x)
        return x, None


class ParallelBlock(nn.Module):
    """x + attention(norm(x)) + mlp(norm(x)), with a shared norm or one norm each (GPT-J, PaLM)."""

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
        """Map x [T, E] and residual [T, E] or None to the next block's pair."""
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
        """Map x [T, E] and residual [T, E] or None to the complete sum [T, E] and None."""
        x = x if residual is None else self.kernels.add(x, residual)
        x = self.kernels.add(self.attention(self.attention_norm(x), batch), x, scale=self.multiplier)
        return self.kernels.add(self.mlp(self.mlp_norm(x), batch), x, scale=self.multiplier), None
