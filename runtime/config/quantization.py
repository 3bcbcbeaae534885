"""Quantisation methods and formats of quantised checkpoints, one entry each.

Does not import torch: the modules of methods and formats are imported on use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationEntry:
    """A quantisation method, whose class is in `METHODS` of the module `file`."""

    file: str  # module in runtime/layers/quantization
    on_gpu: str | None = None  # module in ops/matmul for GPUs; None: not supported on GPUs
    matmul: str | None = None  # module in ops/matmul for CPUs; None: the module for unquantised weights
    # Whether the method rounds only unquantised checkpoints. With a quantised checkpoint, the method's name is then
    # accepted only if it names the checkpoint's format.
    only_unquantized: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatEntry:
    """A format of quantised checkpoints. The function `derive` in the module `file` reads its configuration."""

    file: str  # module in runtime/loading/formats
    asked: tuple[str, ...] = ()  # further values of `--quantization` that this format accepts


METHODS: Mapping[str, QuantizationEntry] = {  # keys are values of `--quantization`
    "w4a16": QuantizationEntry(file="rounded", on_gpu="with_triton"),
    "w4a8": QuantizationEntry(file="rounded"),
    "w8a8_int8": QuantizationEntry(file="rounded", matmul="int8"),
    "fp8": QuantizationEntry(file="rounded", on_gpu="with_triton", only_unquantized=True),
    "w8a8_fp8": QuantizationEntry(file="rounded", on_gpu="with_triton", only_unquantized=True),
}

# Maps a value of `--torchao-config` to a quantisation method: one of the module `torchao`, or a key of METHODS.
TORCHAO: Mapping[str, str] = {
    "int8dq": "w8a8_int8",
    "int8wo": "int8wo",
    "fp8wo": "fp8wo",
    **{f"int4wo-{group}": f"int4wo-{group}" for group in (32, 64, 128, 256)},
}

# Keys are values of `quant_method` in a checkpoint's configuration.
FORMATS: Mapping[str, FormatEntry] = {
    "awq": FormatEntry(file="awq", asked=("awq_marlin", "moe_wna16")),
    "bitsandbytes": FormatEntry(file="bitsandbytes"),
    "compressed-tensors": FormatEntry(file="scaled", asked=("w8a8_int8", "fp8", "w8a8_fp8")),
    "fbgemm_fp8": FormatEntry(file="scaled", asked=("fp8",)),
    "fp8": FormatEntry(file="scaled"),
    "gguf": FormatEntry(file="gguf"),
    "gptq": FormatEntry(file="gptq", asked=("gptq_marlin", "marlin", "moe_wna16")),
    "modelopt": FormatEntry(file="modelopt", asked=("fp8", "modelopt_fp4", "petit_nvfp4")),
    "mxfp4": FormatEntry(file="mxfp4"),
    "quark": FormatEntry(file="quark"),
    "torchao": FormatEntry(file="torchao"),
}

# Formats whose 4-bit or float8 weights may stay quantised on a GPU. Weights in other formats are dequantised.
GROUPED = ("awq", "compressed-tensors", "fbgemm_fp8", "fp8", "gguf", "gptq", "modelopt", "mxfp4", "quark", "torchao")

# Values of `--quantization` that Penstock refuses, and why.
UNREADABLE: Mapping[str, str] = {
    "qoq": "its weights are interleaved for one GPU kernel, and its library is no longer maintained; use w8a8_int8, or "
    "a checkpoint in compressed-tensors, GPTQ or AWQ format",
    "w4afp8": "its weights are interleaved for one kernel of Hopper GPUs; use a checkpoint in compressed-tensors, GPTQ "
    "or AWQ format",
}

# Maps a value of `--quantization` to the end of an error message that names a tool for writing such a checkpoint.
WRITERS: Mapping[str, str] = {
    "bitsandbytes": ", which transformers writes (BitsAndBytesConfig)",
    "gguf": ", which llama.cpp writes",
}


def spellings() -> tuple[str, ...]:
    """Return all supported values of `--quantization`."""
    names = [*METHODS]
    for name, form in FORMATS.items():
        names += [name, *form.asked]
    return tuple(dict.fromkeys(names))


def agrees(asked: str, stored: str, settings: Mapping[str, Any]) -> bool:
    """Return whether the value `asked` of `--quantization` names the checkpoint's format `stored`.

    `settings` is the checkpoint's `quantization_config`.
    """
    if stored == "compressed-tensors" and asked in ("fp8", "w8a8_fp8") and not _has_float8(settings):
        return False
    return asked == stored or asked in FORMATS[stored].asked


def _has_float8(settings: Mapping[str, Any]) -> bool:
    """Return whether all weights of a compressed-tensors checkpoint are 8-bit floats, according to its settings."""
    groups = settings.get("config_groups")
    stated = groups.values() if isinstance(groups, Mapping) else ()
    weights = [group.get("weights") for group in stated if isinstance(group, Mapping)]
    return all(
        each.get("type") == "float" and each.get("num_bits") == 8 for each in weights if isinstance(each, Mapping)
    )
