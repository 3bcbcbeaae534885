"""Check the tools of a request, and look up the types of parameters in their schemas."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from runtime.errors import InvalidRequest

MAX_TOOLS = 512
MAX_SCHEMA_BYTES = 256 * 1024  # limit for all tools of a request together
MAX_REFS = 16  # maximum number of nested references that are followed

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_ANY = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})


@dataclass(frozen=True, slots=True)
class Tool:
    """One function that the model may call."""

    name: str
    parameters: Mapping[str, Any]  # JSON schema of an object
    strict: bool = False

    def types_of(self, parameter: str) -> frozenset[str] | None:
        """Return the JSON types that a parameter may have, or None if the schema does not restrict them."""
        properties = self.parameters.get("properties")
        schema = properties.get(parameter) if isinstance(properties, Mapping) else None
        return _types(schema, self.parameters, MAX_REFS)


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The tools of one request by name."""

    by_name: Mapping[str, Tool] = field(default_factory=dict)

    def __contains__(self, name: object) -> bool:
        return name in self.by_name

    def types_of(self, name: str, parameter: str) -> frozenset[str] | None:
        tool = self.by_name.get(name)
        return None if tool is None else tool.types_of(parameter)


def read_tools(tools: Sequence[Mapping[str, Any]]) -> OfferedTools:
    """Check the tools of a request, and return them by name.

    Raises `InvalidRequest`, whose `param` is the path of the invalid part, and also for too many or too large tools.
    """
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools may have at most {MAX_TOOLS} items, not {len(tools)}.", param="tools")
    by_name: dict[str, Tool] = {}
    size = 0
    for index, tool in enumerate(tools):
        path = f"tools.{index}"
        checked = _read_tool(tool, path)
        if checked.name in by_name:
            raise InvalidRequest(
                f"{path}.function.name: two tools have the name {checked.name!r}.",
                param=f"{path}.function.name",
            )
        size += len(orjson.dumps(tool))
        if size > MAX_SCHEMA_BYTES:
            raise InvalidRequest(f"tools may have at most {MAX_SCHEMA_BYTES} bytes.", param="tools")
        by_name[checked.name] = checked
    return OfferedTools(by_name)


def _read_tool(tool: Mapping[str, Any], path: str) -> Tool:
    if tool.get("type", "function") != "function":
        custom = " Send a custom tool as a function with one string parameter." if tool.get("type") == "custom" else ""
        raise InvalidRequest(f'{path}.type must be "function".{custom}', param=f"{path}.type")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequest(f"{path}.function must be an object.", param=f"{path}.function")
    name = function.get("name")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise InvalidRequest(
            f"{path}.function.name must be 1 to 128 letters, digits, dots, colons, slashes, dashes or underscores.",
            param=f"{path}.function.name",
        )
    parameters = function.get("parameters")
    if parameters is None:
        # Without a schema, the function takes no parameters.
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    schema_path = f"{path}.function.parameters"
    if not isinstance(parameters, Mapping):
        raise InvalidRequest(f"{schema_path} must be a JSON schema, which is an object.", param=schema_path)
    if parameters.get("type", "object") != "object":
        raise InvalidRequest(f'{schema_path}.type must be "object".', param=f"{schema_path}.type")
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise InvalidRequest(f"{path}.function.description must be a string.", param=f"{path}.function.description")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest(f"{path}.function.strict must be true or false.", param=f"{path}.function.strict")
    return Tool(name, parameters, bool(strict))


def _types(schema: Any, root: Mapping[str, Any], refs_left: int) -> frozenset[str] | None:
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        return _types_of_values([schema["const"]])
    if isinstance(schema.get("enum"), list):
        return _types_of_values(schema["enum"])
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind}) & _ANY or None
    if isinstance(kind, list):
        return frozenset(one for one in kind if isinstance(one, str)) & _ANY or None
    reference = schema.get("$ref")
    if isinstance(reference, str) and refs_left:
        return _types(_referred(reference, root), root, refs_left - 1)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list) and refs_left:
            members = [_types(member, root, refs_left - 1) for member in schema[key][:64]]
            known = [types for types in members if types is not None]
            return frozenset().union(*known) if known and len(known) == len(members) else None
    if "properties" in schema:
        return frozenset({"object"})
    if "items" in schema:
        return frozenset({"array"})
    return None


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    if not reference.startswith("#/"):
        return None
    value: Any = root
    for key in reference[2:].split("/"):
        if not isinstance(value, Mapping):
            return None
        value = value.get(key.replace("~1", "/").replace("~0", "~"))
    return value


def _types_of_values(values: list[Any]) -> frozenset[str] | None:
    names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return frozenset("null" if value is None else names.get(type(value), "string") for value in values) or None
