"""`/v1/embeddings`: prompts in, a vector for each out."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal
from uuid import uuid4

import anyio.to_thread
import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from runtime.errors import InvalidRequest
from runtime.request import Chunk, Request
from serve.decode import Length, NotBuilt, Range
from serve.endpoint import decode_open, json_response, parse_object, read_all_or_disconnect, read_call
from serve.errors import ErrorFormat, openai_body
from serve.openai.models import check_model
from serve.prompts import MAX_PROMPTS, Label, labels_of, of_client, vector_requests
from serve.work_budget import prompt_ids

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

ERROR_FORMAT = ErrorFormat(openai_body, {"text": "input", "input_ids": "input"})


@dataclass(slots=True, kw_only=True)
class EmbeddingBody:
    """The body of /v1/embeddings. `user` is accepted without effect.

    `prompt_name` names one of the texts that the checkpoint puts before its inputs; `truncate` cuts inputs that are
    too long instead of refusing them.
    """

    input: (
        str
        | Annotated[list[str], Length(1, MAX_PROMPTS)]
        | list[int]
        | Annotated[list[list[int]], Length(1, MAX_PROMPTS)]
    )
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Range(1, 1 << 20)] | None = None
    user: str | None = None
    prompt_name: str | None = None
    truncate: bool | None = None
    rid: Label | list[Label] | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Range(-1, -1)] | None = None  # vLLM's word for truncate
    embed_dtype: Literal["float32"] = "float32"  # this and the next are vLLM's: the values for what is done
    endianness: Literal["native", "little"] = "native"
    normalize: Literal[True] = True
    use_activation: Literal[True] = True
    input_type: NotBuilt = None  # these are of other servers and services, and would change the vectors
    task: NotBuilt = None
    late_chunking: NotBuilt = None
    instruction: NotBuilt = None
    priority: NotBuilt = None
    lora_path: NotBuilt = None
    messages: NotBuilt = None


async def create(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """The vector of each prompt, in full or its first `dimensions`."""
    body, model, requests = await read_call(http, core, _read)
    chunks = await read_all_or_disconnect(await core.submit_all(of_client(core, requests)), http.receive)
    return await anyio.to_thread.run_sync(_response, body, model, chunks)


def _read(core: EngineCore, raw: bytes) -> tuple[EmbeddingBody, str, list[Request]]:
    body = decode_open(EmbeddingBody, parse_object(raw), core, "/v1/embeddings")
    model = check_model(core, body.model)
    check_vectors(core, body.dimensions)
    is_batch = isinstance(body.input, list) and not isinstance((body.input or [0])[0], int)
    prompts: list[Any] = list(body.input) if is_batch else [body.input]
    for index, prompt in enumerate(prompts):
        if not prompt:
            param = f"input.{index}" if is_batch else "input"
            raise InvalidRequest(f"{param} must not be empty.", param=param)
    truncate = body.truncate if body.truncate_prompt_tokens is None else True
    labels = labels_of(body.rid or uuid4().hex, len(prompts), is_batch=is_batch)
    requests = [
        Request(
            text=prompt if isinstance(prompt, str) else None,
            ids=None if isinstance(prompt, str) else prompt_ids(prompt, core.plan, cut=truncate),
            add_special_tokens=body.add_special_tokens,
            label=label,
        )
        for prompt, label in zip(prompts, labels, strict=True)
    ]
    wanted = vector_requests(requests, core, prompt_name=body.prompt_name, truncate=truncate)
    return body, model, wanted


def check_vectors(core: EngineCore, dimensions: int | None) -> None:
    """Raise `InvalidRequest` where the model gives no vectors, or none with so many numbers."""
    if core.facts.labels:
        raise InvalidRequest("This model gives scores of labels, not vectors: use /classify or /v1/rerank.")
    size = core.facts.vector_size
    if dimensions is not None and dimensions > size:
        raise InvalidRequest(
            f"dimensions must be at most {size}, the size of this model's vectors.", param="dimensions"
        )


def _response(body: EmbeddingBody, model: str, answers: Sequence[Sequence[Chunk]]) -> Response:
    data, num_tokens = [], 0
    for index, [chunk] in enumerate(answers):
        vector = vector_of(chunk, body.dimensions)
        data.append(
            {"object": "embedding", "index": index, "embedding": _encoded(vector, body.encoding_format)}
        )
        num_tokens += chunk.usage.prompt
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return json_response({"object": "list", "data": data, "model": model, "usage": usage})


def vector_of(chunk: Chunk, dimensions: int | None) -> list[float]:
    """The vector, or its first numbers scaled to length 1 again (Matryoshka representations, arXiv 2205.13147).

    Raises `InvalidRequest` where there is none.
    """
    if chunk.embedding is None:
        raise InvalidRequest("The request was aborted before its vector was computed.")
    vector = chunk.embedding
    if dimensions is None or dimensions == len(vector):
        return vector
    first = vector[:dimensions]
    length = math.sqrt(sum(number * number for number in first))
    return [number / length for number in first] if length else first


def _encoded(vector: list[float], encoding: str) -> list[float] | str:
    """Numbers, or their float32 bytes, the lowest first, in base64."""
    return vector if encoding == "float" else base64.b64encode(np.array(vector, "<f4").tobytes()).decode()
