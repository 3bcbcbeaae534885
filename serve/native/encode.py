"""`/encode`: the vectors of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from runtime.request import Request
from runtime.sampling_params import SamplingParams
from serve.decode import Length, NotBuilt, decode
from serve.endpoint import json_response, parse_object, read_all_or_disconnect, read_body
from serve.errors import ErrorFormat, native_body
from serve.native.generate import GenerateAnswers
from serve.native.schema import MAX_PROMPTS, GenerateBody, Label, requests_of
from serve.output_streams import submit_all

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

ERROR_FORMAT = ErrorFormat(native_body, {})


@dataclass(slots=True, kw_only=True)
class EncodeBody:
    """The body of `/encode`. A list as `text`, or lists in `input_ids`, make a batch."""

    text: str | Annotated[list[str], Length(1, MAX_PROMPTS)] | None = None
    input_ids: list[int] | Annotated[list[list[int]], Length(1, MAX_PROMPTS)] | None = None
    rid: Label | list[Label] | None = None
    image_data: NotBuilt = None
    audio_data: NotBuilt = None
    video_data: NotBuilt = None
    lora_path: NotBuilt = None


async def encode(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """`embedding` and `meta_info` of one prompt, or of each of a list."""
    body, requests = await read_body(http, partial(_read, core))
    answers = GenerateAnswers(core, requests, indexed=False)
    found = answers.embeddings(await read_all_or_disconnect(submit_all(core, requests), http.receive))
    return json_response(found if body.is_batch else found[0])


def _read(core: EngineCore, raw: bytes) -> tuple[GenerateBody, list[Request]]:
    asked = decode(EncodeBody, parse_object(raw))
    body = GenerateBody(text=asked.text, input_ids=asked.input_ids, rid=asked.rid)
    return body, vector_requests(requests_of(body, core))


def vector_requests(requests: Sequence[Request]) -> list[Request]:
    """The same prompts; what is wanted of each is its vector."""
    sampling = SamplingParams(max_new_tokens=0)
    return [replace(request, sampling=sampling, wants_embedding=True) for request in requests]
