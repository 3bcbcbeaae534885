"""Facts about the model, read from a checkpoint's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.config.pooling import Pooling

# Keys under which the configurations of different model families store the number of experts.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


# Keys for the number of experts that the router chooses for each token.
CHOSEN_COUNTS = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
MANY_CHOSEN = 16  # upper bound that is assumed if the configuration has none of these keys


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts from config.json and generation_config.json, read before the weights. Does not import torch."""

    architecture: str
    path: str  # local directory or GGUF file of the checkpoint
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    context_length: int  # maximum number of tokens of prompt and output together, from config.json
    dtype: str  # dtype of the checkpoint: "bfloat16", "float16", "float32"
    eos_ids: frozenset[int] = frozenset()  # end-of-sequence ids from config.json and generation_config.json
    bos_id: int | None = None
    has_sinks: bool = False  # attention has learned sinks (scores without values)
    alibi: bool = False  # attention uses ALiBi (scores decrease with distance)
    # (size of a latent vector, size of a rotated key) of multi-head latent attention (MLA); None: another attention
    latent_dims: tuple[int, int] | None = None
    recurrent: bool = False  # some layers keep a recurrent state instead of keys and values
    weight_bytes: int = 0  # size of the weights on disk in bytes
    preferred_sampling: Mapping[str, Any] = field(default_factory=dict)  # sampling defaults of generation_config.json
    # Quantisation format of the weights, a key of FORMATS (config/quantization.py); None: not quantised.
    quantization: str | None = None
    by_transformers: bool = False  # the model is computed by transformers' modules, not by runtime/models
    is_encoder: bool = False  # the model attends to whole texts, has no KV cache and generates no tokens
    pooling: Pooling | None = None  # pooling of an embedding checkpoint; None: the last token
    prompts: Mapping[str, str] = field(default_factory=dict)  # prompts that may precede a text, by name
    default_prompt: str | None = None  # the key in `prompts` that is used by default; None: no prompt
    lower_case: bool = False  # texts are lower-cased before tokenization
    # Labels of a classifier, whose output vector has one score per label; (): the model is no classifier.
    labels: tuple[str, ...] = ()
    score_activation: str = ""  # function from scores to probabilities: "sigmoid", "softmax"; "": none
    config: Mapping[str, Any] = field(default_factory=dict)  # config.json with overrides

    @property
    def num_experts(self) -> int:
        """Number of experts of a mixture; 0 if the model has none."""
        return self._number_of_text(EXPERT_COUNTS)

    @property
    def num_experts_per_token(self) -> int:
        """Number of experts that the router chooses for each token, or an upper bound."""
        return self._number_of_text(CHOSEN_COUNTS) or MANY_CHOSEN

    @property
    def num_expert_groups(self) -> int:
        """Number of expert groups of a DeepSeek model's router; 1 if the experts have no groups."""
        return self._number_of_text(("n_group",)) or 1

    @property
    def attention_chunk(self) -> int:
        """Tokens in a chunk of chunked attention layers (Llama 4); 0 if the model has none."""
        return self._number_of_text(("attention_chunk_size",))

    def _number_of_text(self, names: tuple[str, ...]) -> int:
        """Return the first value under these names that is a positive integer, or 0 if there is none.

        The top level of config.json is searched first, then its `text_config`.
        """
        parts = [self.config, self.config.get("text_config")]
        values = [part.get(name) for part in parts if isinstance(part, Mapping) for name in names]
        return next((value for value in values if type(value) is int and value > 0), 0)

    @property
    def vector_size(self) -> int:
        """Number of scores of a classifier, or length of an embedding."""
        if self.labels:
            return len(self.labels)
        return (self.pooling or Pooling()).size(self.hidden_size)

    @property
    def needs_whole_prompts(self) -> bool:
        """Whether an embedding must be computed in a single step over the whole text, without cached prefixes."""
        return self.is_encoder or (self.pooling is not None and self.pooling.needs_all)
