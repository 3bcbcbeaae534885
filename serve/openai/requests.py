"""From an OpenAI body to the engine's request: what chat and completions have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from runtime.errors import InvalidRequest
from runtime.sampling_params import APIS, SamplingParams
from serve.endpoint import decode_open, parse_object, tell_unknown
from serve.openai.response_format import grammar_of, structured_outputs_of
from serve.openai.schema import ChatBody, OpenAIBody
from serve.sampling import read_sampling, sampling_fields, sampling_params

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

Body = TypeVar("Body", bound=OpenAIBody)

_SCHEMA = frozenset({"name", "schema", "strict", "description"})
_FORMAT = _SCHEMA | {"type", "json_schema"}  # some clients leave "json_schema" out
_TOOL = frozenset({"type", "function", "cache_control"})
_FUNCTION = frozenset({"name", "description", "parameters", "strict", "return", "response"})


def decode_body(cls: type[Body], raw: bytes, core: EngineCore) -> Body:
    """Raises `InvalidRequest`, also for what is not supported yet, and as `decode_open` does."""
    json = parse_object(raw)
    body = decode_open(cls, json, core, APIS[cls.api], beside=sampling_fields(cls.api))
    body.sampling = read_sampling(body.api, json)
    for path, known, fate in _unknown_below(body):
        tell_unknown(path, known, core, APIS[cls.api], fate=fate)
    if body.best_of is not None and body.best_of != (body.sampling.get("n") or 1):
        raise InvalidRequest("best_of is not supported yet; leave it out or make it n.", param="best_of")
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


def _unknown_below(body: OpenAIBody) -> Iterator[tuple[tuple[str | int, ...], frozenset[str], str]]:
    """Fields that no API knows in objects that are read elsewhere: their path, what is known there, and their fate."""
    form = body.response_format or {}
    ignored, seen = "which is ignored", "which the chat template alone sees"
    objects: list[tuple[tuple[str | int, ...], Any, frozenset[str], str]] = []
    if form.get("type") != "structural_tag":  # the library of grammars reads that
        objects.append((("response_format",), form, _FORMAT, ignored))
        objects.append((("response_format", "json_schema"), form.get("json_schema"), _SCHEMA, ignored))
    if isinstance(body, ChatBody):
        for index, tool in enumerate(body.tools or ()):
            objects.append((("tools", index), tool, _TOOL, seen))
            objects.append((("tools", index, "function"), tool.get("function"), _FUNCTION, seen))
    for path, value, known, fate in objects:
        if isinstance(value, dict):
            for name in value.keys() - known:
                if value[name] is not None:
                    yield (*path, name), known, fate


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
