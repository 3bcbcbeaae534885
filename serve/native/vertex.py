"""Vertex AI's prediction route, which takes instances and parameters and returns predictions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from runtime.errors import InvalidRequest
from runtime.request import Request
from serve.calls.body import parse_object
from serve.calls.decode import Length, decode
from serve.calls.generate.answers import GenerateAnswers
from serve.calls.generate.schema import GenerateBody, requests_of
from serve.calls.prompts import MAX_PROMPTS, of_client
from serve.http.endpoint import decodes, json_response, read_all_or_disconnect, read_call
from serve.http.sse import EventStream
from serve.native.generate import ERROR_FORMAT

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

PREDICT_ROUTE = "/vertex_generate"  # default path; the environment variable AIP_PREDICT_ROUTE can change it
PREDICT_VARIABLE, HEALTH_VARIABLE = "AIP_PREDICT_ROUTE", "AIP_HEALTH_ROUTE"
PROMPTS = ("text", "input_ids", "input_embeds")


@dataclass(slots=True, kw_only=True)
class PredictBody:
    """The body of Vertex AI's prediction route.

    `instances` are prompts, all with `text` or all with `input_ids`. `parameters` are fields of `/generate`.
    """

    instances: Annotated[list[dict[str, Any]], Length(0, MAX_PROMPTS)]
    parameters: dict[str, Any] = field(default_factory=dict)


@decodes(PredictBody)
async def predict(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return one prediction per instance: an answer in the format of `/generate`."""
    body, requests = await read_call(http, core, _read)
    if not requests:
        return json_response([])
    answers = GenerateAnswers(core, requests, indexed=True)
    streams = await core.submit_all(of_client(core, requests))
    answers.follow(streams)
    if body is not None and body.stream:
        return EventStream(streams, answers, ERROR_FORMAT)
    chunks = await read_all_or_disconnect(streams, http.receive)
    return json_response({"predictions": answers.whole(chunks)})


def _read(core: EngineCore, raw: bytes) -> tuple[GenerateBody | None, list[Request]]:
    body = decode(PredictBody, parse_object(raw))
    if not body.instances:
        return None, []
    name = next((name for name in PROMPTS if body.instances[0].get(name)), None)
    if name is None:
        raise InvalidRequest("instances.0 must have text or input_ids.", param="instances.0")
    for index, instance in enumerate(body.instances):
        path = f"instances.{index}"
        if not instance.get(name):
            raise InvalidRequest(f"{path} must have {name}, like the first instance.", param=path)
        if others := instance.keys() - {name}:
            other = f"{path}.{min(others)}"
            raise InvalidRequest(f"{other} is not supported together with {name}.", param=other)
    for key in body.parameters.keys() & set(PROMPTS):
        raise InvalidRequest(f"parameters.{key} must be set in instances instead.", param=f"parameters.{key}")
    generate = decode(GenerateBody, {**body.parameters, name: [each[name] for each in body.instances]})
    requests = requests_of(generate, core, owned=True)
    for request in requests:
        if request.returns_parts:
            name = "return_hidden_states" if request.returns_hidden else "return_routed_experts"
            raise InvalidRequest(f"Predictions do not support {name}; use /generate.", param=f"parameters.{name}")
    return generate, requests
