"""Quantisation methods of linear layers.

A method is a class in `METHODS` of a file in this package, and an entry in `runtime/config/quantization.py`.
"""

from __future__ import annotations

from importlib import import_module

from runtime.config.quantization import METHODS, TORCHAO
from runtime.layers.quantization.method import LinearLayout, QuantizationMethod, Unquantized

__all__ = ["LinearLayout", "QuantizationMethod", "Unquantized", "quantization_method"]


def quantization_method(name: str | None) -> QuantizationMethod:
    """Return the method with this name; None means no quantisation. Raises KeyError for an unknown name."""
    if name is None:
        return Unquantized()
    if name in TORCHAO:
        return import_module("runtime.layers.quantization.torchao").TorchaoWeights(name)
    return import_module(f"runtime.layers.quantization.{METHODS[name].file}").METHODS[name]()
