"""Quantisation methods by the name that `--quantization` has for them.

A method is its file, a line here, and its name among those that are built (`runtime/config/options/model.py`).
"""

from __future__ import annotations

from runtime.layers.quantization.method import LinearLayout, QuantizationMethod, Unquantized
from runtime.layers.quantization.w8a8_int8 import W8A8Int8

METHODS: dict[str | None, type[QuantizationMethod]] = {
    None: Unquantized,
    "w8a8_int8": W8A8Int8,
}

__all__ = ["METHODS", "LinearLayout", "QuantizationMethod", "Unquantized"]
