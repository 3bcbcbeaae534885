"""MPT: GPT's layer without biases, with ALiBi (arXiv 2108.12409) instead of position embeddings."""

from __future__ import annotations

from runtime.errors import CheckpointError
from runtime.layers.attention import alibi_slopes
from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.layers.norm import LayerNorm
from runtime.modeling.config import Config
from runtime.modeling.decoder import Decoder, assemble
from runtime.modeling.layer import Layer, norms

# Field of `attn_config` that changes the computation -> the value that this family supports.
SUPPORTED = {
    "alibi": True,
    "attn_type": "multihead_attention",
    "clip_qkv": None,
    "prefix_lm": False,
    "qk_ln": False,
}


def decoder(config: Config, build: Build) -> Decoder:
    """Build MPT. Raises CheckpointError for values of `attn_config` that are not supported."""
    fields = config.child("attn_config")
    for name, supported in SUPPORTED.items():
        if fields.values.get(name, supported) != supported:
            raise CheckpointError(
                f"config.json: {name} of attn_config is not supported natively. Use --model-impl transformers."
            )
    scale = fields.optional_number("softmax_scale")
    slopes = alibi_slopes(config.num_heads, fields.optional_number("alibi_bias_max") or 8.0)

    norm = norms(config, build, LayerNorm, bias=False)

    def layer(at: Layer) -> PreNormBlock:
        options = {"rope": None, "slopes": slopes, "scale": scale, "fused": "Wqkv", "out_name": "out_proj"}
        attended, inner = at.attention("attn", bias=False, **options), at.plain_mlp(4 * config.hidden_size, name="ffn")
        return PreNormBlock(norm(f"{at.name}.norm_1"), attended, norm(f"{at.name}.norm_2"), inner)

    norm_f = norm("model.norm_f")
    return assemble(config, build, layer, layers_name="model.blocks", norm=norm_f, embedding_name="model.wte")
