"""Convert a body of /v1/responses to a prepared chat and the fields of the response that do not change."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from runtime.errors import ContextOverflow, InvalidRequest
from runtime.grammar_spec import Grammar
from runtime.request import LogprobParams
from serve.calls.body import report_noted, report_unknown
from serve.calls.chat.prepare import CountedPrompt, PreparedChat, counted_prompt, prepare, render
from serve.calls.chat.request import ChatRequest, effort_switch
from serve.calls.decode import Noted
from serve.calls.media import media_of
from serve.calls.prompts import namespaces_of, service_of
from serve.calls.response_format import grammar_of
from serve.calls.served_model import ServedModel, choose_model
from serve.openai.responses.items import (
    Item,
    Tool,
    chat_tool_choice,
    chat_tools,
    input_items,
    is_search,
    messages_of,
    namespaced_names,
    tools_of,
)
from serve.openai.responses.schema import CustomTool, InputBody, NamespaceTool, ResponsesBody
from serve.openai.responses.store import StoredResponse

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore


@dataclass(frozen=True, slots=True)
class ResponseCall:
    """A call whose body is decoded and checked."""

    body: ResponsesBody
    prepared: PreparedChat
    head: Mapping[str, Any]  # fields of the response that do not change
    input_items: Sequence[Item]
    conversation: Sequence[Mapping[str, Any]]  # messages before the answer, without instructions
    num_bytes: int  # estimated memory of the call in bytes, which counts towards the store's limit
    custom_tools: frozenset[str] = frozenset()  # names of the tools whose input is free text
    # Name by which the model calls a function of a namespace -> (namespace, name of the function).
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def call_of(
    core: EngineCore,
    body: ResponsesBody,
    previous: StoredResponse | None,
    find_item: Callable[[str], Item | None],
) -> ResponseCall:
    """Return the checked call of a body. `find_item` returns a stored item by its id.

    Raises `InvalidRequest`, whose `param` is the invalid field.
    """
    parts = _read_prompt(core, body, previous, find_item, "/v1/responses")
    chat = replace(
        parts.chat,
        sampling=body.sampling,
        logprobs=LogprobParams(top=body.top_logprobs, text=True) if body.wants_logprobs else None,
        namespace=namespaces_of(body.cache_salt, body.extra_key, 1)[0],
        priority=body.priority,
        service=service_of(body.timeout_s, body.service_tier, body.prompt_cache_key),
        label=f"resp_{uuid4().hex}",
    )
    if body.truncation == "auto":
        chat = fitted(core, chat, parts.num_kept, body.max_output_tokens or 1)
    prepared = prepare(core, chat, parts.model.adapter)
    head = _head(core, body, parts.model.name, prepared, parts.tools)
    # The input is stored three times: as items, as messages, and in the answer.
    num_bytes = 3 * body.num_bytes + (previous.num_bytes if previous else 0)
    names = namespaced_names(parts.tools)
    custom_tools = frozenset(tool.name for tool in parts.tools if isinstance(tool, CustomTool))
    return ResponseCall(body, prepared, head, parts.items, parts.conversation, num_bytes, custom_tools, names)


def input_prompt(
    core: EngineCore,
    body: InputBody,
    previous: StoredResponse | None,
    find_item: Callable[[str], Item | None],
) -> CountedPrompt:
    """Return the prompt of a body, so that its tokens can be counted.

    Raises `InvalidRequest` for invalid fields like `call_of`, and for prompts that are many times longer than the
    context.
    """
    parts = _read_prompt(core, body, previous, find_item, "/v1/responses/input_tokens")
    chat = fitted(core, parts.chat, parts.num_kept, 1) if body.truncation == "auto" else parts.chat
    return counted_prompt(core, chat)


class _PromptParts(NamedTuple):
    """The chat of a body, and the model, items and tools from which the chat was made."""

    model: ServedModel
    items: Sequence[Item]
    conversation: Sequence[Mapping[str, Any]]
    tools: Sequence[Tool]
    chat: ChatRequest  # the system message and the conversation
    num_kept: int  # number of leading messages that are never removed


def _read_prompt(
    core: EngineCore,
    body: InputBody,
    previous: StoredResponse | None,
    find_item: Callable[[str], Item | None],
    route: str,
) -> _PromptParts:
    noted: Noted = {}
    model = choose_model(core, body.model)
    items = input_items(body.input, find_item)
    conversation = [*(previous.messages if previous else ()), *messages_of(items, noted)]
    if not conversation:
        raise InvalidRequest("input is required.", param="input")
    tools = tools_of(body.tools, noted)
    for index, tool in enumerate(body.tools):
        if is_search(tool):
            report_unknown(("tools", index, "web_search"), (), core, route, fate="which this server does not offer")
    report_noted(noted, core, route)
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
    return _PromptParts(model, items, conversation, tools, chat, len(system))


def _grammar(body: InputBody) -> Grammar | None:
    response_format = body.text.format if body.text is not None else None
    return None if response_format is None else grammar_of(response_format.response_format())


def _template_kwargs(body: InputBody) -> dict[str, Any]:
    effort = body.reasoning.effort if body.reasoning is not None else None
    return {} if effort is None else effort_switch(effort)


def fitted(core: EngineCore, chat: ChatRequest, num_kept: int, num_output: int) -> ChatRequest:
    """Return the chat without its oldest turns, so that the prompt and `num_output` tokens fit into the context.

    A turn begins with a user message. The first `num_kept` messages and the last turn are never removed, even if they
    do not fit. Raises `InvalidRequest` if the chat has images.
    """
    messages = chat.messages
    if media_of(messages):
        raise InvalidRequest("truncation must be disabled for an input with images.", param="truncation")
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
    """Whether the prompt has at most `max_tokens` tokens.

    A prompt that is much too long is recognized before its text is joined or encoded.
    """
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
    core: EngineCore, body: ResponsesBody, model: str, prepared: PreparedChat, tools: Sequence[Tool]
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
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": reasoning.asked_summary if reasoning else None,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": body.service_tier if body.service_tier in core.plan.scheduler.tiers else "default",
        "store": body.store,
        "temperature": sampling.temperature,
        "text": {"format": _format_object(body)},
        "tool_choice": body.tool_choice or "auto",
        "tools": [_tool_object(tool) for tool in tools],
        "top_logprobs": body.top_logprobs,
        "top_p": sampling.top_p,
        "truncation": body.truncation,
        "user": body.user,
    }


def _format_object(body: ResponsesBody) -> dict[str, Any]:
    response_format = body.text.format if body.text is not None else None
    if response_format is None or response_format.type != "json_schema":
        return {"type": response_format.type if response_format else "text"}
    return {
        "type": "json_schema",
        "name": response_format.name or "response",
        "schema": response_format.schema,
        "strict": bool(response_format.strict),
        "description": response_format.description,
    }


def _tool_object(tool: Tool) -> dict[str, Any]:
    if isinstance(tool, NamespaceTool):
        inner = [_tool_object(each) for each in tool.tools]
        return {"type": "namespace", "name": tool.name, "description": tool.description or "", "tools": inner}
    if isinstance(tool, CustomTool):
        given = {"type": "text"} if tool.format is None else {k: v for k, v in asdict(tool.format).items() if v}
        return {"type": "custom", "name": tool.name, "description": tool.description, "format": given}
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": bool(tool.strict),
    }
