"""Chat from Python. Keywords and answers are those of /v1/chat/completions.

An answer is a dict whose keys are also attributes: `answer.choices[0].message.content`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from runtime.actors.output_stream import read_all
from runtime.errors import InvalidRequest
from runtime.sampling_params import NOT_BUILT, parameters
from serve.calls.body import off_loop
from serve.calls.bootstrap import with_prefill_server
from serve.calls.chat.prepare import PreparedChat, prepare, render
from serve.calls.chat_completions.answers import AnswerHeader
from serve.calls.chat_completions.chat import ChatEvents, chat_answer
from serve.calls.chat_completions.messages import chat_of
from serve.calls.chat_completions.requests import decode_body
from serve.calls.chat_completions.schema import ChatBody
from serve.calls.media import with_objects
from serve.calls.served_model import adapters_of, choose_model
from serve.python import html
from serve.python.results import Fields

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

Messages = str | Sequence[Mapping[str, Any]]


class Answer(Fields):
    """A JSON object of the chat API. Its keys are also attributes."""

    def _repr_html_(self) -> str | None:
        return html.chat(self) if "choices" in self else None


async def chat(core: EngineCore, messages: Messages, options: Mapping[str, Any]) -> Answer:
    """Answer a chat, and return the complete answer.

    If `response_format` is a pydantic model, the field `parsed` of each message is an instance of this model, or None
    if the output was truncated or calls tools. Raises `InvalidRequest`, whose `param` is the name of the keyword, and
    pydantic's `ValidationError` if the model rejects a value that its JSON schema allows.
    """
    core.check_queue_space()
    _, model, prepared = await off_loop(partial(_read, core, messages, {**options, "stream": False}), small=True)
    [chunks] = await read_all(await core.submit_all([prepared.request]))
    header = AnswerHeader.of(core, prepared.request.label, model)
    work = partial(chat_answer, header, core.tokenizer, prepared, chunks)
    is_long = prepared.request.logprobs is not None or prepared.request.returns_parts or prepared.parses
    answer = _as_answer(await off_loop(work, small=not is_long))
    response_format = options.get("response_format")
    if _is_model(response_format):
        for choice in answer["choices"]:
            is_whole = choice["finish_reason"] == "stop"
            choice["message"]["parsed"] = _parsed(response_format, choice["message"]) if is_whole else None
    return answer


async def chat_stream(core: EngineCore, messages: Messages, options: Mapping[str, Any]) -> AsyncGenerator[Answer, None]:
    """Answer a chat, and yield the answer's chunks as the HTTP API streams them.

    Leaving the loop aborts the request and frees its memory.
    """
    core.check_queue_space()
    body, model, prepared = await off_loop(partial(_read, core, messages, {**options, "stream": True}), small=True)
    header = AnswerHeader.of(core, prepared.request.label, model)
    events = ChatEvents(header, core.tokenizer, prepared, body.stream_options)
    async with aclosing(core.submit(prepared.request).chunks()) as arrivals:
        async for chunks in arrivals:
            for piece in _pieces(events.events(0, chunks)):
                yield piece
    for piece in _pieces(events.closing()):
        yield piece


def _read(core: EngineCore, messages: Messages, options: Mapping[str, Any]) -> tuple[ChatBody, str, PreparedChat]:
    """Decode the arguments like a body of the HTTP API. Returns (body, model's name, prepared chat)."""
    body, objects = _body(core, messages, options)
    model = choose_model(core, body.model)
    [adapter] = adapters_of(model, body.lora_path, 1)
    prepared = prepare(core, chat_of(body, objects), adapter)
    [request] = with_prefill_server(body, core, [prepared.request])
    return body, model.name, replace(prepared, request=request)


def prompt_of(core: EngineCore, messages: Messages, options: Mapping[str, Any]) -> str:
    """Return the prompt of a chat as a text. Raises `InvalidRequest` if the model has no chat template."""
    return render(core, chat_of(*_body(core, messages, options)))


def _body(core: EngineCore, messages: Messages, options: Mapping[str, Any]) -> tuple[ChatBody, list[Any]]:
    """Return the decoded body of the HTTP API, and the media objects in `messages`, to which the body refers by URL."""
    unknown = options.keys() - _names()
    if unknown:
        close = get_close_matches(min(unknown), _names(), n=1, cutoff=0.7)
        advice = f"; did you mean {close[0]}?" if close else "."
        raise InvalidRequest(f"Unknown option: {', '.join(sorted(unknown))}{advice}", param=min(unknown))
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    fields = {name: value for name, value in options.items() if value is not None}
    if _is_model(fields.get("response_format")):
        fields["response_format"] = _format_of(fields["response_format"])
    messages, objects = with_objects(messages)
    try:
        raw = orjson.dumps({"messages": list(messages), **fields}, option=orjson.OPT_NON_STR_KEYS)
    except TypeError as error:
        raise InvalidRequest(f"The chat must consist of JSON types: {error}.") from None
    return decode_body(ChatBody, raw, core), objects


def _names() -> set[str]:
    sampling = {name for parameter in parameters() for name in parameter.names_in("chat")}
    fields = {name for name, field in ChatBody.__dataclass_fields__.items() if field.init}
    return (sampling | fields | set(NOT_BUILT)) - {"messages"}


def _is_model(value: Any) -> bool:
    """Return whether the value is a pydantic model class, without importing pydantic."""
    return isinstance(value, type) and hasattr(value, "model_json_schema")


def _format_of(model: Any) -> dict[str, Any]:
    schema = {"name": model.__name__, "schema": model.model_json_schema(), "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def _parsed(model: Any, message: Mapping[str, Any]) -> Any:
    return model.model_validate_json(message["content"]) if message["content"] else None


def _pieces(frames: bytes) -> list[Answer]:
    return [_as_answer(orjson.loads(frame[len(b"data: ") :])) for frame in frames.split(b"\n\n") if frame]


def _as_answer(value: Any) -> Any:
    if isinstance(value, dict):
        return Answer({key: _as_answer(item) for key, item in value.items()})
    return [_as_answer(item) for item in value] if isinstance(value, list) else value
