"""The configuration that model families read. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runtime.config.fields import Fields
from runtime.errors import CheckpointError
from runtime.layers.rope_parameters import RopeParameters, read_rope_parameters
from runtime.modeling.entry import Entry
from runtime.modeling.spellings import FULL, SLIDING

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


class Config(Fields):
    """The values of config.json, with the architecture's defaults for missing fields."""

    def __init__(self, architecture: str, entry: Entry, values: Mapping[str, Any]) -> None:
        self.architecture = architecture
        self.entry = entry
        super().__init__(entry.values(values), "config.json: ")

    def check(self) -> None:
        """Raise CheckpointError for invalid values that otherwise would be found only when weights are loaded."""
        _ = self.optional_integer("intermediate_size"), self.norm_eps, self.activation, self.layer_types()
        _ = self.flag("tie_word_embeddings"), self.flag("attention_bias"), self.flag("mlp_bias")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads {self.num_heads} must be a multiple of "
                f"num_key_value_heads {self.num_kv_heads}."
            )
        if self.optional_integer("head_dim") is None and self.hidden_size % self.num_heads:
            raise CheckpointError(
                f"config.json: hidden_size {self.hidden_size} must be a multiple of "
                f"num_attention_heads {self.num_heads}."
            )

    @property
    def num_layers(self) -> int:
        return self.integer("num_hidden_layers")

    @property
    def num_heads(self) -> int:
        return self.integer("num_attention_heads")

    @property
    def num_kv_heads(self) -> int:
        return self.optional_integer("num_key_value_heads") or self.num_heads

    @property
    def hidden_size(self) -> int:
        return self.integer("hidden_size")

    @property
    def head_dim(self) -> int:
        return self.optional_integer("head_dim") or self.hidden_size // self.num_heads

    @property
    def latent_dims(self) -> tuple[int, int] | None:
        """Sizes of a latent vector and a rotated key of multi-head latent attention (MLA); None: another attention."""
        if "kv_lora_rank" not in self.entry.defaults:
            return None
        rope_dim = self.integer("qk_rope_head_dim")
        return self.head_dim - rope_dim, rope_dim

    @property
    def intermediate_size(self) -> int:
        return self.integer("intermediate_size")

    @property
    def vocab_size(self) -> int:
        return self.integer("vocab_size")

    @property
    def norm_eps(self) -> float:
        return self.optional_number("rms_norm_eps") or 1e-6

    @property
    def activation(self) -> str:
        """Name of the activation in `ops.activation`."""
        return ACTIVATIONS[self.choice("hidden_act", list(ACTIVATIONS), default="silu")]

    def layer_types(self) -> list[str] | None:
        """Return the kind of each layer, or None if the configuration does not list kinds."""
        kinds = self.values.get("layer_types")
        if kinds is None:
            return None
        known = self.entry.layer_types or (FULL, SLIDING)
        if not isinstance(kinds, list) or len(kinds) != self.num_layers or not set(kinds) <= set(known):
            raise self.wrong("layer_types", f"{self.num_layers} of {', '.join(known)}")
        return kinds

    def windows(self, kinds: Sequence[str]) -> list[int | None]:
        """Return the window of each layer: `sliding_window` for sliding layers, None for other layers.

        `kinds` replaces `layer_types` if config.json does not have it.
        """
        size = self.optional_integer("sliding_window")
        return [size if kind == SLIDING else None for kind in self.layer_types() or kinds]

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of a classifier; () for other models."""
        return read_labels(self.architecture, self) if self.entry.scores else ()

    def rope(self, layer_type: str | None = None) -> RopeParameters:
        """Return the rope parameters for layers of this type, or for all layers if `layer_type` is None."""
        return read_rope_parameters(self, self.head_dim, layer_type)


def read_labels(architecture: str, fields: Fields) -> tuple[str, ...]:
    """Return the label names of a classifier in the order of their ids."""
    if architecture.endswith("RewardModel"):
        return ("reward",)
    names = fields.child("id2label").values
    count = fields.optional_integer("num_labels") or len(names) or 2
    return tuple(str(names.get(str(index), f"LABEL_{index}")) for index in range(count))
