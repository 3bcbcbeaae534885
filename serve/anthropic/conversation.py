"""Convert a body of /v1/messages to a chat: content blocks become messages, and tools become functions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import orjson

from runtime.errors import InvalidRequest
from runtime.grammar_spec import Grammar
from runtime.media_source import MediaSource, source_of
from runtime.request import USUAL, Service
from serve.anthropic.schema import (
    Block,
    CountBody,
    DocumentBlock,
    ImageBlock,
    MessagesBody,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
    UrlImage,
)
from serve.calls.chat.request import ChatRequest, thinking_switch
from serve.calls.prompts import pin_of

Message = dict[str, Any]


def chat_of(body: CountBody, *, label: str) -> ChatRequest:
    """Convert a body to a `ChatRequest`. Raises `InvalidRequest`, whose `param` is the invalid field."""
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
        service=_service(body),
        label=label,
    )


def _service(body: CountBody) -> Service:
    """Return the `Service` of a body. It pins the prompt in the cache if any part of the body has `cache_control`.

    All turns of a conversation have the same pin name, so that the pin of a longer prompt replaces the earlier pin.
    """
    marked: list[Any] = [body, *body.tools, *(body.system if isinstance(body.system, list) else ())]
    for turn in body.messages:
        if isinstance(turn.content, list):
            marked += turn.content
    if all(getattr(each, "cache_control", None) is None for each in marked):
        return USUAL
    return Service(pin=pin_of(body.system, body.messages[0].content))


def _sampling(body: MessagesBody) -> dict[str, Any]:
    values = {
        "max_new_tokens": body.max_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stop": body.stop_sequences,
    }
    return {name: value for name, value in values.items() if value is not None}


def _budget(body: CountBody) -> int | None:
    if body.thinking is None or body.thinking.type != "enabled":
        return None
    budget = body.thinking.budget_tokens
    if budget is None:
        raise InvalidRequest("thinking.budget_tokens is required.", param="thinking.budget_tokens")
    if isinstance(body, MessagesBody) and budget >= body.max_tokens:
        raise InvalidRequest("thinking.budget_tokens must be less than max_tokens.", param="thinking.budget_tokens")
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


def _system(system: str | list[TextBlock] | None) -> list[Message]:
    if not system:
        return []
    text = system if isinstance(system, str) else _joined([block.text for block in system])
    return [{"role": "system", "content": text}]


def _turn(turn: Turn, path: str) -> list[Message]:
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    if turn.role == "assistant":
        return [_assistant(turn.content, f"{path}.content")]
    if turn.role == "system":
        return [{"role": "system", "content": _text(turn.content, f"{path}.content")}]
    return _user(turn.content, f"{path}.content")


def _assistant(blocks: Sequence[Block], path: str) -> Message:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                reasoning.append(block.thinking)
            case ToolUseBlock():
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
            case other:
                raise _misplaced(other, f"{path}.{index}", "text, thinking and tool_use")
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _user(blocks: Sequence[Block], path: str) -> list[Message]:
    """Return the messages of a user turn.

    Each tool result is one message. The other blocks before, between and after the results are joined to messages.
    """
    messages: list[Message] = []
    parts: list[str | MediaSource] = []
    for index, block in enumerate(blocks):
        match block:
            case TextBlock():
                parts.append(block.text)
            case ImageBlock():
                parts.append(_image(block, f"{path}.{index}"))
            case DocumentBlock():
                parts.append(_document(block, f"{path}.{index}"))
            case ToolResultBlock():
                if parts:
                    messages.append({"role": "user", "content": _content(parts)})
                    parts = []
                messages.append(_tool_result(block, f"{path}.{index}"))
            case other:
                raise _misplaced(other, f"{path}.{index}", "text, image, document and tool_result")
    if parts or not messages:
        messages.append({"role": "user", "content": _content(parts)})
    return messages


def _image(block: ImageBlock, path: str) -> MediaSource:
    if isinstance(block.source, UrlImage):
        return source_of(block.source.url, f"{path}.source.url")
    return MediaSource("base64", block.source.data, f"{path}.source.data")


def _content(parts: Sequence[str | MediaSource]) -> str | list[dict[str, Any]]:
    """Return the joined texts, or, if there are images, a list of parts in which adjacent texts are joined."""
    content: list[dict[str, Any]] = []
    for is_text, group in groupby(parts, lambda part: isinstance(part, str)):
        if is_text:
            content.append({"type": "text", "text": _joined([str(part) for part in group])})
        else:
            content += [{"type": "image", "source": part} for part in group]
    return content if any(part["type"] == "image" for part in content) else "".join(part["text"] for part in content)


def _tool_result(result: ToolResultBlock, path: str) -> Message:
    content = result.content or ""
    blocks = [TextBlock(type="text", text=content)] if isinstance(content, str) else content
    parts = [
        block.text if isinstance(block, TextBlock) else _image(block, f"{path}.content.{index}")
        for index, block in enumerate(blocks)
    ]
    text = _content(parts)
    if isinstance(text, list) and not result.is_error:
        return {"role": "tool", "tool_call_id": result.tool_use_id, "content": text}
    text = _joined([part for part in parts if isinstance(part, str)])
    if result.is_error:  # chat templates have no format for failed calls
        text = orjson.dumps({"error": text}).decode()
    return {"role": "tool", "tool_call_id": result.tool_use_id, "content": text}


def _text(blocks: Sequence[Block], path: str) -> str:
    texts = []
    for index, block in enumerate(blocks):
        if not isinstance(block, TextBlock):
            raise _misplaced(block, f"{path}.{index}", "text")
        texts.append(block.text)
    return _joined(texts)


def _document(document: DocumentBlock, path: str) -> str:
    """Return a document's title, context and text as one text."""
    if document.citations is not None and document.citations.enabled:
        raise InvalidRequest(f"{path}.citations is not supported yet; leave it out.", param=f"{path}.citations")
    return _joined([part for part in (document.title, document.context, document.source.data) if part])


def _joined(texts: Sequence[str]) -> str:
    return "\n\n".join(texts)


def _misplaced(block: Block, path: str, known: str) -> InvalidRequest:
    return InvalidRequest(f'{path}.type "{block.type}" is not supported here; {known} are.', param=f"{path}.type")


# --- tools ---


def _tool(tool: Tool, path: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise InvalidRequest(f"{path}.type must be custom: this server does not run tools.", param=f"{path}.type")
    if tool.input_schema is None:
        raise InvalidRequest(f"{path}.input_schema is required.", param=f"{path}.input_schema")
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
