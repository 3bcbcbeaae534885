"""What a model of transformers needs of the cache, found by running it on shapes alone."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)
from transformers.utils import logging as transformers_log

from runtime.errors import CheckpointError
from runtime.models.by_transformers import attention
from runtime.models.registry import unsupported
from runtime.models.spellings import text_part

KNOWN_OPTIONS = frozenset({"scaling", "sliding_window", "softcap", "s_aux"})
PROMPT_LAYERS = "reference_sliding_attention"  # how far they see depends on where the prompt ends
# Read as their text parts alone: the whole asks for a library to see with.
TEXT_ALONE = {"gemma3n": "gemma3n_text"}
SERVED_LAYERS = frozenset({"full_attention", "sliding_attention", "attention", "global", "local"})
TOKENS = 3  # of the trial
LATER = "attention to later tokens"
CONTEXTS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "context_length", "n_ctx")
NO_TOKEN = -1
UNBOUNDED = 8192  # positions of a model that does not say
TEXT, SCORES, VECTORS = "text", "scores", "vectors"  # what a model gives

logger = logging.getLogger("penstock.core")


class Unservable(CheckpointError):
    """Over transformers' caches neither: how far it attends depends on whether there is one."""


class Call(NamedTuple):
    """One call of attention in a pass through the model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # the larger one of keys and values
    window: int | None
    causal: bool
    options: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """Of the model as a whole."""

    num_layers: int  # calls of attention in one pass
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    context_length: int
    has_sinks: bool
    recurrent: bool = False  # transformers keeps what it needs of each sequence
    windows: Sequence[int | None] = ()  # of each call


def config_of(values: Mapping[str, Any]) -> Any:
    """transformers' configuration of these values of config.json. Raises CheckpointError where it has none."""
    kind, [name, *_] = str(values.get("model_type")), values["architectures"]
    if kind in TEXT_ALONE:
        kind, values = TEXT_ALONE[kind], text_part(values)
    if gives(name) is None or kind not in CONFIG_MAPPING:
        own = " The code that comes with the checkpoint is not run." if "auto_map" in values else ""
        raise CheckpointError(
            f"{unsupported(name)} transformers {transformers.__version__} has no causal language model, classifier "
            f"or encoder of that name either.{own}"
        )
    try:
        with quiet():
            config = CONFIG_MAPPING[kind].from_dict(_with_infinities(deepcopy(dict(values))))
    except Exception as error:  # what its validators raise is of many kinds
        raise CheckpointError(f"config.json: transformers refuses it: {error}") from error
    if gives(name) == TEXT and getattr(config, "is_encoder_decoder", False):
        raise CheckpointError(f"{name} has an encoder, which this route does not serve.")
    return config


def _with_infinities(value: Any) -> Any:
    """Numbers that JSON does not have are written as {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(value["__float__"])
        return {name: _with_infinities(each) for name, each in value.items()}
    return [_with_infinities(each) for each in value] if isinstance(value, list) else value


def gives(name: str) -> str | None:
    """What transformers' model of this name gives: text, scores of labels, or vectors; None: no such model."""
    if auto_of(name) is not None:
        return TEXT
    if name in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values():
        return SCORES
    of_words = MODEL_FOR_MASKED_LM_MAPPING_NAMES
    encoders = [MODEL_MAPPING_NAMES.get(kind) for kind in of_words]
    return VECTORS if name in of_words.values() or name in encoders else None


def usual_name(name: str) -> str:
    """transformers' name of a class that differs in capitals and underscores: MPT was published as `MPTFor...`."""
    if gives(name) is not None:
        return name
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    alike = {each.lower().replace("_", ""): each for each in known if isinstance(each, str)}
    return alike.get(name.lower().replace("_", ""), name)


def auto_of(name: str) -> Any:
    """What makes and reads transformers' model of this name, which writes text and may also see; None for others."""
    if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return AutoModelForCausalLM
    seeing = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()
    return AutoModelForImageTextToText if name in seeing else None


def class_of(name: str) -> Any:
    """transformers' class of a model that gives something. Raises CheckpointError where it cannot be imported."""
    try:
        return getattr(transformers, name)
    except Exception as error:  # a library that only this model needs
        raise CheckpointError(f"{name} cannot be served by transformers' code: {error}") from error


def forget_padding(config: Any) -> None:
    """Nothing is padded; some models would look for the padding token in every batch.

    Those that also see or hear put it in the place of what they see, so that there it is a token that nobody has.
    """
    text = config.get_text_config()
    for part in (config, text):
        with suppress(Exception):  # some configurations cannot be without
            part.pad_token_id = None if text is config else NO_TOKEN


def numbers(values: Mapping[str, Any]) -> Numbers:
    """Of the model with these values of config.json, found once for what is read and what is loaded.

    Raises CheckpointError, with the reason, for a model that cannot be served in this way.
    """
    return _numbers(json.dumps(values, sort_keys=True))


@lru_cache(maxsize=1)
def _numbers(encoded: str) -> Numbers:
    values = json.loads(encoded)
    config, name = config_of(values), values["architectures"][0]
    text = config.get_text_config()
    if gives(name) != TEXT:
        return _of_whole_texts(name, config, text)
    forget_padding(config)
    try:
        return _paged(name, config, text)
    except Unservable:
        raise
    except CheckpointError as reason:
        logger.info("%s Transformers' own caches are used, one for each sequence.", reason)
    return Numbers(
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


def _of_whole_texts(name: str, config: Any, text: Any) -> Numbers:
    """Of a classifier or an encoder, which needs nothing of a cache."""
    sizes = {each: getattr(text, each, None) for each in ("hidden_size", "vocab_size")}
    if not all(isinstance(size, int) for size in sizes.values()):
        raise CheckpointError(f"config.json: {name} must have a hidden_size and a vocab_size.")
    context = _context(text) or UNBOUNDED
    try:
        with quiet(), torch.device("meta"):
            model = class_of(name)(config)
    except CheckpointError:
        raise
    except Exception as error:  # its own code, of which anything may come
        raise CheckpointError(f"{name} cannot be served by transformers' code: {error}") from error
    for where, module in model.named_modules():
        # Positions are counted from behind the padding's where that has a place in their table.
        table, padding = getattr(module, "weight", None), getattr(module, "padding_idx", None)
        if "position" in where and isinstance(table, Tensor) and padding is not None:
            context = min(context, len(table) - padding - 1)
    if getattr(config, "is_encoder_decoder", False):
        context -= 1  # the token that ends a text is put behind one that has none
    return Numbers(
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
    """How many positions a model has, by any of the names for it."""
    named = (getattr(text, name, None) for name in CONTEXTS)
    return next((each for each in named if isinstance(each, int) and each > 0), None)


def _paged(name: str, config: Any, text: Any) -> Numbers:
    """Of a model whose attention our kernels and cache can do. Raises CheckpointError, with the reason, for others."""
    kinds = getattr(text, "layer_types", None) or []
    if PROMPT_LAYERS in kinds:
        raise Unservable(str(_refusal(name, "attention that depends on where the prompt ends")))
    strange = sorted(set(kinds) - SERVED_LAYERS)
    if strange:
        raise _refusal(name, f"layers of the kind {', '.join(strange)}")
    if getattr(text, "use_bidirectional_attention", False) in (True, "all"):
        raise _refusal(name, LATER)
    for parameters in _rope_parameters(text):
        if parameters.get("rope_type") == "dynamic":
            raise _refusal(name, "rotary angles that depend on the longest text of a batch")
    calls = _calls(name, config)
    windows = [_window(name, text, kinds, index, call) for index, call in enumerate(calls)]
    if all(window is None for window in windows) and _says_window(text) and not kinds:
        raise Unservable(str(_refusal(name, "a window that its attention is not told")))
    context = _context(text)
    if context is None:
        raise CheckpointError(f"config.json: {name} does not say how many positions it has.")
    first = calls[0]
    return Numbers(
        num_layers=len(calls),
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=max(call.head_dim for call in calls),
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        context_length=context,
        has_sinks=any("s_aux" in call.options for call in calls),
        windows=windows,
    )


def _calls(name: str, config: Any) -> list[Call]:
    """The calls of attention in one pass, found with tensors that have shapes and no numbers."""
    attention.register()
    recorder = _Recorder()
    try:
        with quiet(), torch.device("meta"), torch.inference_mode():
            made = auto_of(name).from_config(config, attn_implementation=attention.NAME)
            model = attention.writing_part(made)
            attention.give(model, recorder.attend)
            if getattr(model, "_can_set_experts_implementation", lambda: False)():
                model.set_experts_implementation("batched_mm")  # the others look at numbers
            ids = torch.zeros(1, TOKENS, dtype=torch.int64)
            attention.body(model)(input_ids=ids, position_ids=ids, use_cache=False)
    except CheckpointError:
        raise
    except KeyError as error:
        if error.args == (attention.NAME,):  # looked up in a table of the model's own
            raise _refusal(name, "attention of its own making") from error
        raise CheckpointError(
            f"{name} cannot be served by transformers' code: {error!r} is missing."
        ) from error
    except Exception as error:  # its own code, of which anything may come
        raise CheckpointError(f"{name} cannot be served by transformers' code: {error}") from error
    calls = recorder.calls
    if not calls:
        raise _refusal(name, "attention of its own making, or none")
    if any(
        call.num_kv_heads != calls[0].num_kv_heads or call.num_heads != calls[0].num_heads for call in calls
    ):
        raise _refusal(name, "layers with different numbers of heads")
    if not all(call.causal for call in calls):
        raise _refusal(name, LATER)
    unknown = sorted(set().union(*(call.options for call in calls)) - KNOWN_OPTIONS)
    if unknown:
        raise _refusal(name, f"attention with {', '.join(unknown)}")
    return calls


class _Recorder:
    """Notes the calls of attention and gives what has the right shape."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        if len(q) != TOKENS or len(k) != TOKENS:
            raise CheckpointError(f"{type(module).__name__} does not attend to the batch's tokens alone.")
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
    """Of one call: what its module says, else what the configuration says of a sliding layer."""
    if call.window is not None:
        return call.window
    if index < len(kinds) and kinds[index] in ("sliding_attention", "local"):
        if not isinstance(getattr(text, "sliding_window", None), int):
            raise _refusal(name, "sliding layers of unknown width")
        return text.sliding_window
    return None


def _says_window(text: Any) -> bool:
    used = getattr(text, "use_sliding_window", True)
    return bool(getattr(text, "sliding_window", None)) and used is not False


def _rope_parameters(text: Any) -> list[Mapping[str, Any]]:
    found = getattr(text, "rope_parameters", None) or {}
    if not isinstance(found, Mapping):
        return []
    nested = [each for each in found.values() if isinstance(each, Mapping)]
    return nested or [found]


def _refusal(name: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{name} has no family here and cannot be served by transformers' code: it has {what}."
    )


@contextmanager
def quiet() -> Iterator[None]:
    """transformers without its progress bars and warnings, for the time of a load.

    What is printed elsewhere meanwhile is as quiet; afterwards all is as it was.
    """
    bars, level = transformers_log.is_progress_bar_enabled(), transformers_log.get_verbosity()
    transformers_log.disable_progress_bar()
    transformers_log.set_verbosity_error()
    try:
        yield
    finally:
        transformers_log.set_verbosity(level)
        if bars:
            transformers_log.enable_progress_bar()
