"""`/classify`: what a classifier or reward model makes of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import anyio.to_thread
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from runtime.errors import InvalidRequest
from runtime.request import Chunk, Request
from serve.decode import Length, NotBuilt
from serve.endpoint import decode_open, json_response, parse_object, read_all_or_disconnect, read_call
from serve.errors import ErrorFormat, native_body
from serve.native.generate import GenerateAnswers
from serve.native.schema import GenerateBody, requests_of
from serve.prompts import MAX_PROMPTS, Label, of_client, vector_requests
from serve.ranking import probabilities

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

ERROR_FORMAT = ErrorFormat(native_body, {})


@dataclass(slots=True, kw_only=True)
class ClassifyBody:
    """The body of `/classify`. A list as `text`, or lists in `input_ids`, make a batch.

    With `text_pair` each text is one of a pair that is classified together.
    """

    text: str | Annotated[list[str], Length(1, MAX_PROMPTS)] | None = None
    text_pair: str | Annotated[list[str], Length(1, MAX_PROMPTS)] | None = None
    input_ids: list[int] | Annotated[list[list[int]], Length(1, MAX_PROMPTS)] | None = None
    rid: Label | list[Label] | None = None
    truncate: bool | None = None
    image_data: NotBuilt = None
    lora_path: NotBuilt = None
    priority: NotBuilt = None


async def classify(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Scores of the labels, the likeliest label and probabilities of one prompt, or of each of a list."""
    is_batch, requests = await read_call(http, core, _read)
    answers = await read_all_or_disconnect(await core.submit_all(of_client(core, requests)), http.receive)
    return await anyio.to_thread.run_sync(_response, core, requests, answers, is_batch)


def _response(
    core: EngineCore, requests: Sequence[Request], answers: Sequence[Sequence[Chunk]], is_batch: bool
) -> Response:
    found = classified(core, requests, answers)
    return json_response(found if is_batch else found[0])


def _read(core: EngineCore, raw: bytes) -> tuple[bool, list[Request]]:
    return classify_requests(core, decode_open(ClassifyBody, parse_object(raw), core, "/classify"))


def classify_requests(core: EngineCore, body: ClassifyBody) -> tuple[bool, list[Request]]:
    """Whether it is a batch, and its requests. Raises `InvalidRequest` where the model is no classifier."""
    if not core.facts.labels:
        raise InvalidRequest("This model is no classifier: it has no labels.")
    plain = GenerateBody(text=body.text, input_ids=body.input_ids, rid=body.rid)
    requests = vector_requests(requests_of(plain, core), core, truncate=body.truncate)
    if body.text_pair is None:
        return plain.is_batch, requests
    pairs = [body.text_pair] if isinstance(body.text_pair, str) else body.text_pair
    if body.text is None or isinstance(body.text_pair, list) != plain.is_batch or len(pairs) != len(requests):
        raise InvalidRequest("text_pair must hold as many texts as text.", param="text_pair")
    if not core.facts.is_encoder:
        raise InvalidRequest("This model reads no pairs of texts.", param="text_pair")
    return plain.is_batch, [
        replace(request, second_text=second) for request, second in zip(requests, pairs, strict=True)
    ]


def classified(
    core: EngineCore, requests: Sequence[Request], answers: Sequence[Sequence[Chunk]]
) -> list[dict[str, Any]]:
    """`embedding` are the scores of the labels, as SGLang calls them; without one label there is no `label`."""
    labels, activation = core.facts.labels, core.facts.score_activation
    found = GenerateAnswers(core, requests, indexed=False).embeddings(answers)
    for answer in found:
        scores = answer["embedding"]
        if scores is None:  # aborted
            continue
        answer["label"] = labels[max(range(len(scores)), key=scores.__getitem__)] if len(scores) > 1 else None
        answer["probs"] = probabilities(scores, activation)
    return found
