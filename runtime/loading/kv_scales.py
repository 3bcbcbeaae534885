"""Scales of an 8-bit KV cache from a separate file (`--quantization-param-path`), in the format of vLLM and SGLang:

    {"model_type": "llama", "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.04, "1": 0.05}}}}

The keys of scaling_factor are tensor-parallel ranks and layers. Keys and values share a scale.
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
    """Set the scale of every attention layer of this rank. Raises CheckpointError if the file lacks one."""
    scales = _read(Path(file), facts, tp_rank, tp_size)
    for module in model.modules():
        if isinstance(module, KVScales) and (match := _LAYER.fullmatch(module.name)):
            value = scales.get(match[1])
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is None or not is_number or not math.isfinite(value) or value <= 0:
                raise CheckpointError(
                    f"{file}: the scaling_factor of rank {tp_rank}, layer {match[1]} must be a positive number, "
                    f"not {value!r}."
                )
            module.values = {"k_scale": float(value), "v_scale": float(value)}


def _read(file: Path, facts: ModelFacts, tp_rank: int, tp_size: int) -> Mapping[str, Any]:
    """Return the scales of one rank: layer number -> scale."""
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise CheckpointError(f"{file} is larger than the limit of {MAX_FILE_BYTES} bytes.")
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    cache = values.get("kv_cache") if isinstance(values, dict) else None
    ranks = cache.get("scaling_factor") if isinstance(cache, dict) else None
    if not isinstance(cache, dict) or not isinstance(ranks, dict):
        raise CheckpointError(f"{file} has no kv_cache with a scaling_factor.")
    if cache.get("dtype") != "float8_e4m3fn":
        raise CheckpointError(f"{file}: the dtype of kv_cache must be float8_e4m3fn, not {cache.get('dtype')!r}.")
    known = values.get("model_type")
    if known is not None and known != facts.config.get("model_type"):
        raise CheckpointError(f"{file} is for {known} models, but this model is {facts.config.get('model_type')}.")
    if len(ranks) != tp_size or not isinstance(ranks.get(str(tp_rank)), dict):
        raise CheckpointError(f"{file} has scales of the ranks {', '.join(ranks)}, but --tp-size is {tp_size}.")
    return ranks[str(tp_rank)]
