"""Phi-1 to 4.

Phi-1 to Phi-2 compute attention and MLP in parallel after one norm, with biases in all layers and partial rotation.
Phi-3 and Phi-4 are Llama's layer without biases, with q, k and v in one tensor, gate and up in another tensor, and
optionally a window.
"""

from __future__ import annotations

from torch import nn

from runtime.layers.block import ParallelBlock
from runtime.layers.build import Build
from runtime.layers.norm import LayerNorm
from runtime.modeling.config import Config
from runtime.modeling.decoder import Decoder, assemble
from runtime.modeling.layer import Layer, norms


def phi(config: Config, build: Build) -> Decoder:
    """Build Phi-1 to Phi-2. With `qk_layernorm`, q and k have norms with one weight for all heads."""

    norm = norms(config, build, LayerNorm)

    def layer(at: Layer) -> nn.Module:
        qk_norm = at.head_norms(("q_layernorm", "k_layernorm"), LayerNorm) if config.flag("qk_layernorm") else None
        attended = at.attention(bias=True, out_name="dense", qk_norm=qk_norm)
        inner = at.plain_mlp(bias=True, names=("fc1", "fc2"))
        return ParallelBlock(norm(f"{at.name}.input_layernorm"), attended, inner, build.kernels)

    return assemble(config, build, layer, norm=norm("model.final_layernorm"), head_bias=True)


def phi3(config: Config, build: Build) -> Decoder:
    """Build Phi-3 or Phi-4. All layers have a window if config.json has `sliding_window`."""
    window = config.optional_integer("sliding_window")

    def layer(at: Layer) -> nn.Module:
        attended = at.attention(bias=False, fused="qkv_proj", window=window)
        return at.block(attended, at.mlp(fused="gate_up_proj"))

    return assemble(config, build, layer)
