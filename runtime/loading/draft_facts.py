"""Read the facts of a draft model or draft head. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.config.fields import Fields
from runtime.config.gguf_header import is_gguf
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import DraftPlan
from runtime.errors import CheckpointError, ConfigurationError
from runtime.loading.checkpoint import tensor_names
from runtime.loading.facts import read_facts, read_values
from runtime.models.draft_heads import EAGLE3_NAMES, EAGLE_NAMES, NEXTN, OWN_PREFIXES
from runtime.models.registry import architecture_of

# Values that replace those of the served model's config.json, so that it describes a draft head with one layer.
_OF_MODEL = {
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "mlp_layer_types": None,
    "num_nextn_predict_layers": None,
}


def read_draft_facts(draft: DraftPlan, target: ModelFacts) -> ModelFacts:
    """Return the facts of the draft model or draft head at `draft.path`, for the served model `target`.

    Raises `ConfigurationError` if the checkpoint has no layers that this algorithm uses, and `CheckpointError` for
    invalid files.
    """
    path = draft.path or ""
    if draft.algorithm == "STANDALONE":
        return read_facts(path, model_impl="native")
    if target.by_transformers:
        raise ConfigurationError(
            f"--speculative-algorithm {draft.algorithm}: {target.architecture} is computed by transformers' modules, "
            "whose hidden states a draft head cannot read; use NGRAM or STANDALONE."
        )
    if is_gguf(Path(path)):
        raise ConfigurationError(
            f"--speculative-algorithm {draft.algorithm} cannot read a draft head from a GGUF file; use a checkpoint in "
            "safetensors, NGRAM, or STANDALONE with a GGUF model."
        )
    if draft.algorithm == "NEXTN":
        return read_facts(path, _nextn_overrides(path, target), model_impl="native")
    return read_facts(path, _eagle_overrides(draft, path, target), model_impl="native")


def nextn_overrides(draft: ModelFacts) -> Mapping[str, Any]:
    """Return the overrides with which a draft head of NEXTN with these facts was read from the model's config.json."""
    return {**_OF_MODEL, "architectures": [draft.architecture], "nextn_layer": draft.config.get("nextn_layer")}


def has_nextn_tensors(path: str, draft: ModelFacts) -> bool:
    """Return whether a checkpoint has tensors for a draft head of NEXTN. True if its tensors are unknown."""
    layer = draft.config.get("nextn_layer")
    return _has_tensors(path, OWN_PREFIXES.get(draft.architecture, f"model.layers.{layer}."))


def _has_tensors(path: str, prefix: str) -> bool:
    stored = tensor_names(path)
    return stored is None or any(name.startswith(prefix) for name in stored)


def _eagle_overrides(draft: DraftPlan, path: str, target: ModelFacts) -> Mapping[str, Any]:
    """Return the overrides that complete the config.json of an EAGLE head for use as a draft head."""
    values = read_values(Path(path))[0]
    names = EAGLE3_NAMES if draft.algorithm == "EAGLE3" else EAGLE_NAMES
    given = architecture_of(values)
    if given not in names:
        raise ConfigurationError(
            f"--speculative-draft-model-path {path}: {given} is not a draft head of {draft.algorithm}; its config.json "
            f"must name one of {', '.join(names)}."
        )
    stored = tensor_names(path)
    if stored is not None and not any(name.removeprefix("model.").startswith("fc.") for name in stored):
        raise ConfigurationError(
            f"--speculative-draft-model-path {path} has no tensor fc.weight, so it is not a draft head; use "
            "--speculative-algorithm STANDALONE for a small model."
        )
    return {
        "architectures": [names[given]],
        "target_num_layers": target.num_layers,
        "shares_lm_head": stored is not None and not any(name.endswith("lm_head.weight") for name in stored),
        "max_position_embeddings": target.context_length,
    }


def _nextn_overrides(path: str, target: ModelFacts) -> Mapping[str, Any]:
    """Return the overrides that make the served model's config.json describe its first multi-token prediction layer."""
    values = read_values(Path(path))[0]
    name = NEXTN.get(architecture_of(values))
    if name is None:
        raise ConfigurationError(
            f"--speculative-algorithm NEXTN needs multi-token prediction layers of {', '.join(NEXTN)}, not of "
            f"{architecture_of(values)}; use NGRAM, STANDALONE or EAGLE3."
        )
    layer = Fields(values, "config.json: ").integer("num_hidden_layers")
    prefix = OWN_PREFIXES.get(name, f"model.layers.{layer}.")
    if not _has_tensors(path, prefix):
        raise ConfigurationError(
            f"--speculative-algorithm NEXTN: {path} has no tensors {prefix}*; it was saved without multi-token "
            "prediction layers. Use NGRAM, STANDALONE or EAGLE3."
        )
    if target.hidden_size != Fields(values, "config.json: ").integer("hidden_size"):
        raise CheckpointError(f"{path}: hidden_size differs from that of the served model.")
    return {**_OF_MODEL, "architectures": [name], "nextn_layer": None if name in OWN_PREFIXES else layer}
