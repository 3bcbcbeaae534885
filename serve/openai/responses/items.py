"""Convert input items to chat messages, and tools to functions.

Fields that clients copy from answers are accepted without effect: `status`, `phase`, ids of items, `annotations` and
`logprobs` of text, and `caller` of calls, which is always the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal
from uuid import uuid4

import orjson

from runtime.errors import InvalidRequest
from serve.calls.decode import NotBuilt, Noted, decode
from serve.calls.media import media_part
from serve.openai.responses.schema import CustomTool, FunctionTool, NamespaceTool

Message = dict[str, Any]
Item = Mapping[str, Any]
Tool = FunctionTool | CustomTool | NamespaceTool

_ITEM = frozenset({"type", "id", "status"})  # common fields of all items


@dataclass(slots=True, kw_only=True)
class _TextPart:
    without_effect: ClassVar[frozenset[str]] = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


@dataclass(slots=True, kw_only=True)
class _RefusalPart:
    type: Literal["refusal"]
    refusal: str


@dataclass(slots=True, kw_only=True)
class _ImagePart:
    without_effect: ClassVar[frozenset[str]] = frozenset({"detail"})  # the model's processor decides the resolution

    type: Literal["input_image"]
    image_url: str | None = None
    file_id: NotBuilt = None


_Parts = list[_TextPart | _RefusalPart]
_InputParts = list[_TextPart | _RefusalPart | _ImagePart]


@dataclass(slots=True, kw_only=True)
class _MessageItem:
    without_effect: ClassVar[frozenset[str]] = _ITEM | {"phase"}

    role: Literal["user", "assistant", "system", "developer"]
    content: str | _InputParts


@dataclass(slots=True, kw_only=True)
class _CallItem:
    without_effect: ClassVar[frozenset[str]] = _ITEM | {"caller"}

    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


@dataclass(slots=True, kw_only=True)
class _CustomCallItem:
    without_effect: ClassVar[frozenset[str]] = _ITEM | {"caller"}

    call_id: str
    name: str
    input: str


@dataclass(slots=True, kw_only=True)
class _OutputItem:
    without_effect: ClassVar[frozenset[str]] = _ITEM | {"caller", "name"}  # clients copy these fields from the call

    call_id: str
    output: str | _Parts


@dataclass(slots=True, kw_only=True)
class _ReasoningItem:
    without_effect: ClassVar[frozenset[str]] = _ITEM

    summary: _Parts | None = None
    content: _Parts | None = None


@dataclass(slots=True, kw_only=True)
class _Reference:
    id: str


def input_items(value: str | Sequence[Item], find: Callable[[str], Item | None]) -> list[Item]:
    """Return the input items, each with an id. `find` returns the item to which an item_reference refers."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    items: list[Item] = []
    for index, item in enumerate(value):
        kind = item.get("type")
        if kind == "item_reference" or (kind is None and "role" not in item and "id" in item):
            name = decode(_Reference, item, f"input.{index}").id
            referenced = find(name)
            if referenced is None:
                raise InvalidRequest(f"Item '{name[:200]}' not found.", param=f"input.{index}.id")
            items.append(referenced)
        else:
            items.append(_complete(item))
    return items


def _complete(item: Item) -> Item:
    """Return the item as the API lists it: with a type, an id, and its text as a content part."""
    completed = {"type": "message", **item, "id": item.get("id") or f"item_{uuid4().hex}"}
    if completed["type"] == "message" and isinstance(completed.get("content"), str):
        text = {"text": completed["content"]}
        if completed.get("role") == "assistant":
            completed["content"] = [{"type": "output_text", "annotations": [], **text}]
        else:
            completed["content"] = [{"type": "input_text", **text}]
    return completed


def messages_of(items: Sequence[Item], noted: Noted | None = None) -> list[Message]:
    """Convert items to chat messages. Adjacent reasoning, text and calls of the assistant become one message.

    If `noted` is set, unknown keys of items are added to it (see `decode`). Raises `InvalidRequest`, whose `param` is
    the path of the invalid item.
    """
    messages: list[Message] = []
    for index, item in enumerate(items):
        path = f"input.{index}"
        match item.get("type"):
            case "message":
                _add_message(messages, decode(_MessageItem, item, path, noted=noted), path)
            case "function_call":
                call = decode(_CallItem, item, path, noted=noted)
                name = chat_name(call.namespace, call.name)
                function = {"name": name, "arguments": call.arguments or "{}"}
                tool_call = {"id": call.call_id, "type": "function", "function": function}
                _assistant(messages).setdefault("tool_calls", []).append(tool_call)
            case "custom_tool_call":
                custom = decode(_CustomCallItem, item, path, noted=noted)
                function = {"name": custom.name, "arguments": orjson.dumps({"input": custom.input}).decode()}
                tool_call = {"id": custom.call_id, "type": "function", "function": function}
                _assistant(messages).setdefault("tool_calls", []).append(tool_call)
            case "function_call_output" | "custom_tool_call_output":
                output = decode(_OutputItem, item, path, noted=noted)
                text = _text(output.output)
                messages.append({"role": "tool", "tool_call_id": output.call_id, "content": text})
            case "reasoning":
                reasoning = decode(_ReasoningItem, item, path, noted=noted)
                text = _text(reasoning.content or reasoning.summary or [])
                message = _assistant(messages, new=True)
                message["reasoning_content"] = message.get("reasoning_content", "") + text
            case other:
                shown = f'"{other[:40]}" ' if isinstance(other, str) else ""
                raise InvalidRequest(f"{path}.type {shown}is not supported here.", param=f"{path}.type")
    return messages


def _add_message(messages: list[Message], item: _MessageItem, path: str) -> None:
    text = _content(item.content, f"{path}.content")
    if item.role != "user" and not isinstance(text, str):
        raise InvalidRequest(f"{path}.content: only messages of the user may hold images.", param=f"{path}.content")
    if item.role == "assistant":
        message = _assistant(messages, new=bool(messages and messages[-1].get("content")))
        message["content"] = text
    else:
        messages.append({"role": "system" if item.role == "developer" else item.role, "content": text})


def _assistant(messages: list[Message], *, new: bool = False) -> Message:
    """Return the last message if it is the assistant's. Otherwise append a new assistant message, and return it.

    `new`: also append a new message if the assistant's last message has text or calls.
    """
    last = messages[-1] if messages else None
    has_content = last is not None and (last.get("content") or last.get("tool_calls"))
    if last is None or last["role"] != "assistant" or (new and has_content):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _content(content: str | _InputParts, path: str) -> str | list[dict[str, Any]]:
    """Return the content as text, or as a list of parts if it has images."""
    texts = [content] if isinstance(content, str) else [part for part in content if not isinstance(part, _ImagePart)]
    if isinstance(content, str) or len(texts) == len(content):
        return content if isinstance(content, str) else _text([p for p in content if not isinstance(p, _ImagePart)])
    parts = []
    for index, part in enumerate(content):
        if not isinstance(part, _ImagePart):
            parts.append({"type": "text", "text": part.refusal if isinstance(part, _RefusalPart) else part.text})
        elif part.image_url is None:
            raise InvalidRequest(f"{path}.{index}.image_url is required.", param=f"{path}.{index}.image_url")
        else:
            parts.append(media_part(part.image_url, f"{path}.{index}.image_url"))
    return parts


def _text(content: str | _Parts) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.refusal if isinstance(part, _RefusalPart) else part.text for part in content)


# --- tools ---


def tools_of(values: Sequence[Item], noted: Noted | None = None) -> list[Tool]:
    """Decode the tools, and add their unknown keys to `noted` (see `decode`). Web search is left out.

    Raises `InvalidRequest` for other tools that the server would have to run.
    """
    tools: list[Tool] = []
    for index, tool in enumerate(values):
        path = f"tools.{index}"
        match tool.get("type"):
            case "function":
                tools.append(decode(FunctionTool, tool, path, noted=noted))
            case "custom":
                custom = decode(CustomTool, tool, path, noted=noted)
                _check_format(custom, f"{path}.format")
                tools.append(custom)
            case "namespace":
                tools.append(decode(NamespaceTool, tool, path, noted=noted))
            case _ if is_search(tool):
                continue
            case _:
                why = "this server does not run tools"
                raise InvalidRequest(f"{path}.type must be function or custom: {why}.", param=f"{path}.type")
    return tools


def is_search(tool: Item) -> bool:
    """Whether the tool is OpenAI's web search, which Codex always sends. It is not offered to the model."""
    kind = tool.get("type")
    return isinstance(kind, str) and kind.startswith("web_search")


def chat_name(namespace: str | None, name: str) -> str:
    """Return the name by which the model calls a function of a namespace."""
    return name if namespace is None else f"{namespace}.{name}"


def namespaced_names(tools: Sequence[Tool]) -> dict[str, tuple[str, str]]:
    """Map the names by which the model calls functions of namespaces to (namespace, name)."""
    spaces = [tool for tool in tools if isinstance(tool, NamespaceTool)]
    return {chat_name(space.name, tool.name): (space.name, tool.name) for space in spaces for tool in space.tools}


def _check_format(tool: CustomTool, path: str) -> None:
    if tool.format is None or tool.format.type == "text":
        return
    if tool.format.syntax != "regex":
        raise InvalidRequest(
            f"{path}.syntax must be regex: a lark grammar cannot be enforced within a call. Send the format text.",
            param=f"{path}.syntax",
        )
    if not tool.format.definition:
        raise InvalidRequest(f"{path}.definition is required.", param=f"{path}.definition")


def chat_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the tools in the format of chat completions."""
    converted = []
    for tool in _functions(tools):
        fields = {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
            "strict": tool.strict,
        }
        function = {name: value for name, value in fields.items() if value is not None}
        converted.append({"type": "function", "function": function})
    return converted


def _functions(tools: Sequence[Tool]) -> Iterator[FunctionTool]:
    for tool in tools:
        match tool:
            case CustomTool():
                yield tool.as_function()
            case NamespaceTool():
                yield from (replace(each, name=chat_name(tool.name, each.name)) for each in tool.tools)
            case FunctionTool():
                yield tool


def chat_tool_choice(
    choice: str | Item | None, tools: Sequence[Tool]
) -> tuple[str | dict[str, Any] | None, Sequence[Tool]]:
    """Return the choice in the format of chat completions, and the tools that it allows."""
    if choice is None or isinstance(choice, str):
        return choice, tools
    match choice.get("type"):
        case "function" | "custom":
            return {"type": "function", "function": {"name": choice.get("name")}}, tools
        case "allowed_tools":
            return _allowed(choice, tools)
        case other:
            shown = f'"{other[:40]}" ' if isinstance(other, str) else ""
            raise InvalidRequest(f"tool_choice.type {shown}is not supported here.", param="tool_choice.type")


def _allowed(choice: Item, tools: Sequence[Tool]) -> tuple[str, Sequence[Tool]]:
    mode, listed = choice.get("mode", "auto"), choice.get("tools")
    if mode not in ("auto", "required"):
        raise InvalidRequest('tool_choice.mode must be "auto" or "required".', param="tool_choice.mode")
    if not isinstance(listed, list):
        raise InvalidRequest("tool_choice.tools must be a list.", param="tool_choice.tools")
    names = {tool.get("name") for tool in listed if isinstance(tool, dict)}
    offered = [tool for tool in tools if tool.name in names]
    if len(offered) != len(listed):
        raise InvalidRequest("tool_choice.tools must name offered tools.", param="tool_choice.tools")
    return mode, offered
