"""The handler of `/encode`: embeddings of prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from runtime.request import Request
from serve.calls.body import decode_open, parse_object
from serve.calls.decode import NotBuilt
from serve.calls.generate.answers import GenerateAnswers
from serve.calls.generate.schema import GenerateBody, requests_of
from serve.calls.prompts import AdapterName, Ids, Label, Texts, vector_requests
from serve.http.endpoint import compute, decodes, json_response, read_call

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore


@dataclass(slots=True, kw_only=True)
class EncodeBody:
    """The body of `/encode`. A list in `text`, or a list of lists in `input_ids`, makes a batch."""

    text: Texts | None = None
    input_ids: Ids | None = None
    rid: Label | list[Label] | None = None
    prompt_name: str | None = None
    truncate: bool | None = None
    image_data: NotBuilt = None
    audio_data: NotBuilt = None
    video_data: NotBuilt = None
    lora_path: AdapterName | list[AdapterName | None] | None = None
    input_embeds: NotBuilt = None
    dimensions: NotBuilt = None
    is_cross_encoder_request: NotBuilt = None
    priority: NotBuilt = None


@decodes(EncodeBody)
async def encode(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return `embedding` and `meta_info` per prompt."""
    body, requests = await read_call(http, core, _read)
    answers = GenerateAnswers(core, requests, indexed=False)
    results = answers.embeddings(await compute(http, core, requests))
    return json_response(results if body.is_batch else results[0])


def _read(core: EngineCore, raw: bytes) -> tuple[GenerateBody, list[Request]]:
    encode_body = decode_open(EncodeBody, parse_object(raw), core, "/encode")
    body = GenerateBody(
        text=encode_body.text, input_ids=encode_body.input_ids, rid=encode_body.rid, lora_path=encode_body.lora_path
    )
    requests = requests_of(body, core, cut=encode_body.truncate, owned=True)
    return body, vector_requests(requests, core, prompt_name=encode_body.prompt_name, truncate=encode_body.truncate)
