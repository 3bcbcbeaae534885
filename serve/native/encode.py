"""`/encode`: the vectors of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from runtime.errors import InvalidRequest
from runtime.request import Request
from runtime.sampling_params import SamplingParams
from serve.decode import Length, NotBuilt, decode
from serve.endpoint import json_response, parse_object, read_all_or_disconnect, read_call
from serve.errors import ErrorFormat, native_body
from serve.native.generate import GenerateAnswers
from serve.native.schema import MAX_PROMPTS, GenerateBody, Label, requests_of
from serve.output_streams import of_client

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


async def encode(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """`embedding` and `meta_info` of one prompt, or of each of a list."""
    body, requests = await read_call(http, core, _read)
    answers = GenerateAnswers(core, requests, indexed=False)
    found = answers.embeddings(
        await read_all_or_disconnect(core.submit_all(of_client(core, requests)), http.receive)
    )
    return json_response(found if body.is_batch else found[0])


def _read(core: EngineCore, raw: bytes) -> tuple[GenerateBody, list[Request]]:
    asked = decode(EncodeBody, parse_object(raw))
    body = GenerateBody(text=asked.text, input_ids=asked.input_ids, rid=asked.rid)
    requests = requests_of(body, core)
    return body, vector_requests(requests, core, prompt_name=asked.prompt_name, truncate=asked.truncate)


def vector_requests(
    requests: Sequence[Request],
    core: EngineCore,
    *,
    prompt_name: str | None = None,
    truncate: bool | None = None,
) -> list[Request]:
    """The same prompts; what is wanted of each is its vector.

    Before a text comes the checkpoint's prompt of this name, or its default one. Raises `InvalidRequest` for a name
    that it does not have. A text that is too long is cut with `truncate`, which the server has a default for.
    """
    facts, sampling = core.facts, SamplingParams(max_new_tokens=0)
    name = facts.default_prompt if prompt_name is None else prompt_name
    if name is not None and name not in facts.prompts:
        known = ", ".join(facts.prompts) or "none"
        raise InvalidRequest(
            f"This model has no prompt of the name {name[:40]!r}; it has {known}.", param="prompt_name"
        )
    before = "" if name is None else facts.prompts[name]
    if truncate is None:
        truncate = core.plan.serve.allow_auto_truncate

    def wanted(request: Request) -> Request:
        text = request.text
        if text is not None:
            text = before + text
            text = text.lower() if facts.lower_case else text
        return replace(request, text=text, sampling=sampling, truncate=truncate, wants_embedding=True)

    return [wanted(request) for request in requests]
