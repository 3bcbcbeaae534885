"""`/v1/chat/completions`: the handler, the prompt from messages, and the answer, whole or streamed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import anyio.to_thread
import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from runtime.errors import InvalidRequest
from runtime.request import Chunk, Finish, LogprobParams, Request
from serve.endpoint import json_response, read_all_or_disconnect, read_body, require_json
from serve.errors import ErrorFormat, openai_body
from serve.openai.answers import AnswerHeader, UsageCount, event_end
from serve.openai.logprobs import chat_logprobs
from serve.openai.models import check_model
from serve.openai.requests import decode_body, sampling_of
from serve.openai.schema import NAMES, ChatBody, Message, StreamOptions
from serve.output_streams import submit_all
from serve.sse import EventStream

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore
    from runtime.tokenizer.tokenizer import Tokenizer

ERROR_FORMAT = ErrorFormat(openai_body, {**NAMES, "text": "messages", "top_logprobs_num": "top_logprobs"})
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
RESERVED_KWARGS = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})


@dataclass(frozen=True, slots=True)
class _Call:
    """One call, read and checked."""

    body: ChatBody
    model: str
    request: Request


async def create(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Messages in, a message out, whole or streamed."""
    require_json(http)
    call = await read_body(http, partial(_read, core))
    header = AnswerHeader.of(core, call.request.label, call.model)
    streams = submit_all(core, [call.request])
    if call.body.stream:
        events = ChatEvents(header, core.tokenizer, call.body.stream_options)
        return EventStream(streams, events, ERROR_FORMAT)
    [chunks] = await read_all_or_disconnect(streams, http.receive)
    if call.body.logprobs:  # long lists
        return await anyio.to_thread.run_sync(_response, header, core.tokenizer, chunks)
    return _response(header, core.tokenizer, chunks)


def _response(header: AnswerHeader, tokenizer: Tokenizer | None, chunks: Sequence[Chunk]) -> Response:
    return json_response(chat_answer(header, tokenizer, chunks))


def _read(core: EngineCore, raw: bytes) -> _Call:
    body = decode_body(ChatBody, raw)
    model = check_model(core, body.model)
    _refuse_tools(body)
    logprobs = _logprobs(body)
    sampling = sampling_of(core, body)
    request = Request(
        text=render(core, body),
        sampling=sampling,
        logprobs=logprobs,
        add_special_tokens=False,
        truncate=core.plan.serve.allow_auto_truncate,
        label=body.rid or uuid4().hex,
    )
    return _Call(body, model, request)


# --- the prompt ---


def render(core: EngineCore, body: ChatBody, *, add_generation_prompt: bool = True) -> str:
    """The prompt's text; without `add_generation_prompt` it ends with the last message.

    Raises `InvalidRequest` naming the message that is wrong.
    """
    if core.tokenizer is None:
        raise InvalidRequest("This server has no tokenizer; use /generate with input_ids.", param="messages")
    if core.tokenizer.template is None:
        raise InvalidRequest("This model has no chat template; use /v1/completions.", param="messages")
    messages = [_message(message, f"messages.{index}") for index, message in enumerate(body.messages)]
    if body.continue_final_message and messages[-1]["role"] != "assistant":
        raise InvalidRequest(
            "continue_final_message needs the last message to be the assistant's.",
            param="continue_final_message",
        )
    return core.tokenizer.template.render(
        messages,
        add_generation_prompt=add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message,
        **_template_kwargs(body),
    )


def _message(message: Message, path: str) -> dict[str, Any]:
    role = message.role.lower()
    if role not in ROLES:
        raise InvalidRequest(f"{path}.role must be one of {', '.join(ROLES)}.", param=f"{path}.role")
    content: Any = message.content
    if content is None and not (role == "assistant" and (message.tool_calls or message.reasoning_content)):
        raise InvalidRequest(f"{path}.content is required.", param=f"{path}.content")
    if isinstance(content, list):
        content = [{"type": "text", "text": text} for text in _texts(message, path)]
    return {
        "role": "system" if role == "developer" else role,  # templates know the older word
        "content": content,
        "name": message.name,
        "tool_calls": [_tool_call(call) for call in message.tool_calls] if message.tool_calls else None,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content,
    }


def _texts(message: Message, path: str) -> list[str]:
    texts = []
    for index, part in enumerate(message.content or ()):
        where = f"{path}.content.{index}"
        if isinstance(part, str) or part.type != "text":
            kind = "" if isinstance(part, str) else f' "{part.type[:40]}"'
            raise InvalidRequest(f"{where}.type{kind} is not built yet; only text is.", param=f"{where}.type")
        if part.text is None:
            raise InvalidRequest(f"{where}.text is required.", param=f"{where}.text")
        texts.append(part.text)
    return texts


def _tool_call(call: Any) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments or {}}
    return {"id": call.id, "type": call.type, "function": function}


def _template_kwargs(body: ChatBody) -> Mapping[str, Any]:
    kwargs = dict(body.chat_template_kwargs)
    taken = RESERVED_KWARGS & kwargs.keys()
    if taken:
        param = f"chat_template_kwargs.{min(taken)}"
        raise InvalidRequest(f"{param} is a field of the request itself.", param=param)
    effort = body.reasoning_effort
    if body.reasoning is not None:
        enabled = body.reasoning.enable if body.reasoning.enabled is None else body.reasoning.enabled
        if enabled is not None:
            kwargs.setdefault("thinking", enabled)
        effort = effort or body.reasoning.effort
    if effort is not None:
        kwargs.setdefault("reasoning_effort", effort)
    return kwargs


def _refuse_tools(body: ChatBody) -> None:
    if body.tools and body.tool_choice != "none":
        raise InvalidRequest('tools is not built yet; leave it out or say tool_choice "none".', param="tools")
    if not body.tools and body.tool_choice not in (None, "none", "auto"):
        raise InvalidRequest("tool_choice is not built yet; leave it out.", param="tool_choice")


def _logprobs(body: ChatBody) -> LogprobParams | None:
    if body.logprobs:
        return LogprobParams(top=body.top_logprobs or 0, text=True)
    if body.top_logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
    return None


# --- the answer ---


def chat_answer(header: AnswerHeader, tokenizer: Tokenizer | None, chunks: Sequence[Chunk]) -> dict[str, Any]:
    """The `chat.completion` object; one finished chunk per choice."""
    usage = UsageCount(cache_report=header.cache_report)
    choices = []
    for chunk in chunks:
        usage.note(0, chunk.index, chunk.usage)
        finish = chunk.finish or Finish("abort")
        message = {
            "role": "assistant",
            "content": chunk.text,
            "reasoning_content": None,
            "tool_calls": None,
        }
        choices.append(
            {
                "index": chunk.index,
                "message": message,
                "logprobs": chat_logprobs(chunk.logprobs, tokenizer)
                if chunk.logprobs and tokenizer
                else None,
                "finish_reason": finish.kind,
                "matched_stop": finish.matched,
            }
        )
    return header.whole("chat.completion", choices, usage.total())


class ChatEvents:
    """Events of one streamed chat answer (see serve.sse.Encoder).

    Per choice: a delta with the role, then deltas with content. When all choices have ended: a finish per
    choice, and the usage if it was asked for.
    """

    def __init__(
        self, header: AnswerHeader, tokenizer: Tokenizer | None, options: StreamOptions | None
    ) -> None:
        self._tokenizer = tokenizer
        self._options = options or StreamOptions()
        self._usage = UsageCount(cache_report=header.cache_report)
        self._finishes: dict[int, Finish] = {}
        self._start = header.event_start("chat.completion.chunk")
        self._end = event_end()
        self._before_text: dict[int, bytes] = {}
        self._after_text = self._choice_rest(logprobs=b"null")

    def events(self, request_index: int, chunks: Sequence[Chunk]) -> bytes:
        parts: list[bytes] = []
        for chunk in chunks:
            index = chunk.index
            before = self._before_text.get(index)
            if before is None:
                before = self._before_text[index] = self._open(index)
                parts.append(self._delta(index, {"role": "assistant", "content": ""}, chunk))
            self._usage.note(0, index, chunk.usage)
            if chunk.finish is not None:
                self._finishes[index] = chunk.finish
            if chunk.logprobs is not None and self._tokenizer is not None:
                logprobs = orjson.dumps(chat_logprobs(chunk.logprobs, self._tokenizer))
                rest = self._choice_rest(logprobs=logprobs)
            elif chunk.text:
                rest = self._after_text
            else:
                continue
            parts += (before, orjson.dumps(chunk.text), rest, self._event_end(chunk))
        return b"".join(parts)

    def closing(self) -> bytes:
        parts = [self._delta(index, {}, None, finish) for index, finish in sorted(self._finishes.items())]
        if self._options.include_usage:
            parts.append(self._start + event_end(self._usage.total()))
        return b"".join(parts)

    def _open(self, index: int) -> bytes:
        """An event of one choice up to its text."""
        return self._start + b'{"index":%d,"delta":{"role":null,"content":' % index

    def _choice_rest(self, *, logprobs: bytes) -> bytes:
        return (
            b',"reasoning_content":null,"tool_calls":null},"logprobs":'
            + logprobs
            + b',"finish_reason":null,"matched_stop":null}'
        )

    def _delta(
        self, index: int, delta: dict[str, Any], chunk: Chunk | None, finish: Finish | None = None
    ) -> bytes:
        """An event without text: the first or the last of a choice."""
        empty = {"role": None, "content": None, "reasoning_content": None, "tool_calls": None}
        choice = {
            "index": index,
            "delta": empty | delta,
            "logprobs": None,
            "finish_reason": finish.kind if finish else None,
            "matched_stop": finish.matched if finish else None,
        }
        return self._start + orjson.dumps(choice) + self._event_end(chunk)

    def _event_end(self, chunk: Chunk | None) -> bytes:
        if chunk is None or not self._options.continuous_usage_stats:
            return self._end
        return event_end(self._usage.so_far(chunk.usage))
