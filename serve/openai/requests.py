"""From an OpenAI body to what the engine understands: the parts that both endpoints share."""

from __future__ import annotations

from typing import TypeVar

from runtime.errors import InvalidRequest, NotFound
from runtime.sampling_params import SamplingParams
from serve.body import parse_object
from serve.core import EngineCore
from serve.decode import decode
from serve.openai.schema import OpenAIBody
from serve.sampling import read_sampling, sampling_params

ANY_MODEL = "default"  # what clients of this API family send when they do not care

Body = TypeVar("Body", bound=OpenAIBody)


def decode_body(cls: type[Body], raw: bytes) -> Body:
    """Raises `InvalidRequest`, also for what is not built yet."""
    json = parse_object(raw)
    body = decode(cls, json)
    body.sampling = read_sampling(body.api, json)
    if body.response_format is not None:
        body.response_format.check()
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true.", param="stream_options")
    return body


def check_model(core: EngineCore, model: str | None) -> str:
    """The name to answer with. Raises `NotFound` for a model that is not served here."""
    serve = core.plan.serve
    if model is None:
        return serve.served_model_name
    if model not in (serve.served_model_name, core.plan.model.path, core.facts.path, ANY_MODEL):
        raise NotFound(f"The model '{model[:200]}' does not exist.", param="model")
    return model


def sampling_of(core: EngineCore, body: OpenAIBody) -> SamplingParams:
    """Sampling as asked for, over --preferred-sampling-params, the model's own defaults and the endpoint's."""
    return sampling_params(body.api, body.sampling, core.plan.serve.preferred_sampling, facts=core.facts)
