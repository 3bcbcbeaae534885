"""Baichuan and Baichuan 2: Llama's layer with q, k and v in one tensor (arXiv 2309.10305).

Baichuan 2 scales the rows of the LM head to length one. The 13B models use ALiBi (arXiv 2108.12409) instead of rotary
embedding.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from runtime.layers.attention import alibi_slopes
from runtime.layers.build import Build
from runtime.modeling.config import Config
from runtime.modeling.decoder import Decoder, assemble
from runtime.modeling.layer import Layer


def decoder(config: Config, build: Build) -> Decoder:
    """Build Baichuan: multi-head attention without biases. 13B models have `alibi` set."""
    options: dict[str, Any] = {}
    if config.flag("alibi"):
        options = {"rope": None, "slopes": alibi_slopes(config.num_heads)}

    def layer(at: Layer) -> nn.Module:
        attended = at.attention(bias=False, fused="W_pack", **options)
        return at.block(attended, at.mlp())

    return assemble(config, build, layer, unit_head="rows" if config.flag("unit_head") else None)
