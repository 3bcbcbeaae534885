"""The quantisation methods there are, one entry for each. Torch-free: a method's file is imported when it is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationEntry:
    """What is known of a method before a model is loaded. Its class is `METHOD` in its file."""

    file: str  # in runtime/layers/quantization
    on_gpu: bool = False  # whether a GPU computes it
    matmul: str | None = None  # the file in ops/matmul that it needs; None: that of unquantised weights


METHODS: Mapping[str, QuantizationEntry] = {  # by the name that `--quantization` has for it
    "w8a8_int8": QuantizationEntry(file="w8a8_int8", matmul="int8"),
}
