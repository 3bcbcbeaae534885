"""Read `tool_choice`: which tools the model may call, and whether it must call one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.errors import InvalidRequest
from serve.calls.chat.tools.offered import OfferedTools, Tool

MODES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The tools that may be called (none if empty), and whether the model must call one of them."""

    tools: tuple[Tool, ...] = ()
    must_call: bool = False

    @property
    def calls(self) -> bool:
        return bool(self.tools)


def read_choice(choice: str | Mapping[str, Any] | None, offered: OfferedTools) -> ToolChoice:
    """Convert the value of `tool_choice`. Raises `InvalidRequest`, whose `param` is the path of the invalid part."""
    every = tuple(offered.by_name.values())
    if choice is None:
        return ToolChoice(every)
    if isinstance(choice, str):
        if choice not in MODES:
            raise InvalidRequest(
                f'tool_choice must be "none", "auto", "required" or an object, not {choice[:40]!r}.',
                param="tool_choice",
            )
        if choice == "required" and not every:
            raise InvalidRequest('tool_choice "required" requires tools.', param="tool_choice")
        return ToolChoice(() if choice == "none" else every, must_call=choice == "required")
    if choice.get("type", "function") == "allowed_tools":
        return _allowed(choice, offered)
    if choice.get("type", "function") != "function":
        raise InvalidRequest('tool_choice.type must be "function" or "allowed_tools".', param="tool_choice.type")
    return ToolChoice((_named(choice, offered, "tool_choice"),), must_call=True)


def _named(choice: Any, offered: OfferedTools, path: str) -> Tool:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    path = f"{path}.function.name"
    if not isinstance(name, str):
        raise InvalidRequest(f"{path} must be the name of a tool.", param=path)
    if name not in offered:
        raise InvalidRequest(f"{path}: there is no tool called {name[:64]!r}.", param=path)
    return offered.by_name[name]


def _allowed(choice: Mapping[str, Any], offered: OfferedTools) -> ToolChoice:
    """Read {"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}."""
    allowed = choice.get("allowed_tools")
    path = "tool_choice.allowed_tools"
    if not isinstance(allowed, Mapping):
        raise InvalidRequest(f"{path} must be an object.", param=path)
    mode, tools = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required"):
        raise InvalidRequest(f'{path}.mode must be "auto" or "required".', param=f"{path}.mode")
    if not isinstance(tools, list) or not tools:
        raise InvalidRequest(f"{path}.tools must be a list of tools.", param=f"{path}.tools")
    named = [_named(tool, offered, f"{path}.tools.{index}") for index, tool in enumerate(tools)]
    return ToolChoice(tuple({tool.name: tool for tool in named}.values()), must_call=mode == "required")
