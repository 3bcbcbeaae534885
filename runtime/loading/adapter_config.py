"""Read the settings of LoRA adapters in `peft`'s format. Does not import torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.config.fields import Fields
from runtime.errors import CheckpointError

CONFIG = "adapter_config.json"
MAX_CONFIG_BYTES = 2**20
# Settings that are not supported -> the value with which the setting has no effect.
_UNSUPPORTED: Mapping[str, Any] = {
    "lora_bias": False,
    "layer_replication": None,
    "alora_invocation_tokens": None,
    "use_qalora": False,
}


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The settings that determine what an adapter computes."""

    rank: int  # the largest rank of all layers
    alpha: float
    root_scaled: bool  # whether the scale is alpha / sqrt(rank) (rsLoRA, arXiv 2312.03732) instead of alpha / rank
    alphas: Mapping[str, float]  # regular expression -> alpha of the layers whose names end with a match
    # Whether each row of an adapted weight is scaled to a trained length (DoRA, arXiv 2402.09353).
    has_magnitudes: bool = False
    # Layer name -> tokens whose vectors the adapter replaces in this layer. The name "" stands for the embedding.
    tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def scale(self, layer: str, rank: int) -> float:
        """Return the factor of the product b @ a for a layer with this name and rank."""
        found = (alpha for key, alpha in self.alphas.items() if re.fullmatch(rf"(.*\.)?({key})", layer))
        return next(found, self.alpha) / (math.sqrt(rank) if self.root_scaled else rank)


def read_config(folder: Path) -> AdapterConfig:
    """Read an adapter's settings. Raises CheckpointError if the folder has no adapter or one that is not supported."""
    path = folder / CONFIG
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise CheckpointError(f"{path} is too large.")
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{folder} is not an adapter: {CONFIG} cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON.") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is not a JSON object.")
    _check_supported(values, path)
    fields = Fields(values, f"{path}: ")
    ranks, alphas = (values.get(name) or {} for name in ("rank_pattern", "alpha_pattern"))
    if not isinstance(ranks, dict) or not isinstance(alphas, dict):
        raise CheckpointError(f"{path}: rank_pattern and alpha_pattern must be JSON objects.")
    named_ranks = Fields(ranks, f"{path}, rank_pattern, ")
    named_alphas = Fields(alphas, f"{path}, alpha_pattern, ")
    for key in alphas:
        try:
            re.compile(key)
        except re.error as error:
            raise CheckpointError(f"{path}: alpha_pattern has {key!r}, which is not a regular expression.") from error
    return AdapterConfig(
        rank=max(fields.integer("r"), *(named_ranks.integer(key) for key in ranks), 1),
        alpha=fields.number("lora_alpha"),
        root_scaled=fields.flag("use_rslora"),
        alphas={key: named_alphas.number(key) for key in alphas},
        has_magnitudes=fields.flag("use_dora"),
        tokens=_tokens(values.get("trainable_token_indices"), path),
    )


def _tokens(value: Any, path: Path) -> dict[str, tuple[int, ...]]:
    named = value if isinstance(value, dict) else {} if value is None else {"": value}
    for ids in named.values():
        if not isinstance(ids, list) or not all(type(each) is int and each >= 0 for each in ids):
            raise CheckpointError(f"{path}: trainable_token_indices must have lists of token ids.")
    return {name: tuple(ids) for name, ids in named.items()}


def _check_supported(values: Mapping[str, Any], path: Path) -> None:
    kind = values.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{path}: the adapter is of type {kind}, not LORA.")
    for name, neutral in _UNSUPPORTED.items():
        if values.get(name) not in (neutral, None):
            raise CheckpointError(f"{path}: {name} is not supported.")
    if values.get("bias") not in ("none", None):
        raise CheckpointError(f"{path}: an adapter with biases is not supported; train it with bias='none'.")
