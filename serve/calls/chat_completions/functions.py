"""Convert `functions` and `function_call`, OpenAI's older form of tools, to tools and tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runtime.errors import InvalidRequest
from serve.calls.chat_completions.schema import ChatBody

MODES = ("none", "auto")


def is_legacy(body: ChatBody) -> bool:
    """Return whether the body uses `functions` or `function_call`. The answer then has `function_call` too.

    Raises `InvalidRequest` if the body also offers tools.
    """
    if body.functions is None and body.function_call is None:
        return False
    if body.tools is not None or body.tool_choice is not None:
        param = "functions" if body.functions is not None else "function_call"
        raise InvalidRequest(f"{param} and tools exclude each other; use tools and tool_choice.", param=param)
    return True


def legacy_tools(body: ChatBody) -> list[dict[str, Any]]:
    """Return the functions as tools."""
    return [{"type": "function", "function": function} for function in body.functions or ()]


def legacy_choice(body: ChatBody) -> str | dict[str, Any] | None:
    """Return `function_call` as a `tool_choice`. Raises `InvalidRequest`, whose `param` is the invalid field."""
    choice = body.function_call
    if choice is None or choice in MODES:
        return choice if body.functions else None
    name = choice.get("name") if isinstance(choice, Mapping) else None
    if not isinstance(name, str):
        raise InvalidRequest('function_call must be "none", "auto" or {"name": ...}.', param="function_call")
    if name not in {function.get("name") for function in body.functions or ()}:
        raise InvalidRequest(f"function_call: there is no function called {name[:64]!r}.", param="function_call")
    return {"type": "function", "function": {"name": name}}


def with_tool_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with tool calls and the role "tool" in place of `function_call` and the role "function".

    A result belongs to the last call before it.
    """
    converted, call_id = [], None
    for index, message in enumerate(messages):
        called = message.get("function_call")
        if called is not None:
            call_id = f"call_{index}"
            call = {"id": call_id, "type": "function", "function": called}
            message = {**message, "tool_calls": [*(message["tool_calls"] or ()), call]}
        elif message["role"] == "function" and call_id is not None:
            message = {**message, "role": "tool", "tool_call_id": message["tool_call_id"] or call_id}
        converted.append({name: value for name, value in message.items() if name != "function_call"})
    return converted
