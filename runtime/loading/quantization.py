"""Find a checkpoint's quantisation format in config.json or in the files of older tools. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.config.fields import Fields
from runtime.config.quantization import FORMATS
from runtime.errors import CheckpointError

SPELLINGS = {
    "compressed_tensors": "compressed-tensors",
    "gptq_v2": "gptq",
    "modelopt_fp4": "modelopt",
    "modelopt_fp8": "modelopt",
}
AUTO_ROUND = {  # part of the name of AutoRound's packing -> format with this packing
    "awq": "awq",
    "gptq": "gptq",
    "llm_compressor": "compressed-tensors",
    "fp8": "fp8",
    "auto_round": "gptq",
}
MAX_FILE_BYTES = 16 * 2**20


def with_quantization(values: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Return config.json with a `quantization_config` whose `quant_method` is in FORMATS, if weights are quantised.

    Raises CheckpointError if the format is not supported.
    """
    config = dict(values)
    stated = config.get("quantization_config") or config.get("compression_config") or _from_files(directory)
    if not stated:
        config.pop("quantization_config", None)
        return config
    if not isinstance(stated, Mapping):
        raise CheckpointError(f"config.json: quantization_config must be an object, not {stated!r}.")
    config["quantization_config"] = {**stated, **_form(stated)}
    return config


def stored_quantization(values: Mapping[str, Any]) -> str | None:
    """Return the format (a name in FORMATS) in a result of `with_quantization`, or None if weights are unquantised."""
    stated = values.get("quantization_config")
    return stated.get("quant_method") if stated else None


def quantization_fields(values: Mapping[str, Any]) -> Fields:
    """Return the `quantization_config` of a configuration."""
    return Fields(values, "config.json: ").child("quantization_config")


def _form(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values to add to `quantization_config`, including a `quant_method` that is in FORMATS."""
    name = stated.get("quant_method")
    if name is None and "config_groups" in stated:
        name = "compressed-tensors"
    name = SPELLINGS.get(str(name), str(name))
    more: dict[str, Any] = {}
    if name == "auto-round":  # AutoRound writes the formats of other tools
        packed = str(stated.get("packing_format") or "gptq").removeprefix("auto_round:")
        name = next((form for part, form in AUTO_ROUND.items() if part in packed), f"auto-round, {packed}")
        if packed in ("auto_round", "gptqmodel"):
            more["checkpoint_format"] = "gptq_v2"  # stores zero points as they are; "gptq" subtracts 1
    if name == "gptq" and stated.get("checkpoint_format") == "marlin":
        name = "marlin"
    if name not in FORMATS:
        raise CheckpointError(
            f"The checkpoint is quantized ({name}), which is not supported. Use the unquantized model or one in "
            f"a supported format: {', '.join(FORMATS)}."
        )
    return {"quant_method": name, **more}


def _from_files(directory: Path) -> dict[str, Any]:
    """Return the quantization_config from an older tool's file; {} if there is none."""
    modelopt = _read(directory / "hf_quant_config.json")
    if isinstance(modelopt.get("quantization"), Mapping):
        return {"quant_method": "modelopt", **modelopt["quantization"]}
    if (directory / "quanto_qmap.json").is_file():
        return {"quant_method": "quanto"}
    older = _read(directory / "quantize_config.json") or _read(directory / "quant_config.json")
    if not older or "quant_method" in older:
        return older
    return {**older, "quant_method": "awq" if "w_bit" in older or "zero_point" in older else "gptq"}


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file() or file.stat().st_size > MAX_FILE_BYTES:
        return {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    return values if isinstance(values, dict) else {}
