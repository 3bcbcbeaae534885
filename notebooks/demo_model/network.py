"""A Qwen3 decoder in plain torch, with only what training needs.

Parameter names are those of published checkpoints, so exporting only copies a dictionary. The documents of a step form
a flat batch. Only attention uses the document boundaries, so no separator tokens are needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """The sizes of a network."""

    vocab: int = 4096
    width: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    mlp: int = 768
    rope_theta: float = 10_000.0
    eps: float = 1e-6


@dataclass(frozen=True)
class Group:
    """Documents of one padded length in the flat batch: `rows` documents of `length` tokens each."""

    rows: int
    length: int


class Norm(nn.Module):
    """RMS norm with a learned scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to halves of each head. x is [T, H, D]; cos and sin are [T, 1, D / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        size = shape.head_dim
        self.q_proj = nn.Linear(shape.width, shape.heads * size, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.kv_heads * size, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.kv_heads * size, bias=False)
        self.o_proj = nn.Linear(shape.heads * size, shape.width, bias=False)
        self.q_norm = Norm(size, shape.eps)
        self.k_norm = Norm(size, shape.eps)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of flat tokens, each [T, heads, D]."""
        size = self.shape.head_dim
        q = self.q_norm(self.q_proj(x).view(-1, self.shape.heads, size))
        k = self.k_norm(self.k_proj(x).view(-1, self.shape.kv_heads, size))
        v = self.v_proj(x).view(-1, self.shape.kv_heads, size)
        return rotate(q, cos, sin), rotate(k, cos, sin), v


def attend(q: Tensor, k: Tensor, v: Tensor, groups: list[Group]) -> Tensor:
    """Return causal attention within each document. q, k, v are [T, heads, D]; the result is [T, heads * D]."""
    share = q.shape[1] // k.shape[1]
    outputs, start = [], 0
    for group in groups:
        end = start + group.rows * group.length

        def rows(x: Tensor, start: int = start, end: int = end, group: Group = group) -> Tensor:
            return x[start:end].view(group.rows, group.length, x.shape[1], x.shape[2]).transpose(1, 2)

        keys, values = (rows(x).repeat_interleave(share, dim=1) for x in (k, v))
        out = F.scaled_dot_product_attention(rows(q), keys, values, is_causal=True)
        outputs.append(out.transpose(1, 2).reshape(end - start, -1))
        start = end
    return torch.cat(outputs)


class Mlp(nn.Module):
    """The gated feed-forward block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.mlp, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.mlp, bias=False)
        self.down_proj = nn.Linear(shape.mlp, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One decoder layer, divided into parts before and after attention, which alone depends on document boundaries."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = Norm(shape.width, shape.eps)
        self.post_attention_layernorm = Norm(shape.width, shape.eps)

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.self_attn.project(self.input_layernorm(x), cos, sin)

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + self.self_attn.o_proj(mixed)
        return x + self.mlp(self.post_attention_layernorm(x))


class Network(nn.Module):
    """Embedding, layers and final norm. The LM head is the embedding matrix."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.width, shape.eps)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        for name, weight in self.named_parameters():
            if weight.dim() == 2 and "embed" not in name:
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5 * 0.5)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(weight)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosine and sine of every position's rotation, [T, 1, D / 2]."""
        half = self.shape.head_dim // 2
        steps = torch.arange(half, device=positions.device, dtype=torch.float32) / half
        turns = positions.float()[:, None, None] * self.shape.rope_theta**-steps
        return turns.cos().bfloat16(), turns.sin().bfloat16()

    def forward(self, tokens: Tensor, positions: Tensor, groups: list[Group]) -> Tensor:
        """Return the final hidden states [T, E] of flat tokens [T]."""
        cos, sin = self.angles(positions)
        x = self.embed_tokens(tokens).bfloat16()
        for block in self.layers:
            x = block.after(x, attend(*block.before(x, cos, sin), groups))  # type: ignore[operator]
        return self.norm(x)

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of the given rows: hidden states [N, E] and targets [N]."""
        return F.cross_entropy(F.linear(hidden, self.embed_tokens.weight).float(), targets)
