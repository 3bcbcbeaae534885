"""Which form a quantised checkpoint has: config.json, or the files that older tools write beside it. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.config.fields import Fields
from runtime.config.quantization import FORMATS
from runtime.errors import CheckpointError

SPELLINGS = {"compressed_tensors": "compressed-tensors", "gptq_v2": "gptq", "modelopt_fp8": "modelopt"}
AUTO_ROUND = {  # part of what AutoRound calls a packing -> the form it is
    "awq": "awq",
    "gptq": "gptq",
    "llm_compressor": "compressed-tensors",
    "fp8": "fp8",
    "auto_round": "gptq",
}
MAX_FILE_BYTES = 16 * 2**20


def with_quantization(values: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """config.json with a `quantization_config` whose `quant_method` is a name in FORMATS, if the weights are quantised.

    Raises CheckpointError for a form that nothing here reads.
    """
    found = dict(values)
    stated = found.get("quantization_config") or found.get("compression_config") or _beside(directory)
    if not stated:
        found.pop("quantization_config", None)
        return found
    if not isinstance(stated, Mapping):
        raise CheckpointError(f"config.json: quantization_config must be an object, not {stated!r}.")
    found["quantization_config"] = {**stated, **_form(stated)}
    return found


def stored_quantization(values: Mapping[str, Any]) -> str | None:
    """The form of the weights by its name in FORMATS, of a configuration as `with_quantization` gives it."""
    stated = values.get("quantization_config")
    return stated.get("quant_method") if stated else None


def quantization_fields(values: Mapping[str, Any]) -> Fields:
    """The `quantization_config` of a configuration."""
    return Fields(values, "config.json: ").child("quantization_config")


def _form(stated: Mapping[str, Any]) -> dict[str, Any]:
    """The form's name in FORMATS, and what else its reader has to be told."""
    name = stated.get("quant_method")
    if name is None and "config_groups" in stated:
        name = "compressed-tensors"
    name = SPELLINGS.get(str(name), str(name))
    more: dict[str, Any] = {}
    if name == "auto-round":  # writes the forms of others
        packed = str(stated.get("packing_format") or "gptq").removeprefix("auto_round:")
        name = next((form for part, form in AUTO_ROUND.items() if part in packed), f"auto-round, {packed}")
        if packed in ("auto_round", "gptqmodel"):
            more["checkpoint_format"] = "gptq_v2"  # zeros as they are
    if name == "gptq" and stated.get("checkpoint_format") == "marlin":
        name = "marlin"
    if name not in FORMATS:
        raise CheckpointError(
            f"The checkpoint is quantized ({name}), which is not supported; use the unquantized model or one in "
            f"another form: {', '.join(FORMATS)}."
        )
    return {"quant_method": name, **more}


def _beside(directory: Path) -> dict[str, Any]:
    """What stands in the file of an older tool, in the words of config.json; empty where there is none."""
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
