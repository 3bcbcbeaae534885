"""Sizes and cache requirements of a transformers model, found by running the model on the meta device."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from threading import RLock
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)
from transformers.utils import logging as transformers_log

from runtime.errors import CheckpointError
from runtime.layers.forward_batch import KVSpec
from runtime.modeling.spellings import text_part
from runtime.models.by_transformers import attention
from runtime.models.registry import unsupported

KNOWN_OPTIONS = frozenset({"scaling", "sliding_window", "softcap", "s_aux"})
PROMPT_LAYERS = "reference_sliding_attention"  # layers whose window depends on the length of the prompt
# Multimodal model type -> its text model, which is loaded instead: the whole model needs a vision library.
TEXT_ONLY = {"gemma3n": "gemma3n_text"}
# Text models with per-layer embeddings -> the per-layer embeddings of media tokens: those of their own ids (True), or
# those of the padding token (False).
LAYER_EMBEDDINGS = {"gemma3n_text": True, "gemma4_text": False}
# Text models in which the tokens of an image attend to each other in sliding layers only.
MUTUAL_IN_WINDOWS = frozenset({"gemma4_text", "gemma4_unified_text"})
SERVED_LAYERS = frozenset({"full_attention", "sliding_attention", "attention", "global", "local"})
TOKENS = 3  # length of the trial text
LATER = "attention to later tokens"
CONTEXTS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "context_length", "n_ctx")
NO_TOKEN = -1
UNBOUNDED = 8192  # context length if the configuration has none
TEXT, SCORES, VECTORS = "text", "scores", "vectors"  # kinds of output

logger = logging.getLogger("penstock.core")

CREATING = RLock()  # held by the thread that creates a model by transformers; see `quiet`


class UnsupportedModel(CheckpointError):
    """Raised for models that need a window which neither the paged cache nor a cache per sequence can provide."""


class Call(NamedTuple):
    """The properties of one attention call in a forward pass."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # the larger of the keys' and the values' head dimension
    window: int | None
    causal: bool
    options: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Sizes of a model, named like the fields of ModelFacts."""

    num_layers: int  # attention calls per forward pass
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    context_length: int
    has_sinks: bool
    recurrent: bool = False  # whether each sequence has its own transformers cache
    layers: Sequence[KVSpec] = ()  # the keys and values that each attention call caches


def config_of(values: Mapping[str, Any], *, with_media: bool = False) -> Any:
    """Return transformers' configuration object for config.json. Raises CheckpointError if there is none.

    With `with_media`, returns the configuration of the whole model even if only its text model is usually loaded.
    """
    kind, [name, *_] = str(values.get("model_type")), values["architectures"]
    if name == "WhisperForConditionalGeneration":
        raise CheckpointError(
            f"{name} transcribes audio and generates no text from prompts. Serve another model, and name this one with "
            "--transcription-model."
        )
    if kind in TEXT_ONLY and not with_media:
        kind, values = TEXT_ONLY[kind], text_part(values)
    if output_kind(name) is None or kind not in CONFIG_MAPPING:
        remote_code = " The code that comes with the checkpoint is not run." if "auto_map" in values else ""
        raise CheckpointError(
            f"{unsupported(name)} transformers {transformers.__version__} has no causal language model, classifier "
            f"or encoder with this name either.{remote_code}"
        )
    try:
        with quiet():
            config = CONFIG_MAPPING[kind].from_dict(_with_infinities(deepcopy(dict(values))))
    except Exception as error:  # configuration validators may raise any exception
        raise CheckpointError(f"config.json: transformers rejects the configuration: {error}") from error
    if output_kind(name) == TEXT and getattr(config, "is_encoder_decoder", False):
        raise CheckpointError(f"{name} is an encoder-decoder model, which --model-impl transformers does not support.")
    return config


def _with_infinities(value: Any) -> Any:
    """Decode non-finite numbers, which transformers writes as {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(value["__float__"])
        return {name: _with_infinities(each) for name, each in value.items()}
    return [_with_infinities(each) for each in value] if isinstance(value, list) else value


def output_kind(name: str) -> str | None:
    """Return the kind of output of a transformers class (TEXT, SCORES or VECTORS), or None for an unknown class."""
    if auto_class(name) is not None:
        return TEXT
    if name in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values():
        return SCORES
    masked = MODEL_FOR_MASKED_LM_MAPPING_NAMES
    encoders = [MODEL_MAPPING_NAMES.get(kind) for kind in masked]
    return VECTORS if name in masked.values() or name in encoders else None


def text_models() -> list[str]:
    """Return the names of the classes of transformers that generate text from text, sorted."""
    return sorted({each for each in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() if isinstance(each, str)})


def usual_name(name: str) -> str:
    """Return the transformers class name that equals `name` except for case and underscores, or `name` itself.

    For example, MPT checkpoints name `MPTForCausalLM` instead of `MptForCausalLM`.
    """
    if output_kind(name) is not None:
        return name
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    alike = {each.lower().replace("_", ""): each for each in names if isinstance(each, str)}
    return alike.get(name.lower().replace("_", ""), name)


def auto_class(name: str) -> Any:
    """Return the auto class of transformers for a text or multimodal model, or None for other models."""
    if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return AutoModelForCausalLM
    if name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values():
        return AutoModelForImageTextToText
    return AutoModelForMultimodalLM if name in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.values() else None


def model_class(name: str) -> Any:
    """Return transformers' class with this name. Raises CheckpointError if it cannot be imported."""
    try:
        return getattr(transformers, name)
    except Exception as error:  # the model may need a library that is not installed
        raise CheckpointError(f"{name} cannot be served by transformers' code: {error}") from error


def remove_padding_token(config: Any) -> None:
    """Unset the padding token, because batches have no padding and some models would search each batch for it.

    Multimodal models need some padding token id; they get an id that no token has.
    """
    text = config.get_text_config()
    for part in (config, text):
        with suppress(Exception):  # some configurations reject None
            part.pad_token_id = None if text is config else NO_TOKEN


def model_sizes(values: Mapping[str, Any]) -> ModelSizes:
    """Return the sizes of the model that config.json describes. The result of the last call is cached.

    Raises CheckpointError, with the reason, if transformers' code cannot serve the model.
    """
    return _cached_sizes(json.dumps(values, sort_keys=True))


@lru_cache(maxsize=1)
def _cached_sizes(encoded: str) -> ModelSizes:
    values = json.loads(encoded)
    config, name = config_of(values), values["architectures"][0]
    text = config.get_text_config()
    if output_kind(name) != TEXT:
        return _encoder_sizes(name, config, text)
    remove_padding_token(config)
    try:
        return _paged(name, config, text)
    except UnsupportedModel:
        raise
    except CheckpointError as reason:
        logger.info("%s Each sequence uses a transformers cache instead.", reason)
    return ModelSizes(
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        context_length=_context(text) or UNBOUNDED,
        has_sinks=False,
        recurrent=True,
    )


def _encoder_sizes(name: str, config: Any, text: Any) -> ModelSizes:
    """Return the sizes of a classifier or encoder. Sizes that describe a KV cache are 1, because there is no cache."""
    sizes = {each: getattr(text, each, None) for each in ("hidden_size", "vocab_size")}
    if not all(isinstance(size, int) for size in sizes.values()):
        raise CheckpointError(f"config.json: {name} must have a hidden_size and a vocab_size.")
    context = _context(text) or UNBOUNDED
    try:
        with quiet(), torch.device("meta"):
            model = model_class(name)(config)
    except CheckpointError:
        raise
    except Exception as error:  # model code may raise any exception
        raise CheckpointError(f"{name} cannot be served by transformers' code: {error}") from error
    for path, module in model.named_modules():
        # If the position table has a padding row, positions count from the row after it.
        table, padding = getattr(module, "weight", None), getattr(module, "padding_idx", None)
        if "position" in path and isinstance(table, Tensor) and padding is not None:
            context = min(context, len(table) - padding - 1)
    if getattr(config, "is_encoder_decoder", False):
        context -= 1  # an EOS token is appended to texts without one
    return ModelSizes(
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        context_length=context,
        has_sinks=False,
        hidden_size=sizes["hidden_size"] or 0,
        vocab_size=sizes["vocab_size"] or 0,
    )


def _context(text: Any) -> int | None:
    """Return the context length from the first field of CONTEXTS that the configuration has, or None."""
    values = (getattr(text, name, None) for name in CONTEXTS)
    return next((each for each in values if isinstance(each, int) and each > 0), None)


def _paged(name: str, config: Any, text: Any) -> ModelSizes:
    """Return the sizes of a model that uses the paged KV cache. Raises CheckpointError for unsupported models."""
    kinds = getattr(text, "layer_types", None) or []
    if PROMPT_LAYERS in kinds:
        raise UnsupportedModel(str(_refusal(name, "attention that depends on where the prompt ends")))
    unsupported_kinds = sorted(set(kinds) - SERVED_LAYERS)
    if unsupported_kinds:
        raise _refusal(name, f"layers of the kind {', '.join(unsupported_kinds)}")
    if getattr(text, "use_bidirectional_attention", False) in (True, "all"):
        raise _refusal(name, LATER)
    for parameters in _rope_parameters(text):
        if parameters.get("rope_type") == "dynamic":
            raise _refusal(name, "rotary angles that depend on the longest text of a batch")
    calls = _calls(name, config)
    windows = [_window(name, text, kinds, index, call) for index, call in enumerate(calls)]
    if all(window is None for window in windows) and _has_window(text) and not kinds:
        raise UnsupportedModel(str(_refusal(name, "a window that it does not pass to attention")))
    context = _context(text)
    if context is None:
        raise CheckpointError(f"config.json: {name} has no context length; set max_position_embeddings.")
    return ModelSizes(
        num_layers=len(calls),
        num_heads=calls[0].num_heads,
        num_kv_heads=max(call.num_kv_heads for call in calls),
        head_dim=max(call.head_dim for call in calls),
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        context_length=context,
        has_sinks=any("s_aux" in call.options for call in calls),
        layers=[KVSpec(call.num_kv_heads, call.head_dim, window) for call, window in zip(calls, windows)],
    )


def _calls(name: str, config: Any) -> list[Call]:
    """Return the attention calls of one forward pass, recorded on the meta device."""
    attention.register()
    recorder = _Recorder()
    try:
        with quiet(), torch.device("meta"), torch.inference_mode():
            full = auto_class(name).from_config(config, attn_implementation=attention.NAME)
            model = attention.causal_lm(full)
            attention.set_attention(model, recorder.attend)
            if getattr(model, "_can_set_experts_implementation", lambda: False)():
                model.set_experts_implementation("batched_mm")  # other implementations read tensor values
            ids = torch.zeros(1, TOKENS, dtype=torch.int64)
            attention.body(model)(input_ids=ids, position_ids=ids, use_cache=False)
    except CheckpointError:
        raise
    except KeyError as error:
        if error.args == (attention.NAME,):  # the model has its own table of attention functions
            raise _refusal(name, "its own attention code") from error
        raise CheckpointError(f"{name} cannot be served by transformers' code: {error!r} is missing.") from error
    except Exception as error:  # model code may raise any exception
        raise CheckpointError(f"{name} cannot be served by transformers' code: {error}") from error
    calls = recorder.calls
    if not calls:
        raise _refusal(name, "its own attention code, or no attention")
    if any(call.num_heads != calls[0].num_heads for call in calls):
        raise _refusal(name, "layers with different numbers of heads")
    if not all(call.causal for call in calls):
        raise _refusal(name, LATER)
    unknown = sorted(set().union(*(call.options for call in calls)) - KNOWN_OPTIONS)
    if unknown:
        raise _refusal(name, f"attention with {', '.join(unknown)}")
    return calls


class _Recorder:
    """Records attention calls and returns zeros of the right shape."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        if len(q) != TOKENS or len(k) != TOKENS:
            raise CheckpointError(f"{type(module).__name__} attends to tokens outside the batch.")
        self.calls.append(
            Call(
                num_heads=q.shape[1],
                num_kv_heads=k.shape[1],
                head_dim=max(k.shape[2], v.shape[2]),
                window=options.get("sliding_window"),
                causal=getattr(module, "is_causal", True) is not False,
                options=frozenset(options),
            )
        )
        return q.new_zeros(*q.shape[:2], v.shape[2])


def _window(name: str, text: Any, kinds: Sequence[str], index: int, call: Call) -> int | None:
    """Return the window of an attention call: the one that the module passes, or that of a sliding layer, or None."""
    if call.window is not None:
        return call.window
    if index < len(kinds) and kinds[index] in ("sliding_attention", "local"):
        if not isinstance(getattr(text, "sliding_window", None), int):
            raise _refusal(name, "sliding layers of unknown width")
        return text.sliding_window
    return None


def _has_window(text: Any) -> bool:
    used = getattr(text, "use_sliding_window", True)
    return bool(getattr(text, "sliding_window", None)) and used is not False


def _rope_parameters(text: Any) -> list[Mapping[str, Any]]:
    parameters = getattr(text, "rope_parameters", None) or {}
    if not isinstance(parameters, Mapping):
        return []
    nested = [each for each in parameters.values() if isinstance(each, Mapping)]
    return nested or [parameters]


def _refusal(name: str, feature: str) -> CheckpointError:
    return CheckpointError(f"{name} has no native family and cannot be served by transformers' code: it has {feature}.")


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress transformers' progress bars and warnings while a model is created, in one thread at a time.

    While transformers creates a model, it replaces functions of its classes and of torch (`tie_weights`,
    `torch.linspace`) for the whole process. If a second thread created a model at the same time, the tied weights of
    that model would stay on the meta device. The log level also applies to the whole process.
    """
    with CREATING:
        bars, level = transformers_log.is_progress_bar_enabled(), transformers_log.get_verbosity()
        transformers_log.disable_progress_bar()
        transformers_log.set_verbosity_error()
        try:
            yield
        finally:
            transformers_log.set_verbosity(level)
            if bars:
                transformers_log.enable_progress_bar()
