"""The quantisation methods there are, and the forms of quantised checkpoints: one entry for each.

Torch-free: a file is imported when it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationEntry:
    """What is known of a method before a model is loaded. `METHODS` in its file has its class."""

    file: str  # in runtime/layers/quantization
    on_gpu: str | None = None  # the file in ops/matmul by which a GPU computes it
    matmul: str | None = None  # the file in ops/matmul that it needs; None: that of unquantised weights


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatEntry:
    """A form in which checkpoints hold quantised weights. Its reader is `derive` in its file."""

    file: str  # in runtime/models/formats
    asked: tuple[str, ...] = ()  # what `--quantization` calls it beside its own name


METHODS: Mapping[str, QuantizationEntry] = {  # by the name that `--quantization` has for it
    "w4a16": QuantizationEntry(file="rounded", on_gpu="with_triton"),
    "w4a8": QuantizationEntry(file="rounded"),
    "w8a8_int8": QuantizationEntry(file="rounded", matmul="int8"),
}

# What `--torchao-config` may name -> the method that computes it: its file is `torchao`, or it is one of METHODS.
TORCHAO: Mapping[str, str] = {
    "int8dq": "w8a8_int8",
    "int8wo": "int8wo",
    "fp8wo": "fp8wo",
    **{f"int4wo-{group}": f"int4wo-{group}" for group in (32, 64, 128, 256)},
}

# By the name that a checkpoint's configuration has for it (quant_method).
FORMATS: Mapping[str, FormatEntry] = {
    "awq": FormatEntry(file="awq", asked=("awq_marlin", "moe_wna16")),
    "bitsandbytes": FormatEntry(file="bitsandbytes"),
    "compressed-tensors": FormatEntry(file="scaled", asked=("w8a8_int8", "w8a8_fp8")),
    "fbgemm_fp8": FormatEntry(file="scaled", asked=("fp8",)),
    "fp8": FormatEntry(file="scaled"),
    "gguf": FormatEntry(file="gguf"),
    "gptq": FormatEntry(file="gptq", asked=("gptq_marlin", "marlin", "moe_wna16")),
    "modelopt": FormatEntry(file="modelopt", asked=("fp8", "modelopt_fp4", "petit_nvfp4")),
    "mxfp4": FormatEntry(file="mxfp4"),
    "quark": FormatEntry(file="quark"),
    "torchao": FormatEntry(file="torchao"),
}

# Forms whose weights may stay in groups of 4 bits.
GROUPED = ("awq", "compressed-tensors", "gguf", "gptq", "modelopt", "quark", "torchao")

# What `--quantization` may name that nothing here reads, and why.
UNREADABLE: Mapping[str, str] = {
    "qoq": "its weights come interleaved for one GPU kernel and its library is no longer kept; use w8a8_int8, or a "
    "checkpoint in compressed-tensors, GPTQ or AWQ form",
    "w4afp8": "its weights come interleaved for one kernel of Hopper GPUs; use a checkpoint in compressed-tensors, "
    "GPTQ or AWQ form",
}

_FP8 = ", which `penstock quantize --method fp8` writes"

# How to get a checkpoint in a form that `--quantization` asks for.
WRITERS: Mapping[str, str] = {
    "fp8": _FP8,
    "w8a8_fp8": _FP8,
    "bitsandbytes": ", which transformers writes (BitsAndBytesConfig)",
    "gguf": ", which llama.cpp writes",
}


def spellings() -> tuple[str, ...]:
    """All that `--quantization` may name and that something here computes or reads."""
    names = [*METHODS]
    for name, form in FORMATS.items():
        names += [name, *form.asked]
    return tuple(dict.fromkeys(names))


def agrees(asked: str, stored: str) -> bool:
    """Whether what `--quantization` asks for is what a checkpoint of this form holds."""
    return asked == stored or asked in FORMATS[stored].asked
