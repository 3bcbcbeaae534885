"""Sampling parameters as JSON: one declaration, read by every door.

The rule of defaults, weakest first: what the field declares here, the model's generation_config (OpenAI doors
only), `--preferred-sampling-params`, the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from runtime.config.model_facts import ModelFacts
from runtime.errors import InvalidRequest
from runtime.request import SamplingParams
from serve.decode import NotBuilt, decode
from serve.errors import renamed

FROM_GENERATION_CONFIG = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(slots=True, kw_only=True)
class SamplingBody:
    """The native `sampling_params` object. Values are checked by `SamplingParams`."""

    closed: ClassVar[bool] = True

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    n: int = 1
    seed: int | None = None
    sampling_seed: int | None = None  # what later versions of the native API call it
    logit_bias: dict[str, float] | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: int | None = None
    json_schema: NotBuilt = None
    regex: NotBuilt = None
    ebnf: NotBuilt = None
    structural_tag: NotBuilt = None
    stop_regex: NotBuilt = None
    custom_params: NotBuilt = None


_SHARED = tuple(
    field.name for field in fields(SamplingBody) if field.name in SamplingParams.__dataclass_fields__
)
_CONVERTED = ("stop", "stop_token_ids", "logit_bias", "seed")
_PLAIN = tuple(name for name in _SHARED if name not in _CONVERTED)


def sampling_params(
    asked: Mapping[str, Any], preferred: Mapping[str, Any], *, path: str = ""
) -> SamplingParams:
    """What the request asked for over what is preferred here. Raises `InvalidRequest` below `path`."""
    body = decode(SamplingBody, {**preferred, **asked}, path)
    try:
        return SamplingParams(
            **{name: getattr(body, name) for name in _PLAIN},
            stop=_stops(body.stop),
            stop_token_ids=frozenset(body.stop_token_ids or ()),
            seed=body.sampling_seed if body.seed is None else body.seed,
            logit_bias={_token_id(key): value for key, value in (body.logit_bias or {}).items()},
        )
    except InvalidRequest as error:
        raise renamed(error, f"{path}.{error.param}" if path else f"{error.param}") from None


def generation_defaults(facts: ModelFacts) -> dict[str, Any]:
    """The model's own sampling defaults, in our terms: a top_k of 0 is off."""
    found = {name: facts.preferred_sampling.get(name) for name in FROM_GENERATION_CONFIG}
    if found["top_k"] == 0:
        found["top_k"] = -1
    return {name: value for name, value in found.items() if value is not None}


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _token_id(key: str) -> int:
    if key.isascii() and key.isdecimal() and len(key) < 10:
        return int(key)
    raise InvalidRequest("logit_bias must name tokens by their ids.", param="logit_bias")
