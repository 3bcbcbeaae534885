"""GPT-NeoX (Pythia, Dolly, RedPajama): attention and MLP in parallel, each with its own norm."""

from __future__ import annotations

from typing import Any

from torch import nn

from runtime.layers.attention import Attention
from runtime.layers.block import ParallelBlock
from runtime.layers.build import Build
from runtime.layers.mlp import MLP
from runtime.layers.norm import LayerNorm
from runtime.modeling.config import Config
from runtime.modeling.decoder import Decoder, assemble
from runtime.modeling.layer import Layer, norms


def decoder(config: Config, build: Build) -> Decoder:
    """Build GPT-NeoX. If `use_parallel_residual` is false, attention and MLP are in sequence."""
    bias, norm = config.flag("attention_bias", default=True), norms(config, build, LayerNorm)

    def layer(at: Layer) -> nn.Module:
        attended, inner = grouped_attention(at, "attention", bias=bias), dense_mlp(at, config.intermediate_size)
        if not config.flag("use_parallel_residual", default=True):
            return at.block(attended, inner, norm=norm)
        first, second = norm(f"{at.name}.input_layernorm"), norm(f"{at.name}.post_attention_layernorm")
        return ParallelBlock(first, attended, inner, build.kernels, mlp_norm=second)

    return assemble(config, build, layer, norm=norm("model.final_layer_norm"), embedding_name="model.embed_in")


def grouped_attention(at: Layer, name: str, *, bias: bool, **options: Any) -> Attention:
    """Return attention whose q, k and v are one tensor, ordered by kv head: its query heads, its key, its value."""
    return at.attention(name, bias=bias, fused="query_key_value", by_group=True, out_name="dense", **options)


def dense_mlp(at: Layer, size: int, *, bias: bool = True) -> MLP:
    """Return the MLP of models that use `grouped_attention`. It has no gate."""
    return at.plain_mlp(size, names=("dense_h_to_4h", "dense_4h_to_h"), bias=bias)
