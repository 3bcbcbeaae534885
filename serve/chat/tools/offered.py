"""The tools of a request, checked, and what their schemas say about parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from runtime.errors import InvalidRequest

MAX_TOOLS = 512
MAX_SCHEMA_BYTES = 256 * 1024  # of all tools together
MAX_REFS = 16  # followed one after another

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_ANY = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})


@dataclass(frozen=True, slots=True)
class Tool:
    """One function that the model may call."""

    name: str
    parameters: Mapping[str, Any]  # JSON schema of an object
    strict: bool = False

    def types_of(self, parameter: str) -> frozenset[str] | None:
        """The JSON types that a parameter may have; None where the schema does not say."""
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
    """Raises `InvalidRequest` naming what is wrong: the tool, its name, its parameters, how many or how large."""
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools may have at most {MAX_TOOLS} items, not {len(tools)}.", param="tools")
    found: dict[str, Tool] = {}
    size = 0
    for index, tool in enumerate(tools):
        path = f"tools.{index}"
        read = _read_tool(tool, path)
        if read.name in found:
            raise InvalidRequest(
                f"{path}.function.name: there are two tools called {read.name!r}.",
                param=f"{path}.function.name",
            )
        size += len(orjson.dumps(tool))
        if size > MAX_SCHEMA_BYTES:
            raise InvalidRequest(f"tools may have at most {MAX_SCHEMA_BYTES} bytes.", param="tools")
        found[read.name] = read
    return OfferedTools(found)


def _read_tool(tool: Mapping[str, Any], path: str) -> Tool:
    if tool.get("type", "function") != "function":
        raise InvalidRequest(f'{path}.type must be "function".', param=f"{path}.type")
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
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}  # it takes none
    where = f"{path}.function.parameters"
    if not isinstance(parameters, Mapping):
        raise InvalidRequest(f"{where} must be a JSON schema, which is an object.", param=where)
    if parameters.get("type", "object") != "object":
        raise InvalidRequest(f'{where}.type must be "object".', param=f"{where}.type")
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise InvalidRequest(
            f"{path}.function.description must be a string.", param=f"{path}.function.description"
        )
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest(
            f"{path}.function.strict must be true or false.", param=f"{path}.function.strict"
        )
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
    found: Any = root
    for key in reference[2:].split("/"):
        if not isinstance(found, Mapping):
            return None
        found = found.get(key.replace("~1", "/").replace("~0", "~"))
    return found


def _types_of_values(values: list[Any]) -> frozenset[str] | None:
    names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return (
        frozenset("null" if value is None else names.get(type(value), "string") for value in values) or None
    )
