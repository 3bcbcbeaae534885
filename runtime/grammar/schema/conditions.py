"""Rewrite `propertyNames` and the keywords for dependencies as simpler schemas.

Each function returns a schema that rejects every value that the keyword rejects, and possibly further values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runtime.grammar.schema.complement import NoComplementError

Schema = Any
Peek = Callable[[Any], Any]  # `References.peek`: returns the target of a reference, and any other schema unchanged
MAX_DEPENDENCIES = 8  # maximum per object, because each dependency doubles the number of alternatives
# Keywords that never limit a value.
ANNOTATIONS = frozenset({"title", "description", "$comment", "examples", "default", "$id", "$schema"})


def dependent(value: Any) -> Schema:
    """Rewrite `dependentRequired`, `dependentSchemas` or `dependencies`.

    Raises `NoComplementError` if the value is no object, or has more than `MAX_DEPENDENCIES` entries.
    """
    if not isinstance(value, dict) or len(value) > MAX_DEPENDENCIES:
        raise NoComplementError("dependencies")
    parts: list[Schema] = []
    for name, needed in value.items():
        present = {"type": "object", "required": [name, *needed] if isinstance(needed, list) else [name]}
        branch = present if isinstance(needed, list) else {"allOf": [present, needed]}
        parts.append({"anyOf": [{"properties": {name: False}}, branch]})
    return {"allOf": parts} if parts else True


def property_names(value: Any, peek: Peek) -> Schema:
    """Rewrite `propertyNames`. Raises `NoComplementError` for limits other than `enum`, `const` and `pattern`."""
    value = peek(value)
    if value is True or value == {}:
        return True
    if value is False:
        return {"properties": {}, "additionalProperties": False}
    if not isinstance(value, dict):
        raise NoComplementError("propertyNames")
    parts: list[Schema] = []
    for keyword, limit in value.items():
        if keyword in ("enum", "const"):
            listed = limit if keyword == "enum" and isinstance(limit, list) else [limit]
            properties = {name: True for name in listed if isinstance(name, str)}
            parts.append({"properties": properties, "additionalProperties": False})
        elif keyword == "pattern" and isinstance(limit, str):
            parts.append({"patternProperties": {limit: True}, "additionalProperties": False})
        elif not (keyword == "type" and limit == "string") and keyword not in ANNOTATIONS:
            raise NoComplementError("propertyNames")
    return {"allOf": parts} if parts else True
