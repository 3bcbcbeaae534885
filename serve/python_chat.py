"""Chat from Python: keywords are the fields of /v1/chat/completions, answers are its objects.

An answer is a dict whose keys are attributes too: `answer.choices[0].message.content`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from runtime.actors.output_stream import read_all
from runtime.errors import InvalidRequest
from runtime.sampling_params import NOT_BUILT, parameters
from serve.chat.request import PreparedChat, prepare
from serve.endpoint import off_loop
from serve.openai.answers import AnswerHeader
from serve.openai.chat import ChatEvents, chat_answer
from serve.openai.messages import chat_of
from serve.openai.models import check_model
from serve.openai.requests import decode_body
from serve.openai.schema import ChatBody

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

Messages = str | Sequence[Mapping[str, Any]]


class Answer(dict[str, Any]):
    """A JSON object whose keys can be read as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the answer has no {name!r}; it has {', '.join(self)}") from None


async def chat(core: EngineCore, messages: Messages, options: Mapping[str, Any]) -> Answer:
    """The whole answer. Where `response_format` is a pydantic model, each message has the object as `parsed`.

    `parsed` is None where the output was cut off or calls tools. Raises `InvalidRequest` naming the keyword, and
    pydantic's error where the model refuses what its schema allows.
    """
    core.check_room()
    _, model, prepared = await off_loop(
        partial(_read, core, messages, {**options, "stream": False}), small=True
    )
    [chunks] = await read_all(await core.submit_all([prepared.request]))
    header = AnswerHeader.of(core, prepared.request.label, model)
    answer = _as_answer(chat_answer(header, core.tokenizer, prepared, chunks))
    wanted = options.get("response_format")
    if _is_model(wanted):
        for choice in answer["choices"]:
            is_whole = choice["finish_reason"] == "stop"
            choice["message"]["parsed"] = _parsed(wanted, choice["message"]) if is_whole else None
    return answer


async def chat_stream(
    core: EngineCore, messages: Messages, options: Mapping[str, Any]
) -> AsyncGenerator[Answer, None]:
    """The answer's chunks as they come, as the HTTP API streams them. Leaving the loop frees the request."""
    core.check_room()
    body, model, prepared = await off_loop(
        partial(_read, core, messages, {**options, "stream": True}), small=True
    )
    header = AnswerHeader.of(core, prepared.request.label, model)
    events = ChatEvents(header, core.tokenizer, prepared, body.stream_options)
    async with aclosing(core.submit(prepared.request).chunks()) as arrivals:
        async for chunks in arrivals:
            for piece in _pieces(events.events(0, chunks)):
                yield piece
    for piece in _pieces(events.closing()):
        yield piece


def _read(
    core: EngineCore, messages: Messages, options: Mapping[str, Any]
) -> tuple[ChatBody, str, PreparedChat]:
    """The call as a body of the HTTP API, checked in the same way."""
    unknown = options.keys() - _names()
    if unknown:
        raise InvalidRequest(f"There is no option {', '.join(sorted(unknown))} here.", param=min(unknown))
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    given = {name: value for name, value in options.items() if value is not None}
    if _is_model(given.get("response_format")):
        given["response_format"] = _format_of(given["response_format"])
    try:
        raw = orjson.dumps({"messages": list(messages), **given}, option=orjson.OPT_NON_STR_KEYS)
    except TypeError as error:
        raise InvalidRequest(f"The chat must consist of JSON's types: {error}.") from None
    body = decode_body(ChatBody, raw, core)
    return body, check_model(core, body.model), prepare(core, chat_of(body))


def _names() -> set[str]:
    sampling = {name for parameter in parameters() for name in parameter.names_in("chat")}
    fields = {name for name, field in ChatBody.__dataclass_fields__.items() if field.init}
    return (sampling | fields | set(NOT_BUILT)) - {"messages"}


def _is_model(value: Any) -> bool:
    """Whether it is a pydantic model; pydantic itself is not needed here."""
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
