"""What a checkpoint's configuration says about the model, as far as anyone outside the model needs to know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.config.pooling import Pooling


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
    alibi: bool = False  # of attention: scores lose by distance
    recurrent: bool = False  # some layers keep a state instead of keys and values
    weight_bytes: int = 0  # on disk
    preferred_sampling: Mapping[str, Any] = field(default_factory=dict)  # generation_config's values
    # The form of its weights, by its name in FORMATS (config/quantization.py).
    quantization: str | None = None
    by_transformers: bool = False  # transformers' own modules compute it, not a family of ours
    is_encoder: bool = False  # sees each text whole, caches nothing and writes no token
    pooling: Pooling | None = None  # of a checkpoint that is made for vectors; None: the last token's
    prompts: Mapping[str, str] = field(default_factory=dict)  # by name: what may be put before a text
    default_prompt: str | None = None  # the name of the one that is put there unless told
    lower_case: bool = False  # texts are lowered before they become tokens
    labels: tuple[str, ...] = ()  # of a classifier, whose vectors are their scores
    score_activation: str = ""  # what makes probabilities of scores: "sigmoid", "softmax", or nothing does
    config: Mapping[str, Any] = field(default_factory=dict)  # the whole config.json, overrides merged in

    @property
    def vector_size(self) -> int:
        """How many numbers a text's vector has, or scores."""
        if self.labels:
            return len(self.labels)
        return (self.pooling or Pooling()).size(self.hidden_size)

    @property
    def needs_whole_prompts(self) -> bool:
        """Whether a text for a vector must be computed in one step, nothing of it found in a cache."""
        return self.is_encoder or (self.pooling is not None and self.pooling.needs_all)
