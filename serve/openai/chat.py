"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import anyio.to_thread
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from runtime.errors import InvalidRequest
from runtime.request import Chunk, LogprobParams, Request
from serve.body import read_body, require_json
from serve.core import EngineCore
from serve.errors import Dialect, openai_body
from serve.openai.answers import Head
from serve.openai.chat_answers import ChatEvents, chat_answer
from serve.openai.requests import check_model, decode_body, sampling_of
from serve.openai.schema import NAMES, ChatBody, Message
from serve.replies import json_response, submit_all, wait_all
from serve.sse import EventStream

DIALECT = Dialect(openai_body, {**NAMES, "text": "messages", "top_logprobs_num": "top_logprobs"})
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
RESERVED_KWARGS = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})


@dataclass(frozen=True, slots=True)
class _Call:
    """One call, read and checked."""

    body: ChatBody
    model: str
    request: Request


class ChatDoor:
    """Messages in, a message out, whole or streamed."""

    def __init__(self, core: EngineCore, *, max_body_bytes: int) -> None:
        self._core = core
        self._max_body_bytes = max_body_bytes

    async def complete(self, http: HttpRequest) -> ASGIApp:
        require_json(http)
        call = await read_body(http, self._read, limit=self._max_body_bytes)
        core = self._core
        head = Head.of(core, call.request.label, call.model)
        replies = submit_all(core, [call.request])
        if call.body.stream:
            events = ChatEvents(head, core.tokenizer, call.body.stream_options)
            return EventStream(replies, events, DIALECT)
        [chunks] = await wait_all(replies, http.receive)
        if call.body.logprobs:  # long lists
            return await anyio.to_thread.run_sync(self._answer, head, chunks)
        return self._answer(head, chunks)

    def _answer(self, head: Head, chunks: list[Chunk]) -> Response:
        return json_response(chat_answer(head, self._core.tokenizer, chunks))

    def _read(self, raw: bytes) -> _Call:
        core, body = self._core, decode_body(ChatBody, raw)
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


def render(core: EngineCore, body: ChatBody) -> str:
    """The prompt's text. Raises `InvalidRequest` naming the message that is wrong."""
    if core.tokenizer is None:
        raise InvalidRequest("This server has no tokenizer; use /generate with input_ids.", param="messages")
    if core.tokenizer.template is None:
        raise InvalidRequest("This model has no chat template; use /v1/completions.", param="messages")
    messages = [_message(message, f"messages.{place}") for place, message in enumerate(body.messages)]
    if body.continue_final_message and messages[-1]["role"] != "assistant":
        raise InvalidRequest(
            "continue_final_message needs the last message to be the assistant's.",
            param="continue_final_message",
        )
    return core.tokenizer.template.render(
        messages,
        add_generation_prompt=not body.continue_final_message,
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
    for place, part in enumerate(message.content or ()):
        where = f"{path}.content.{place}"
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
