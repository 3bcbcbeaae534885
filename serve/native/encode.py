"""`/encode`: the vectors of prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from runtime.request import Request
from serve.decode import Length, NotBuilt
from serve.endpoint import decode_open, json_response, parse_object, read_all_or_disconnect, read_call
from serve.errors import ErrorFormat, native_body
from serve.native.generate import GenerateAnswers
from serve.native.schema import GenerateBody, requests_of
from serve.prompts import MAX_PROMPTS, Label, of_client, vector_requests

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

ERROR_FORMAT = ErrorFormat(native_body, {})


@dataclass(slots=True, kw_only=True)
class EncodeBody:
    """The body of `/encode`. A list as `text`, or lists in `input_ids`, make a batch."""

    text: str | Annotated[list[str], Length(1, MAX_PROMPTS)] | None = None
    input_ids: list[int] | Annotated[list[list[int]], Length(1, MAX_PROMPTS)] | None = None
    rid: Label | list[Label] | None = None
    prompt_name: str | None = None
    truncate: bool | None = None
    image_data: NotBuilt = None
    audio_data: NotBuilt = None
    video_data: NotBuilt = None
    lora_path: NotBuilt = None
    input_embeds: NotBuilt = None
    dimensions: NotBuilt = None
    is_cross_encoder_request: NotBuilt = None
    priority: NotBuilt = None


async def encode(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """`embedding` and `meta_info` of one prompt, or of each of a list."""
    body, requests = await read_call(http, core, _read)
    answers = GenerateAnswers(core, requests, indexed=False)
    found = answers.embeddings(
        await read_all_or_disconnect(await core.submit_all(of_client(core, requests)), http.receive)
    )
    return json_response(found if body.is_batch else found[0])


def _read(core: EngineCore, raw: bytes) -> tuple[GenerateBody, list[Request]]:
    asked = decode_open(EncodeBody, parse_object(raw), core, "/encode")
    body = GenerateBody(text=asked.text, input_ids=asked.input_ids, rid=asked.rid)
    requests = requests_of(body, core, cut=asked.truncate, owned=True)
    return body, vector_requests(requests, core, prompt_name=asked.prompt_name, truncate=asked.truncate)
