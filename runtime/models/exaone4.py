"""Exaone 4: OLMo 2's layer with q and k normalised per head.

In models with windows, only layers with a window have rotary embedding.
"""

from __future__ import annotations

from torch import nn

from runtime.layers.build import Build
from runtime.modeling.config import Config
from runtime.modeling.decoder import Decoder, assemble
from runtime.modeling.layer import Layer
from runtime.models.olmo import post_norm_block


def decoder(config: Config, build: Build) -> Decoder:
    """Build Exaone 4. `layer_types` says which layers have a window; if it is missing, no layer has one."""
    windows, rope = config.windows(["full_attention"] * config.num_layers), build.rope(config.rope())
    rotates_all = config.optional_integer("sliding_window") is None

    def layer(at: Layer) -> nn.Module:
        window, qk_norm = windows[at.index], at.head_norms()
        rotated = rope if rotates_all or window else None
        return post_norm_block(at, at.attention(bias=False, qk_norm=qk_norm, rope=rotated, window=window))

    return assemble(config, build, layer)
