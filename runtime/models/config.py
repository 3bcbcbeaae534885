"""Reading a model's configuration: config.json and generation_config.json. Torch-free."""

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
from runtime.layers.rope_parameters import RopeParameters, read_rope_parameters
from runtime.models.checkpoint import lfs_hint, stored_dtype, weight_bytes
from runtime.models.entry import Entry
from runtime.models.gguf_config import read_gguf_config
from runtime.models.quantization import stored_quantization, with_quantization
from runtime.models.registry import entry, find
from runtime.sampling_params import FROM_MODEL, SamplingParams

logger = logging.getLogger("penstock.core")

DTYPES = ("float32", "float16", "bfloat16")
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
LINEAR = "linear_attention"
LAYER_TYPES = ("full_attention", "sliding_attention")


def read_facts(
    path: str, overrides: Mapping[str, Any] | None = None, *, model_impl: str = "auto"
) -> ModelFacts:
    """What a local checkpoint, a directory or a GGUF file, says about its model; `overrides` go over config.json.

    `model_impl` is "auto" (a family of ours if there is one, else transformers' code), "native" (SGLang's word is
    "sglang") or "transformers".
    Torch-free where a family of ours computes the model.

    Raises CheckpointError for a directory that is missing or holds no model, for JSON that cannot be read, an
    architecture that is not supported, and values that make no sense.
    """
    directory = Path(path)
    values, generation = _read_values(directory)
    values = with_quantization(merge(values, overrides or {}), directory)
    by_transformers = model_impl == "transformers" or (
        model_impl == "auto" and not _has_family(_architecture(values))
    )
    if by_transformers and is_gguf(directory):
        raise CheckpointError(
            f"{path} is a GGUF file, which transformers' code does not compute here: leave --model-impl out."
        )
    if by_transformers:
        values = {**values, "architectures": [_usual_name(_architecture(values))]}
    numbers = _numbers_of_transformers(values) if by_transformers else _numbers(values)
    bos_ids = _token_ids(values, "bos_token_id") or _token_ids(generation, "bos_token_id")
    stated = _stated_dtype(Fields(values, "config.json: "))
    sentences = read_sentence_files(directory)
    known = None if by_transformers else entry(_architecture(values))
    whole = _whole_texts(_architecture(values)) if by_transformers else None
    if sentences is not None and sentences.max_tokens is not None:
        numbers["context_length"] = min(numbers["context_length"], sentences.max_tokens)
    return ModelFacts(
        **numbers,
        architecture=_architecture(values),
        path=str(directory),
        dtype=stated or stored_dtype(directory) or "float32",
        eos_ids=_eos_ids(values, generation, numbers["vocab_size"]),
        bos_id=min(bos_ids, default=None),
        weight_bytes=weight_bytes(directory),
        preferred_sampling=_preferred_sampling(generation),
        quantization=stored_quantization(values),
        by_transformers=by_transformers,
        **_of_vectors(values, sentences, known, whole=whole),
        config=values,
    )


def _has_family(architecture: str) -> bool:
    return find(architecture) is not None


def _usual_name(architecture: str) -> str:
    """transformers' name of an architecture, unless that is a family of ours, which is misspelt. Imports torch."""
    from runtime.models.by_transformers.facts import usual_name

    name = usual_name(architecture)
    return architecture if _has_family(name) else name


def _whole_texts(architecture: str) -> str | None:
    """What a model gives that transformers computes text by text; None where it writes tokens. Imports torch."""
    from runtime.models.by_transformers.facts import TEXT, gives

    found = gives(architecture)
    return None if found == TEXT else found


def _of_vectors(
    values: Mapping[str, Any], found: SentenceFiles | None, known: Entry | None, *, whole: str | None = None
) -> dict[str, Any]:
    """How vectors or scores are made. An encoder without files that say it gives the mean of its tokens."""
    is_encoder = whole is not None or (known is not None and known.encoder)
    if whole == "scores" or (known is not None and known.scores):
        fields, pooling = Fields(values, "config.json: "), "last"
        if is_encoder and whole is None:
            pooling = fields.choice("classifier_pooling", ("cls", "mean"), default="cls")
        labels = _labels(fields)
        return {
            "is_encoder": is_encoder,
            "pooling": Pooling(modes=(pooling,), normalize=False),
            "labels": labels,
            "score_activation": _score_activation(fields, len(labels)),
        }
    if found is None:
        mean = Pooling(modes=("mean",)) if is_encoder else None
        headless = Pooling() if known is not None and known.headless else None
        return {"is_encoder": is_encoder, "pooling": mean or headless}
    return {
        "is_encoder": is_encoder,
        "pooling": found.pooling,
        "prompts": found.prompts,
        "default_prompt": found.default_prompt,
        "lower_case": found.lower_case,
    }


def _labels(fields: Fields) -> tuple[str, ...]:
    """The names of a classifier's labels, by their numbers."""
    if str(fields.values.get("architectures")).endswith("RewardModel']"):
        return ("reward",)
    named = fields.child("id2label").values
    count = fields.optional_integer("num_labels") or len(named) or 2
    return tuple(str(named.get(str(index), f"LABEL_{index}")) for index in range(count))


def _score_activation(fields: Fields, num_labels: int) -> str:
    """As transformers' pipelines and sentence-transformers' cross-encoders do it."""
    named = fields.values.get("sbert_ce_default_activation_function")
    named = named or fields.child("sentence_transformers").values.get("activation_fn")
    kind = fields.values.get("problem_type")
    if str(named).endswith(".Identity") or kind == "regression" or _labels(fields) == ("reward",):
        return ""
    if str(named).endswith(".Sigmoid") or kind == "multi_label_classification" or num_labels == 1:
        return "sigmoid"
    return "softmax"


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Of a family of ours."""
    config = Config(values)
    config.check()
    return {
        "num_layers": config.num_layers,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "context_length": config.rope().context_length,
        "has_sinks": entry(config.architecture).sinks,
        "alibi": config.flag("alibi"),
        "recurrent": entry(config.architecture).recurrent,
    }


def _numbers_of_transformers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Of a model that transformers computes; imports torch, and runs the model on shapes."""
    from runtime.models.by_transformers.facts import numbers

    found = numbers(values)
    names = (field.name for field in fields(found) if field.name != "windows")
    return {name: getattr(found, name) for name in names}


def _read_values(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and generation_config.json, or what a GGUF file says in their place."""
    if is_gguf(directory):
        return read_gguf_config(directory)
    if not directory.is_dir():
        raise CheckpointError(f"There is no directory {directory}.")
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory} holds no model: it has no config.json.")
    generation = directory / "generation_config.json"
    return _read_json(directory / "config.json"), _read_json(generation) if generation.is_file() else {}


def merge(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with the user's values over it, whichever of the two spellings of rope either has."""
    merged = {**values, **overrides}
    if "rope_parameters" in overrides and "rope_scaling" not in overrides:
        merged.pop("rope_scaling", None)
    if "rope_theta" in overrides and "rope_parameters" not in overrides and merged.get("rope_parameters"):
        merged["rope_parameters"] = {**merged["rope_parameters"], "rope_theta": overrides["rope_theta"]}
    return merged


class Config(Fields):
    """A model's configuration, with its architecture's own defaults where the file is silent."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.architecture = _architecture(values)
        super().__init__(entry(self.architecture).values(values), "config.json: ")

    def check(self) -> None:
        """Raise CheckpointError for wrong values that nobody else reads before the weights are touched."""
        _ = self.optional_integer("intermediate_size"), self.norm_eps, self.activation, self.layer_types()
        _ = self.flag("tie_word_embeddings"), self.flag("attention_bias"), self.flag("mlp_bias")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"config.json: {self.num_heads} heads cannot share {self.num_kv_heads} kv heads evenly."
            )
        if self.optional_integer("head_dim") is None and self.hidden_size % self.num_heads:
            raise CheckpointError(
                f"config.json: hidden_size {self.hidden_size} is no multiple of {self.num_heads} heads."
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
        """In the words of `ops.activation`."""
        return ACTIVATIONS[self.choice("hidden_act", list(ACTIVATIONS), default="silu")]

    def layer_types(self) -> list[str] | None:
        """The kind of attention of each layer, where the configuration lists them."""
        kinds = self.values.get("layer_types")
        if kinds is None:
            return None
        known = entry(self.architecture).layer_types or LAYER_TYPES
        if not isinstance(kinds, list) or len(kinds) != self.num_layers or not set(kinds) <= set(known):
            raise self.wrong("layer_types", f"{self.num_layers} of {', '.join(known)}")
        return kinds

    @property
    def labels(self) -> tuple[str, ...]:
        """Of a classifier; () for other models."""
        return _labels(self) if entry(self.architecture).scores else ()

    def rope(self, layer_type: str | None = None) -> RopeParameters:
        """The rotary embedding of all layers, or of one type."""
        return read_rope_parameters(self, self.head_dim, layer_type)


def _stated_dtype(fields: Fields) -> str | None:
    """The dtype of the weights, or None where the configuration does not say."""
    name = "dtype" if fields.values.get("dtype") is not None else "torch_dtype"
    known = [*DTYPES, *(f"torch.{dtype}" for dtype in DTYPES)]
    dtype = fields.choice(name, [*known, "auto"], default="auto")
    return None if dtype == "auto" else dtype.removeprefix("torch.")


def _architecture(values: Mapping[str, Any]) -> str:
    names = values.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise CheckpointError("config.json: architectures must name the model's class.")
    known = [name for name in names if _has_family(name)]
    return known[0] if known else names[0]


def _read_json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}.{lfs_hint(file)}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} must hold a JSON object.")
    return values


def _token_ids(values: Mapping[str, Any], name: str) -> frozenset[int]:
    """One id, several, or none."""
    ids = values.get(name)
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise CheckpointError(f"{name} must be a token id or a list of them, not {values.get(name)!r}.")
    return frozenset(ids)


def _eos_ids(values: Mapping[str, Any], generation: Mapping[str, Any], vocab_size: int) -> frozenset[int]:
    """The tokens that end a text. Raises CheckpointError where the model can write none of those that are named."""
    named = _token_ids(values, "eos_token_id") | _token_ids(generation, "eos_token_id")
    within = frozenset(token_id for token_id in named if token_id < vocab_size)
    beyond = sorted(named - within)
    if beyond and not within:
        raise CheckpointError(
            f"eos_token_id {', '.join(map(str, beyond))} is beyond the vocabulary of {vocab_size} tokens: no text "
            "would end. Correct config.json, or set it with --json-model-override-args."
        )
    if beyond:
        logger.warning("eos_token_id %s is beyond the vocabulary of %d tokens.", beyond, vocab_size)
    return within


def _preferred_sampling(generation: Mapping[str, Any]) -> dict[str, Any]:
    """What generation_config.json says of sampling. Raises CheckpointError for what is no number."""
    found = {name: generation[name] for name in FROM_MODEL if generation.get(name) is not None}
    for name, value in list(found.items()):
        whole = name == "top_k"
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            kind = "a whole number" if whole else "a number"
            raise CheckpointError(f"generation_config.json: {name} must be {kind}, not {value!r}.")
        try:
            replace(SamplingParams(), **{name: value if value or not whole else -1})
        except InvalidRequest as error:
            logger.warning("generation_config.json is not followed: %s", error.message)
            del found[name]
    return found
