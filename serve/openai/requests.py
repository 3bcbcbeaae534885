"""From an OpenAI body to the engine's request: what chat and completions have in common."""

from __future__ import annotations

import dataclasses
import difflib
import logging
from functools import cache, lru_cache
from typing import TYPE_CHECKING, TypeVar

from runtime.errors import InvalidRequest
from runtime.sampling_params import APIS, SamplingParams
from serve.decode import decode
from serve.endpoint import parse_object
from serve.openai.response_format import grammar_of, structured_outputs_of
from serve.openai.schema import WITHOUT_EFFECT, OpenAIBody
from serve.sampling import read_sampling, sampling_fields, sampling_params

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore
    from runtime.config.plan import ServePlan

logger = logging.getLogger("penstock.http")

Body = TypeVar("Body", bound=OpenAIBody)


def decode_body(cls: type[Body], raw: bytes, serve: ServePlan) -> Body:
    """Raises `InvalidRequest`, also for what is not supported yet, and for unknown fields where `serve` says so."""
    json = parse_object(raw)
    body = decode(cls, json)
    if unknown := json.keys() - _known_fields(cls):
        _note_unknown(min(unknown), cls, strict=serve.refuse_unknown_fields)
    body.sampling = read_sampling(body.api, json)
    body.grammar = grammar_of(body.response_format)
    structured = structured_outputs_of(body.structured_outputs)
    if structured is not None:
        if body.grammar is not None:
            raise InvalidRequest(
                "structured_outputs and response_format exclude each other.", param="structured_outputs"
            )
        body.grammar = structured
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true.", param="stream_options")
    return body


def _note_unknown(name: str, cls: type[OpenAIBody], *, strict: bool) -> None:
    if strict:
        close = difflib.get_close_matches(name[:80], _known_fields(cls), n=1)
        hint = f"; did you mean {close[0]}?" if close else "."
        raise InvalidRequest(f"{name[:80]} is not a field of this route{hint}", param=name[:80])
    _log_unknown(name[:80], APIS[cls.api])


@lru_cache(maxsize=256)
def _log_unknown(name: str, route: str) -> None:
    """Logs each name once; the cache is the memory of that."""
    logger.warning("a request to %s has a field that is ignored, since no API knows it: %r", route, name)


@cache
def _known_fields(cls: type[OpenAIBody]) -> frozenset[str]:
    declared = {field.name for field in dataclasses.fields(cls) if field.init}
    return frozenset(declared | sampling_fields(cls.api) | WITHOUT_EFFECT)


def keep_last_of(body: OpenAIBody) -> int | None:
    """How much of its prompt's end a request keeps."""
    if body.truncate_prompt_tokens == 0:
        raise InvalidRequest(
            "truncate_prompt_tokens must be -1 or at least 1, not 0.", param="truncate_prompt_tokens"
        )
    return body.truncate_prompt_tokens


def sampling_of(core: EngineCore, body: OpenAIBody) -> SamplingParams:
    """Sampling as asked for, over --preferred-sampling-params, the model's own defaults and the endpoint's."""
    return sampling_params(body.api, body.sampling, core.plan.serve.preferred_sampling, facts=core.facts)
