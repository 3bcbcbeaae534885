"""What a checkpoint's configuration says about the model, as far as anyone outside the model needs to know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Read from config.json (and generation_config.json) before any weight is touched. Torch-free."""

    architecture: str
    path: str  # the local directory
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    context_length: int  # as derived from the configuration
    dtype: str  # of the checkpoint: "bfloat16", "float16", "float32"
    eos_ids: frozenset[int] = frozenset()  # of the config and the generation config
    bos_id: int | None = None
    has_sinks: bool = False  # of attention: learned scores without values
    cuttable: bool = True  # over tensor-parallel ranks
    weight_bytes: int = 0  # on disk
    preferred_sampling: Mapping[str, Any] = field(default_factory=dict)  # generation_config's values
    quantization: str | None = (
        None  # the form of its weights, by its name in FORMATS (config/quantization.py)
    )
    by_transformers: bool = False  # transformers' own modules compute it, not a family of ours
    config: Mapping[str, Any] = field(default_factory=dict)  # the whole config.json, overrides merged in
