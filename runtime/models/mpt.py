"""MPT: GPT's layer without biases and without positions, for scores lose by distance (ALiBi, arXiv 2108.12409)."""

from __future__ import annotations

from runtime.errors import CheckpointError
from runtime.layers.attention import alibi_slopes
from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.layers.mlp import MLP
from runtime.layers.norm import LayerNorm
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention

# Values of `attn_config` that change what is computed, and what they are where nothing is changed.
PLAIN = {
    "alibi": True,
    "attn_type": "multihead_attention",
    "clip_qkv": None,
    "prefix_lm": False,
    "qk_ln": False,
}


def decoder(config: Config, build: Build) -> Decoder:
    """Raises CheckpointError for models that clip q, k and v, and for what few have of `attn_config`."""
    own = config.child("attn_config")
    for name, plain in PLAIN.items():
        if own.values.get(name, plain) != plain:
            raise CheckpointError(
                f"config.json: {name} of attn_config is not supported natively: use --model-impl transformers."
            )
    scale = own.optional_number("softmax_scale")
    slopes = alibi_slopes(config.num_heads, own.optional_number("alibi_bias_max") or 8.0)

    def norm(name: str) -> LayerNorm:
        return LayerNorm(name, config.hidden_size, config.norm_eps, build, bias=False)

    def layer(index: int) -> PreNormBlock:
        name = f"model.blocks.{index}"
        attended = attention(
            config,
            index,
            build,
            name=f"{name}.attn",
            rope=None,
            slopes=slopes,
            scale=scale,
            fused="Wqkv",
            out_name="out_proj",
        )
        inner = MLP(f"{name}.ffn", config.hidden_size, 4 * config.hidden_size, config.activation, build)
        return PreNormBlock(norm(f"{name}.norm_1"), attended, norm(f"{name}.norm_2"), inner)

    return assemble(config, build, layer, norm=norm("model.norm_f"), embedding_name="model.wte")
