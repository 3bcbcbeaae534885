"""From a body of /v1/messages to a chat: turns of blocks become messages, and tools functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import orjson

from runtime.errors import InvalidRequest
from runtime.grammar_spec import Grammar
from serve.anthropic.schema import (
    CountBody,
    DocumentBlock,
    MessagesBody,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from serve.chat.request import ChatRequest, thinking_switch
from serve.decode import decode

Block = TypeVar("Block")
Message = dict[str, Any]


def chat_of(body: CountBody, *, label: str) -> ChatRequest:
    """Raises `InvalidRequest` naming what cannot be done."""
    messages = _system(body.system)
    for index, turn in enumerate(body.messages):
        messages += _turn(turn, f"messages.{index}")
    choice = body.tool_choice
    thinking = body.thinking
    kwargs: dict[str, Any] = thinking_switch(thinking is not None and thinking.type != "disabled")
    if body.output_config is not None and body.output_config.effort is not None:
        kwargs["reasoning_effort"] = body.output_config.effort
    return ChatRequest(
        messages=messages,
        sampling=_sampling(body) if isinstance(body, MessagesBody) else {},
        tools=[_tool(tool, f"tools.{index}") for index, tool in enumerate(body.tools)] or None,
        tool_choice=_tool_choice(body),
        parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
        grammar=_grammar(body),
        template_kwargs=kwargs,
        continue_final_message=messages[-1]["role"] == "assistant",
        max_thinking_tokens=_budget(body),
        cut_output=True,
        label=label,
    )


def _sampling(body: MessagesBody) -> dict[str, Any]:
    asked = {
        "max_new_tokens": body.max_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stop": body.stop_sequences,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _budget(body: CountBody) -> int | None:
    if body.thinking is None or body.thinking.type != "enabled":
        return None
    budget = body.thinking.budget_tokens
    if budget is None:
        raise InvalidRequest("thinking.budget_tokens is required.", param="thinking.budget_tokens")
    if isinstance(body, MessagesBody) and budget >= body.max_tokens:
        raise InvalidRequest(
            "thinking.budget_tokens must be less than max_tokens.", param="thinking.budget_tokens"
        )
    return budget


def _grammar(body: CountBody) -> Grammar | None:
    if body.output_config is None or body.output_config.format is None:
        return None
    return Grammar(
        "json_schema",
        orjson.dumps(body.output_config.format.schema).decode(),
        param="response_format.json_schema",
    )


# --- messages ---


def _system(system: str | list[dict[str, Any]] | None) -> list[Message]:
    if not system:
        return []
    text = system if isinstance(system, str) else _text(system, "system")
    return [{"role": "system", "content": text}]


def _turn(turn: Turn, path: str) -> list[Message]:
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    if turn.role == "assistant":
        return [_assistant(turn.content, f"{path}.content")]
    if turn.role == "system":
        return [{"role": "system", "content": _text(turn.content, f"{path}.content")}]
    return _user(turn.content, f"{path}.content")


def _assistant(blocks: Sequence[Mapping[str, Any]], path: str) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        where = f"{path}.{index}"
        match block.get("type"):
            case "text":
                texts.append(decode(TextBlock, block, where).text)
            case "thinking":
                thoughts.append(decode(ThinkingBlock, block, where).thinking)
            case "tool_use":
                used = decode(ToolUseBlock, block, where)
                function = {"name": used.name, "arguments": used.input}
                calls.append({"id": used.id, "type": "function", "function": function})
            case other:
                raise _unknown(other, where, "text, thinking and tool_use")
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _user(blocks: Sequence[Mapping[str, Any]], path: str) -> list[Message]:
    """A message for each tool result, and one for the text between them."""
    messages: list[Message] = []
    texts: list[str] = []
    for index, block in enumerate(blocks):
        where = f"{path}.{index}"
        match block.get("type"):
            case "text":
                texts.append(decode(TextBlock, block, where).text)
            case "document":
                texts.append(_document(decode(DocumentBlock, block, where), where))
            case "tool_result":
                if texts:
                    messages.append({"role": "user", "content": _joined(texts)})
                    texts = []
                messages.append(_tool_result(decode(ToolResultBlock, block, where), where))
            case other:
                raise _unknown(other, where, "text, document and tool_result")
    if texts or not messages:
        messages.append({"role": "user", "content": _joined(texts)})
    return messages


def _tool_result(result: ToolResultBlock, path: str) -> Message:
    content = result.content or ""
    text = content if isinstance(content, str) else _text(content, f"{path}.content")
    if result.is_error:  # templates know no failed calls
        text = orjson.dumps({"error": text}).decode()
    return {"role": "tool", "tool_call_id": result.tool_use_id, "content": text}


def _text(blocks: Sequence[Mapping[str, Any]], path: str) -> str:
    texts = []
    for index, block in enumerate(blocks):
        if block.get("type") != "text":
            raise _unknown(block.get("type"), f"{path}.{index}", "text")
        texts.append(decode(TextBlock, block, f"{path}.{index}").text)
    return _joined(texts)


def _document(document: DocumentBlock, path: str) -> str:
    """A document's title, what is said of it, and its text."""
    if document.citations is not None and document.citations.enabled:
        raise InvalidRequest(
            f"{path}.citations is not supported yet; leave it out.", param=f"{path}.citations"
        )
    return _joined([part for part in (document.title, document.context, document.source.data) if part])


def _joined(texts: Sequence[str]) -> str:
    return "\n\n".join(texts)


def _unknown(kind: object, path: str, known: str) -> InvalidRequest:
    shown = f'"{kind[:40]}" ' if isinstance(kind, str) else ""
    return InvalidRequest(f"{path}.type {shown}is not supported here; {known} are.", param=f"{path}.type")


# --- tools ---


def _tool(raw: Mapping[str, Any], path: str) -> dict[str, Any]:
    if raw.get("type") not in (None, "custom"):
        raise InvalidRequest(
            f"{path}.type must be custom: this server runs no tools of its own.", param=f"{path}.type"
        )
    tool = decode(Tool, raw, path)
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def _tool_choice(body: CountBody) -> str | dict[str, Any] | None:
    choice = body.tool_choice
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidRequest("tool_choice.name is required.", param="tool_choice.name")
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type
