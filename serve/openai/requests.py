"""From an OpenAI body to the engine's request: what chat and completions have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from runtime.errors import InvalidRequest
from runtime.sampling_params import APIS, SamplingParams
from serve.endpoint import decode_open, parse_object
from serve.openai.response_format import grammar_of, structured_outputs_of
from serve.openai.schema import OpenAIBody
from serve.sampling import read_sampling, sampling_fields, sampling_params

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

Body = TypeVar("Body", bound=OpenAIBody)


def decode_body(cls: type[Body], raw: bytes, core: EngineCore) -> Body:
    """Raises `InvalidRequest`, also for what is not supported yet, and as `decode_open` does."""
    json = parse_object(raw)
    body = decode_open(cls, json, core, APIS[cls.api], beside=sampling_fields(cls.api))
    body.sampling = read_sampling(body.api, json)
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
