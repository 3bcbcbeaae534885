"""The handler of `/v1/embeddings`."""

from __future__ import annotations

import base64
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
from runtime.sampling_params import MAX_INT32
from serve.calls.body import decode_open, parse_object
from serve.calls.chat.prepare import render
from serve.calls.chat.request import ChatRequest
from serve.calls.chat_completions.messages import read_message
from serve.calls.chat_completions.schema import Message
from serve.calls.decode import Length, NotBuilt, Range
from serve.calls.prompts import MAX_MESSAGES, AdapterName, Ids, Label, Texts, batch_of, labels_of, vector_requests
from serve.calls.served_model import adapters_of, choose_model
from serve.calls.vectors import check_vectors, vector_of
from serve.calls.work_budget import prompt_ids
from serve.http.endpoint import compute, decodes, json_response, read_call
from serve.http.errors import ErrorFormat, openai_body

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

ERROR_FORMAT = ErrorFormat(openai_body, {"text": "input", "input_ids": "input"})


@dataclass(slots=True, kw_only=True)
class EmbeddingBody:
    """The body of /v1/embeddings. `user` is accepted without effect.

    `prompt_name` selects one of the checkpoint's prompts, which is put before each input. If `truncate` is true, inputs
    that are too long are cut instead of refused.
    """

    input: Texts | Ids | None = None
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Range(1, 1 << 20)] | None = None
    user: str | None = None
    prompt_name: str | None = None
    truncate: bool | None = None
    rid: Label | list[Label] | None = None
    lora_path: AdapterName | list[AdapterName | None] | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Range(-1, MAX_INT32)] | None = None  # vLLM's `truncate`; must be -1
    embed_dtype: Literal["float32"] = (
        "float32"  # this field and the next three are vLLM's; only their default behaviour is supported
    )
    endianness: Literal["native", "little"] = "native"
    normalize: Literal[True] = True
    use_activation: Literal[True] = True
    input_type: NotBuilt = None  # fields of other servers that would change the embeddings
    task: NotBuilt = None
    late_chunking: NotBuilt = None
    instruction: NotBuilt = None
    priority: NotBuilt = None
    messages: Annotated[list[Message], Length(1, MAX_MESSAGES)] | None = None  # in place of input, as in vLLM


@decodes(EmbeddingBody)
async def create(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return the embedding of each prompt, shortened to `dimensions` numbers if this is set."""
    body, model, requests = await read_call(http, core, _read)
    chunks = await compute(http, core, requests)
    return await anyio.to_thread.run_sync(_response, body, model, chunks)


def _read(core: EngineCore, raw: bytes) -> tuple[EmbeddingBody, str, list[Request]]:
    body = decode_open(EmbeddingBody, parse_object(raw), core, "/v1/embeddings")
    model = choose_model(core, body.model)
    check_vectors(core, body.dimensions)
    if (body.input is None) == (body.messages is None):
        raise InvalidRequest("Send either input or messages.", param="input")
    if body.truncate_prompt_tokens not in (None, -1):
        raise InvalidRequest(
            "truncate_prompt_tokens must be -1 here: prompts are cut to the model's context, to no other length.",
            param="truncate_prompt_tokens",
        )
    if body.messages is not None:
        chat = ChatRequest(messages=[read_message(each, f"messages.{i}") for i, each in enumerate(body.messages)])
        body.input, body.add_special_tokens = render(core, chat), False
    is_batch = isinstance(body.input, list) and not isinstance((body.input or [0])[0], int)
    prompts: list[Any] = list(body.input or ()) if is_batch else [body.input]
    for index, prompt in enumerate(prompts):
        if not prompt:
            param = f"input.{index}" if is_batch else "input"
            raise InvalidRequest(f"{param} must not be empty.", param=param)
    truncate = body.truncate if body.truncate_prompt_tokens is None else True
    labels = labels_of(body.rid or uuid4().hex, len(prompts), is_batch=is_batch)
    adapters = adapters_of(model, body.lora_path, len(prompts))
    requests = [
        Request(
            text=prompt if isinstance(prompt, str) else None,
            ids=None if isinstance(prompt, str) else prompt_ids(prompt, core.plan, cut=truncate),
            add_special_tokens=body.add_special_tokens,
            lora=adapter,
            label=label,
            batch=batch_of(body.rid, is_batch=is_batch),
        )
        for prompt, label, adapter in zip(prompts, labels, adapters, strict=True)
    ]
    wanted = vector_requests(requests, core, prompt_name=body.prompt_name, truncate=truncate)
    return body, model.name, wanted


def _response(body: EmbeddingBody, model: str, answers: Sequence[Sequence[Chunk]]) -> Response:
    data, num_tokens = [], 0
    for index, [chunk] in enumerate(answers):
        vector = vector_of(chunk, body.dimensions)
        data.append({"object": "embedding", "index": index, "embedding": _encoded(vector, body.encoding_format)})
        num_tokens += chunk.usage.prompt
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return json_response({"object": "list", "data": data, "model": model, "usage": usage})


def _encoded(vector: list[float], encoding: str) -> list[float] | str:
    """Return the numbers, or their little-endian float32 bytes in base64."""
    return vector if encoding == "float" else base64.b64encode(np.array(vector, "<f4").tobytes()).decode()
