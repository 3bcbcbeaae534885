"""Scales of an 8-bit KV cache from a file of their own (`--quantization-param-path`), as vLLM and SGLang read it:

    {"model_type": "llama", "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.04, "1": 0.05}}}}

by tensor-parallel rank and layer, one for keys and values alike.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from runtime.config.model_facts import ModelFacts
from runtime.errors import CheckpointError
from runtime.layers.attention import KVScales

MAX_FILE_BYTES = 16 * 2**20
_LAYER = re.compile(r"(?:.*\.)?(\d+)\..*")


def set_kv_scales(model: nn.Module, file: str, facts: ModelFacts, tp_rank: int, tp_size: int) -> None:
    """Give every attention layer of this rank its scale. Raises CheckpointError for a file that does not have it."""
    scales = _read(Path(file), facts, tp_rank, tp_size)
    for module in model.modules():
        if isinstance(module, KVScales) and (found := _LAYER.fullmatch(module.name)):
            value = scales.get(found[1])
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is None or not is_number or not math.isfinite(value) or value <= 0:
                raise CheckpointError(
                    f"{file}: the scaling_factor of rank {tp_rank}, layer {found[1]} must be a positive number, "
                    f"not {value!r}."
                )
            module.values = {"k_scale": float(value), "v_scale": float(value)}


def _read(file: Path, facts: ModelFacts, tp_rank: int, tp_size: int) -> Mapping[str, Any]:
    """What the file has for a rank, by layer."""
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise CheckpointError(
                f"{file} is larger than the {MAX_FILE_BYTES} bytes that such files have at most."
            )
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    cache = values.get("kv_cache") if isinstance(values, dict) else None
    ranks = cache.get("scaling_factor") if isinstance(cache, dict) else None
    if not isinstance(cache, dict) or not isinstance(ranks, dict):
        raise CheckpointError(f"{file} has no kv_cache with a scaling_factor.")
    if cache.get("dtype") != "float8_e4m3fn":
        raise CheckpointError(
            f"{file}: the dtype of kv_cache must be float8_e4m3fn, not {cache.get('dtype')!r}."
        )
    known = values.get("model_type")
    if known is not None and known != facts.config.get("model_type"):
        raise CheckpointError(
            f"{file} is made for {known} models, and this is {facts.config.get('model_type')}."
        )
    if len(ranks) != tp_size or not isinstance(ranks.get(str(tp_rank)), dict):
        raise CheckpointError(
            f"{file} has scales of the ranks {', '.join(ranks)}, and there are {tp_size} (--tp-size)."
        )
    return ranks[str(tp_rank)]
