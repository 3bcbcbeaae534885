"""From a body of /v1/responses to a chat that can be submitted, and the part of the answer that is known before."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from runtime.errors import ContextOverflow, InvalidRequest
from runtime.grammar_spec import Grammar
from runtime.request import LogprobParams
from serve.chat.request import ChatRequest, PreparedChat, count_tokens, effort_switch, prepare, render
from serve.decode import Noted
from serve.endpoint import tell_noted
from serve.openai.models import check_model
from serve.openai.response_format import grammar_of
from serve.openai.responses.items import (
    Item,
    chat_tool_choice,
    chat_tools,
    input_items,
    messages_of,
    tools_of,
)
from serve.openai.responses.schema import FunctionTool, InputBody, ResponsesBody
from serve.openai.responses.store import StoredResponse
from serve.prompts import namespaces_of

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore


@dataclass(frozen=True, slots=True)
class ResponseCall:
    """One call, read and checked."""

    body: ResponsesBody
    prepared: PreparedChat
    head: Mapping[str, Any]  # the fields of the response that do not change
    input_items: Sequence[Item]
    conversation: Sequence[Mapping[str, Any]]  # messages before the answer, without instructions
    num_bytes: int  # that all of this takes


def call_of(
    core: EngineCore,
    body: ResponsesBody,
    previous: StoredResponse | None,
    find_item: Callable[[str], Item | None],
) -> ResponseCall:
    """Raises `InvalidRequest` naming what cannot be done."""
    asked = _asked(core, body, previous, find_item, "/v1/responses")
    chat = replace(
        asked.chat,
        sampling=body.sampling,
        logprobs=LogprobParams(top=body.top_logprobs, text=True) if body.wants_logprobs else None,
        namespace=namespaces_of(body.cache_salt, body.extra_key, 1)[0],
        priority=body.priority,
        label=f"resp_{uuid4().hex}",
    )
    if body.truncation == "auto":
        chat = fitted(core, chat, asked.num_kept, body.max_output_tokens or 1)
    prepared = prepare(core, chat)
    head = _head(body, asked.model, prepared, asked.tools)
    # As items, as messages, in the answer.
    num_bytes = 3 * body.num_bytes + (previous.num_bytes if previous else 0)
    return ResponseCall(body, prepared, head, asked.items, asked.conversation, num_bytes)


def num_input_tokens(
    core: EngineCore,
    body: InputBody,
    previous: StoredResponse | None,
    find_item: Callable[[str], Item | None],
) -> int:
    """How many tokens the prompt of such a body has. Raises as `call_of`, and for many times the model's context."""
    asked = _asked(core, body, previous, find_item, "/v1/responses/input_tokens")
    chat = fitted(core, asked.chat, asked.num_kept, 1) if body.truncation == "auto" else asked.chat
    return count_tokens(core, chat)


class _Asked(NamedTuple):
    """What makes the prompt of a body."""

    model: str
    items: Sequence[Item]
    conversation: Sequence[Mapping[str, Any]]
    tools: Sequence[FunctionTool]
    chat: ChatRequest  # that the system's message and the conversation are
    num_kept: int  # messages at its beginning that are never cut off


def _asked(
    core: EngineCore,
    body: InputBody,
    previous: StoredResponse | None,
    find_item: Callable[[str], Item | None],
    route: str,
) -> _Asked:
    noted: Noted = {}
    model = check_model(core, body.model)
    items = input_items(body.input, find_item)
    conversation = [*(previous.messages if previous else ()), *messages_of(items, noted)]
    if not conversation:
        raise InvalidRequest("input is required.", param="input")
    tools = tools_of(body.tools, noted)
    tell_noted(noted, core, route)
    choice, offered = chat_tool_choice(body.tool_choice, tools)
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    chat = ChatRequest(
        messages=[*system, *conversation],
        tools=chat_tools(offered) or None,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        grammar=_grammar(body),
        template_kwargs=_template_kwargs(body),
    )
    return _Asked(model, items, conversation, tools, chat, len(system))


def _grammar(body: InputBody) -> Grammar | None:
    wanted = body.text.format if body.text is not None else None
    return None if wanted is None else grammar_of(wanted.response_format())


def _template_kwargs(body: InputBody) -> dict[str, Any]:
    effort = body.reasoning.effort if body.reasoning is not None else None
    return {} if effort is None else effort_switch(effort)


def fitted(core: EngineCore, chat: ChatRequest, num_kept: int, num_output: int) -> ChatRequest:
    """The chat without as many of its oldest turns as it takes to fit, with `num_output` tokens, into the context.

    The first `num_kept` messages and the last turn stay. A turn begins with what the user says.
    """
    messages = chat.messages
    starts = [i for i, m in enumerate(messages) if i >= num_kept and m["role"] == "user"] or [num_kept]
    limit = core.plan.model.context_length - num_output

    def cut(start: int) -> ChatRequest:
        return replace(chat, messages=[*messages[:num_kept], *messages[start:]])

    def fits(start: int) -> bool:
        return _fits(core, cut(start), limit)

    if fits(num_kept):
        return chat
    return cut(starts[min(bisect_left(starts, True, key=fits), len(starts) - 1)])


def _fits(core: EngineCore, chat: ChatRequest, max_tokens: int) -> bool:
    """Whether its prompt has no more tokens; what is far too long is neither joined nor encoded."""
    if core.tokenizer is None:
        return True
    bound = core.tokenizer.text_limit
    check = None if bound is None else partial(bound.check, context_length=max_tokens)
    try:
        text = render(core, chat, check=check)
        core.tokenizer.encode_batch([text], add_special_tokens=False, max_tokens=max_tokens)
    except ContextOverflow:
        return False
    return True


def _head(
    body: ResponsesBody, model: str, prepared: PreparedChat, tools: Sequence[FunctionTool]
) -> dict[str, Any]:
    sampling = prepared.request.sampling
    reasoning = body.reasoning
    return {
        "id": prepared.request.label,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "background": body.background,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": model,
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store,
        "temperature": sampling.temperature,
        "text": {"format": _told_format(body)},
        "tool_choice": body.tool_choice or "auto",
        "tools": [_told_tool(tool) for tool in tools],
        "top_logprobs": body.top_logprobs,
        "top_p": sampling.top_p,
        "truncation": body.truncation,
        "user": body.user,
    }


def _told_format(body: ResponsesBody) -> dict[str, Any]:
    wanted = body.text.format if body.text is not None else None
    if wanted is None or wanted.type != "json_schema":
        return {"type": wanted.type if wanted else "text"}
    return {
        "type": "json_schema",
        "name": wanted.name or "response",
        "schema": wanted.schema,
        "strict": bool(wanted.strict),
        "description": wanted.description,
    }


def _told_tool(tool: FunctionTool) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": bool(tool.strict),
    }
