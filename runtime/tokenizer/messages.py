"""Detect which form of message content a chat template reads, and convert messages to this form."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jinja2 import nodes

from runtime.errors import InvalidRequest
from runtime.media_source import KINDS

Accepts = Literal["string", "parts", "both"]

_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_REASONING = ("reasoning_content", "thinking", "reasoning")


def accepted_content(tree: nodes.Template) -> Accepts:
    """Return the form of content that a template reads.

    A template that does not loop over a message's content reads strings. A template that loops over it reads parts or,
    if the template also tests for strings, both forms.
    """
    names = _content_names(tree)
    if not any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For)):
        return "string"
    tests = {test.name for test in tree.find_all(nodes.Test)}
    return "both" if tests & {"string", "iterable", "sequence", "mapping"} else "parts"


def asks_for_none(tree: nodes.Template) -> bool:
    """Whether the template recognises tool calls by the test `content is none`, as DeepSeek's first templates do.

    The tests `is not none` and `is none or ...` do not count, because such templates also accept other content.
    """
    names = _content_names(tree)
    others = {id(test) for node in tree.find_all((nodes.Not, nodes.Or)) for test in node.find_all(nodes.Test)}
    return any(
        test.name == "none" and id(test) not in others and _is_content(test.node, names)
        for test in tree.find_all(nodes.Test)
    )


def _content_names(tree: nodes.Template) -> frozenset[str]:
    """Return the names of variables and macro parameters to which the template passes a message's content."""
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    names: frozenset[str] = frozenset()
    while True:
        found = set(names)
        for assign in tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and _is_content(assign.node, names):
                found.add(assign.target.name)
        for call in tree.find_all(nodes.Call):
            macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
            if macro is not None:
                found |= {
                    parameter.name for parameter, value in zip(macro.args, call.args) if _is_content(value, names)
                }
        if found == names:
            return names
        names = frozenset(found)


def _is_content(node: nodes.Node | None, names: frozenset[str]) -> bool:
    while isinstance(node, nodes.Filter):  # message.content | selectattr(...)
        node = node.node
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in names


def prepare_messages(
    messages: Sequence[Mapping[str, Any]], accepts: Accepts, *, none_with_calls: bool = False
) -> list[dict[str, Any]]:
    """Return copies of the messages in the form that the template expects.

    Keys whose value is None are dropped. For templates that read strings, parts are joined by spaces. For templates
    that read only parts, a string becomes one part. The arguments of a tool call become an object. A message with tool
    calls but without content gets empty content or, with `none_with_calls`, the content None. Reasoning is set as
    "thinking" and as "reasoning_content". Raises InvalidRequest with the path of a malformed message.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequest("messages must be a list of at least one message.", param="messages")
    prepared = [_prepared(message, accepts, f"messages.{index}") for index, message in enumerate(messages)]
    for message in prepared:
        if message.get("tool_calls") and not message.get("content"):
            message["content"] = None if none_with_calls else message.get("content", "")
    return prepared


def _prepared(message: Any, accepts: Accepts, path: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest("A message must be an object.", param=path)
    copy = {key: value for key, value in message.items() if value is not None}
    role = copy.get("role")
    if not isinstance(role, str) or _ROLE.fullmatch(role) is None:
        raise InvalidRequest("A message's role must be a short word.", param=f"{path}.role")
    if "content" in copy:
        copy["content"] = _content(copy["content"], accepts, f"{path}.content")
    if "tool_calls" in copy:
        copy["tool_calls"] = _tool_calls(copy["tool_calls"], f"{path}.tool_calls")
    reasoning = next((copy[key] for key in _REASONING if key in copy), None)
    if reasoning is not None:
        copy = {"thinking": reasoning, **copy, "reasoning_content": reasoning}
    return copy


def _content(content: Any, accepts: Accepts, path: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if accepts == "parts" else content
    if not isinstance(content, list | tuple):
        raise InvalidRequest("Content must be a string or a list of parts.", param=path)
    parts = [_part(part, f"{path}.{index}") for index, part in enumerate(content)]
    if accepts == "string":
        return " ".join(part["text"] if part["type"] == "text" else part["placeholder"] for part in parts)
    return [part if part["type"] == "text" else {"type": part["type"]} for part in parts]


def _part(part: Any, path: str) -> dict[str, Any]:
    if not isinstance(part, Mapping):
        raise InvalidRequest("A content part must be an object.", param=path)
    if part.get("type") in KINDS and isinstance(part.get("placeholder"), str):
        return dict(part)
    if part.get("type") != "text":
        raise InvalidRequest("Only parts of text, images, videos and audio are understood here.", param=f"{path}.type")
    if not isinstance(part.get("text"), str):
        raise InvalidRequest("A text part must have a text.", param=f"{path}.text")
    return dict(part)


def _tool_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise InvalidRequest("tool_calls must be a list.", param=path)
    return [_tool_call(call, f"{path}.{index}") for index, call in enumerate(calls)]


def _tool_call(call: Any, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest("A tool call must have a function with a name.", param=path)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:  # invalid JSON, or nested too deep
            raise InvalidRequest("The arguments are not valid JSON.", param=f"{path}.function.arguments") from error
    if not isinstance(arguments, Mapping):
        raise InvalidRequest("The arguments must be an object.", param=f"{path}.function.arguments")
    return {**call, "function": {**function, "arguments": _Arguments(arguments)}}


class _Arguments(dict[str, Any]):
    """Arguments of a tool call: a dict for templates that read keys, and JSON text for templates that print it."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, text: str) -> str:
        return str(self) + text

    def __radd__(self, text: str) -> str:
        return text + str(self)


def whole_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tool with defaults for fields that a client may omit."""
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return dict(tool)
    parameters = {"type": "object", "properties": {}, **(function.get("parameters") or {})}
    return {
        **tool,
        "function": {**function, "description": function.get("description") or "", "parameters": parameters},
    }
