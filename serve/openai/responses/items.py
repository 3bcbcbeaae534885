"""Input items as messages of a chat, and tools as functions.

Accepted without effect, since it comes back from answers and says nothing new: `status`, `phase`, ids of items,
`annotations` and `logprobs` of text, `caller` of calls (the model alone).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal
from uuid import uuid4

from runtime.errors import InvalidRequest
from serve.decode import Noted, decode
from serve.openai.responses.schema import FunctionTool

Message = dict[str, Any]
Item = Mapping[str, Any]

_ITEM = frozenset({"type", "id", "status"})  # what all items have


@dataclass(slots=True, kw_only=True)
class _TextPart:
    without_effect: ClassVar[frozenset[str]] = frozenset(
        {"annotations", "logprobs", "prompt_cache_breakpoint"}
    )

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


@dataclass(slots=True, kw_only=True)
class _RefusalPart:
    type: Literal["refusal"]
    refusal: str


_Parts = list[_TextPart | _RefusalPart]


@dataclass(slots=True, kw_only=True)
class _MessageItem:
    without_effect: ClassVar[frozenset[str]] = _ITEM | {"phase"}

    role: Literal["user", "assistant", "system", "developer"]
    content: str | _Parts


@dataclass(slots=True, kw_only=True)
class _CallItem:
    without_effect: ClassVar[frozenset[str]] = _ITEM | {"caller"}

    call_id: str
    name: str
    arguments: str


@dataclass(slots=True, kw_only=True)
class _OutputItem:
    without_effect: ClassVar[frozenset[str]] = _ITEM | {"caller", "name"}  # of the call, which has them too

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


def input_items(given: str | Sequence[Item], find: Callable[[str], Item | None]) -> list[Item]:
    """The items, with an id each; `find` looks up what an item_reference names."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    items: list[Item] = []
    for index, item in enumerate(given):
        kind = item.get("type")
        if kind == "item_reference" or (kind is None and "role" not in item and "id" in item):
            name = decode(_Reference, item, f"input.{index}").id
            found = find(name)
            if found is None:
                raise InvalidRequest(f"Item '{name[:200]}' not found.", param=f"input.{index}.id")
            items.append(found)
        else:
            items.append(_complete(item))
    return items


def _complete(item: Item) -> Item:
    """With its type, an id, and text as a part of content, as clients get it back."""
    made = {"type": "message", **item, "id": item.get("id") or f"item_{uuid4().hex}"}
    if made["type"] == "message" and isinstance(made.get("content"), str):
        text = {"text": made["content"]}
        if made.get("role") == "assistant":
            made["content"] = [{"type": "output_text", "annotations": [], **text}]
        else:
            made["content"] = [{"type": "input_text", **text}]
    return made


def messages_of(items: Sequence[Item], noted: Noted | None = None) -> list[Message]:
    """Reasoning, text and calls of the assistant that stand together become one message.

    Keys of items that nothing here knows are added to `noted` (see `serve.decode.decode`). Raises `InvalidRequest`
    naming the item that is wrong.
    """
    messages: list[Message] = []
    for index, item in enumerate(items):
        path = f"input.{index}"
        match item.get("type"):
            case "message":
                _add_message(messages, decode(_MessageItem, item, path, noted=noted))
            case "function_call":
                call = decode(_CallItem, item, path, noted=noted)
                function = {"name": call.name, "arguments": call.arguments or "{}"}
                made = {"id": call.call_id, "type": "function", "function": function}
                _assistant(messages).setdefault("tool_calls", []).append(made)
            case "function_call_output":
                output = decode(_OutputItem, item, path, noted=noted)
                text = _text(output.output)
                messages.append({"role": "tool", "tool_call_id": output.call_id, "content": text})
            case "reasoning":
                thought = decode(_ReasoningItem, item, path, noted=noted)
                text = _text(thought.content or thought.summary or [])
                message = _assistant(messages, new=True)
                message["reasoning_content"] = message.get("reasoning_content", "") + text
            case other:
                shown = f'"{other[:40]}" ' if isinstance(other, str) else ""
                raise InvalidRequest(f"{path}.type {shown}is not supported here.", param=f"{path}.type")
    return messages


def _add_message(messages: list[Message], item: _MessageItem) -> None:
    text = _text(item.content)
    if item.role == "assistant":
        message = _assistant(messages, new=bool(messages and messages[-1].get("content")))
        message["content"] = text
    else:
        messages.append({"role": "system" if item.role == "developer" else item.role, "content": text})


def _assistant(messages: list[Message], *, new: bool = False) -> Message:
    """The assistant's message that is being put together; a `new` one begins behind text or calls."""
    last = messages[-1] if messages else None
    taken = last is not None and (last.get("content") or last.get("tool_calls"))
    if last is None or last["role"] != "assistant" or (new and taken):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(content: str | _Parts) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.refusal if isinstance(part, _RefusalPart) else part.text for part in content)


# --- tools ---


def tools_of(given: Sequence[Item], noted: Noted | None = None) -> list[FunctionTool]:
    """Raises `InvalidRequest` for tools that would have to run here. `noted` as in `messages_of`."""
    tools = []
    for index, tool in enumerate(given):
        path = f"tools.{index}"
        if tool.get("type") != "function":
            raise InvalidRequest(
                f"{path}.type must be function: this server runs no tools of its own.", param=f"{path}.type"
            )
        tools.append(decode(FunctionTool, tool, path, noted=noted))
    return tools


def chat_tools(tools: Sequence[FunctionTool]) -> list[dict[str, Any]]:
    """As chat completions offer them."""
    made = []
    for tool in tools:
        fields = {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
            "strict": tool.strict,
        }
        function = {name: value for name, value in fields.items() if value is not None}
        made.append({"type": "function", "function": function})
    return made


def chat_tool_choice(
    choice: str | Item | None, tools: Sequence[FunctionTool]
) -> tuple[str | dict[str, Any] | None, Sequence[FunctionTool]]:
    """The choice as chat completions say it, and the tools that are offered under it."""
    if choice is None or isinstance(choice, str):
        return choice, tools
    match choice.get("type"):
        case "function":
            return {"type": "function", "function": {"name": choice.get("name")}}, tools
        case "allowed_tools":
            return _allowed(choice, tools)
        case other:
            shown = f'"{other[:40]}" ' if isinstance(other, str) else ""
            raise InvalidRequest(f"tool_choice.type {shown}is not supported here.", param="tool_choice.type")


def _allowed(choice: Item, tools: Sequence[FunctionTool]) -> tuple[str, Sequence[FunctionTool]]:
    mode, listed = choice.get("mode", "auto"), choice.get("tools")
    if mode not in ("auto", "required"):
        raise InvalidRequest('tool_choice.mode must be "auto" or "required".', param="tool_choice.mode")
    if not isinstance(listed, list):
        raise InvalidRequest("tool_choice.tools must be a list.", param="tool_choice.tools")
    names = {tool.get("name") for tool in listed if isinstance(tool, dict)}
    offered = [tool for tool in tools if tool.name in names]
    if len(offered) != len(listed):
        raise InvalidRequest("tool_choice.tools must name offered functions.", param="tool_choice.tools")
    return mode, offered
