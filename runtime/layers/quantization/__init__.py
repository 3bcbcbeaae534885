"""Quantisation methods by the name that `--quantization` has for them: a method is its file and a line here."""

from __future__ import annotations

from runtime.layers.quantization.method import LinearLayout, QuantizationMethod, Unquantized
from runtime.layers.quantization.w8a8_int8 import W8A8Int8

METHODS: dict[str | None, type[QuantizationMethod]] = {
    None: Unquantized,
    "w8a8_int8": W8A8Int8,
}

__all__ = ["METHODS", "LinearLayout", "QuantizationMethod", "Unquantized"]
