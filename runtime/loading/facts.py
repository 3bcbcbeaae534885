"""Read ModelFacts from config.json and generation_config.json, or from a GGUF file. Does not import torch."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from runtime.config.fields import Fields
from runtime.config.gguf_header import is_gguf
from runtime.config.model_facts import ModelFacts
from runtime.config.pooling import Pooling, SentenceFiles, read_sentence_files
from runtime.errors import CheckpointError, InvalidRequest
from runtime.loading.checkpoint import lfs_hint, stored_dtype, weight_bytes
from runtime.loading.gguf_config import read_gguf_config
from runtime.loading.quantization import stored_quantization, with_quantization
from runtime.modeling.config import read_labels
from runtime.modeling.entry import Entry
from runtime.models.refused import REFUSED
from runtime.models.registry import architecture_of, config_of, entry, find, unsupported
from runtime.sampling_params import FROM_MODEL, SamplingParams

logger = logging.getLogger("penstock.core")

DTYPES = ("float32", "float16", "bfloat16")


def read_facts(path: str, overrides: Mapping[str, Any] | None = None, *, model_impl: str = "auto") -> ModelFacts:
    """Return the facts of a local checkpoint (a directory or a GGUF file). `overrides` replace values of config.json.

    `model_impl` is "auto" (a native family if there is one, else transformers' code), "native" (SGLang calls it
    "sglang") or "transformers". For a native family, this function does not import torch.

    Raises CheckpointError if the directory is missing or contains no model, if JSON cannot be read, if the architecture
    is not supported, and if values are invalid.
    """
    directory = Path(path)
    values, generation = read_values(directory)
    values = merge(values, overrides or {})
    if "text_config" in values and not isinstance(values["text_config"], dict):
        raise CheckpointError(f"config.json: text_config must be an object, not {values['text_config']!r}.")
    if (refused := architecture_of(values)) in REFUSED:
        raise CheckpointError(unsupported(refused))
    values = with_quantization(values, directory)
    by_transformers = model_impl == "transformers" or (model_impl == "auto" and find(architecture_of(values)) is None)
    if by_transformers and is_gguf(directory):
        raise CheckpointError(
            f"{path} is a GGUF file, which --model-impl transformers does not support. Omit --model-impl."
        )
    if by_transformers:
        values = {**values, "architectures": [_usual_name(architecture_of(values))]}
    numbers = _numbers_of_transformers(values) if by_transformers else _numbers(values)
    bos_ids = _token_ids(values, "bos_token_id") or _token_ids(generation, "bos_token_id")
    stated = _stated_dtype(Fields(values, "config.json: "))
    sentences = read_sentence_files(directory)
    known = None if by_transformers else entry(architecture_of(values))
    vectors = _vector_output(architecture_of(values)) if by_transformers else None
    if sentences is not None and sentences.max_tokens is not None:
        numbers["context_length"] = min(numbers["context_length"], sentences.max_tokens)
    return ModelFacts(
        **numbers,
        architecture=architecture_of(values),
        path=str(directory),
        dtype=stated or stored_dtype(directory) or "float32",
        eos_ids=_eos_ids(values, generation, numbers["vocab_size"]),
        bos_id=min(bos_ids, default=None),
        weight_bytes=weight_bytes(directory),
        preferred_sampling=_preferred_sampling(generation),
        quantization=stored_quantization(values),
        by_transformers=by_transformers,
        **_of_vectors(values, sentences, known, vectors=vectors),
        config=values,
    )


def _usual_name(architecture: str) -> str:
    """Return the architecture's name in transformers, or `architecture` if a native family has it. Imports torch."""
    from runtime.models.by_transformers.facts import usual_name

    name = usual_name(architecture)
    return architecture if find(name) is not None else name


def _vector_output(architecture: str) -> str | None:
    """Return SCORES or VECTORS for a model that transformers runs without a cache, or None for a model that generates
    text. Imports torch.
    """
    from runtime.models.by_transformers.facts import TEXT, output_kind

    kind = output_kind(architecture)
    return None if kind == TEXT else kind


def _of_vectors(
    values: Mapping[str, Any], files: SentenceFiles | None, known: Entry | None, *, vectors: str | None = None
) -> dict[str, Any]:
    """Return the facts on pooling and scores. An encoder without pooling configuration uses mean pooling."""
    is_encoder = vectors is not None or (known is not None and known.encoder)
    if vectors == "scores" or (known is not None and known.scores):
        fields, pooling = Fields(values, "config.json: "), "last"
        if is_encoder and vectors is None:
            pooling = fields.choice("classifier_pooling", ("cls", "mean"), default="cls")
        labels = read_labels(architecture_of(values), fields)
        return {
            "is_encoder": is_encoder,
            "pooling": Pooling(modes=(pooling,), normalize=False),
            "labels": labels,
            "score_activation": _score_activation(fields, labels),
        }
    if files is None:
        mean = Pooling(modes=("mean",)) if is_encoder else None
        headless = Pooling() if known is not None and known.headless else None
        return {"is_encoder": is_encoder, "pooling": mean or headless}
    return {
        "is_encoder": is_encoder,
        "pooling": files.pooling,
        "prompts": files.prompts,
        "default_prompt": files.default_prompt,
        "lower_case": files.lower_case,
    }


def _score_activation(fields: Fields, labels: tuple[str, ...]) -> str:
    """Return the activation of scores that transformers pipelines and sentence-transformers cross-encoders use."""
    activation = fields.values.get("sbert_ce_default_activation_function")
    activation = activation or fields.child("sentence_transformers").values.get("activation_fn")
    kind = fields.values.get("problem_type")
    if str(activation).endswith(".Identity") or kind == "regression" or labels == ("reward",):
        return ""
    if str(activation).endswith(".Sigmoid") or kind == "multi_label_classification" or len(labels) == 1:
        return "sigmoid"
    return "softmax"


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of a model of a native family."""
    config = config_of(values)
    config.check()
    return {
        "num_layers": config.num_layers,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "latent_dims": config.latent_dims,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "context_length": config.rope().context_length,
        "has_sinks": config.entry.sinks,
        "alibi": config.flag("alibi"),
        "recurrent": config.entry.recurrent,
    }


def _numbers_of_transformers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of a model that transformers runs. Imports torch and runs the model on the meta device."""
    from runtime.models.by_transformers.facts import model_sizes

    sizes = model_sizes(values)
    names = (field.name for field in fields(sizes) if field.name != "layers")
    return {name: getattr(sizes, name) for name in names}


def read_values(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return config.json and generation_config.json, or their equivalents from a GGUF file."""
    if is_gguf(directory):
        return read_gguf_config(directory)
    if not directory.is_dir():
        raise CheckpointError(f"There is no directory {directory}.")
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory} contains no model: it has no config.json.")
    generation = directory / "generation_config.json"
    return _read_json(directory / "config.json"), _read_json(generation) if generation.is_file() else {}


def check_serves(facts: ModelFacts) -> None:
    """Raise CheckpointError if the checkpoint is a draft head, which cannot be served without its model."""
    known = None if facts.by_transformers else find(facts.architecture)
    if known is not None and known.draft_head:
        raise CheckpointError(
            f"{facts.path} is a draft head ({facts.architecture}); name it in --speculative-draft-model-path, beside "
            "the model that it belongs to."
        )


def merge(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the user's overrides.

    Both may have the key `rope_parameters` or the older keys `rope_theta` and `rope_scaling`.
    """
    merged = {**values, **overrides}
    if "rope_parameters" in overrides and "rope_scaling" not in overrides:
        merged.pop("rope_scaling", None)
    if "rope_theta" in overrides and "rope_parameters" not in overrides and merged.get("rope_parameters"):
        merged["rope_parameters"] = {**merged["rope_parameters"], "rope_theta": overrides["rope_theta"]}
    return merged


def _stated_dtype(fields: Fields) -> str | None:
    """Return the dtype in the configuration, or None if it states none."""
    name = "dtype" if fields.values.get("dtype") is not None else "torch_dtype"
    known = [*DTYPES, *(f"torch.{dtype}" for dtype in DTYPES)]
    dtype = fields.choice(name, [*known, "auto"], default="auto")
    return None if dtype == "auto" else dtype.removeprefix("torch.")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}.{lfs_hint(file)}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} must hold a JSON object.")
    return values


def _token_ids(values: Mapping[str, Any], name: str) -> frozenset[int]:
    """Return the ids of a field that holds one id, a list of ids, or null."""
    ids = values.get(name)
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise CheckpointError(f"{name} must be a token id or a list of them, not {values.get(name)!r}.")
    return frozenset(ids)


def _eos_ids(values: Mapping[str, Any], generation: Mapping[str, Any], vocab_size: int) -> frozenset[int]:
    """Return the EOS tokens within the vocabulary. Raises CheckpointError if all EOS tokens are beyond it."""
    stated = _token_ids(values, "eos_token_id") | _token_ids(generation, "eos_token_id")
    within = frozenset(token_id for token_id in stated if token_id < vocab_size)
    beyond = sorted(stated - within)
    if beyond and not within:
        raise CheckpointError(
            f"eos_token_id {', '.join(map(str, beyond))} is beyond the vocabulary of {vocab_size} tokens, so "
            "that no text would end. Correct config.json, or set eos_token_id with --json-model-override-args."
        )
    if beyond:
        logger.warning("eos_token_id %s is beyond the vocabulary of %d tokens.", beyond, vocab_size)
    return within


def _preferred_sampling(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling defaults of generation_config.json. Raises CheckpointError if one is not a number."""
    preferred = {name: generation[name] for name in FROM_MODEL if generation.get(name) is not None}
    for name, value in list(preferred.items()):
        whole = name == "top_k"
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            kind = "an integer" if whole else "a number"
            raise CheckpointError(f"generation_config.json: {name} must be {kind}, not {value!r}.")
        try:
            replace(SamplingParams(), **{name: value if value or not whole else -1})
        except InvalidRequest as error:
            logger.warning("Ignored a value of generation_config.json: %s", error.message)
            del preferred[name]
    return preferred
