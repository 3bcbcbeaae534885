"""As `w4a16`, with activations of 8 bits."""

from __future__ import annotations

from runtime.layers.quantization.w4a16 import W4A16


class W4A8(W4A16):
    """Each token's activations are rounded with a scale of their own before a product."""

    rounded_rows = True


METHOD = W4A8
