"""Whether two JSON schemas can hold for the same value."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

MAX_DEPTH = 8

Peek = Callable[[Any], Any]  # follows references


def are_disjoint(one: Any, other: Any, peek: Peek) -> bool:
    """True only where no value can satisfy both; False where one may, or where it is not seen."""
    return _are_disjoint(one, other, peek, 0)


def _are_disjoint(one: Any, other: Any, peek: Peek, depth: int) -> bool:
    one, other = peek(one), peek(other)
    if one is False or other is False:
        return True
    if depth > MAX_DEPTH or not (isinstance(one, dict) and isinstance(other, dict)):
        return False
    for first, second in ((one, other), (other, one)):
        for keyword in ("anyOf", "oneOf"):
            options = first.get(keyword)
            if isinstance(options, list) and all(
                _are_disjoint(option, second, peek, depth + 1) for option in options
            ):
                return True
        options = first.get("allOf")
        if isinstance(options, list) and any(
            _are_disjoint(option, second, peek, depth + 1) for option in options
        ):
            return True
    values, others = _values(one), _values(other)
    if values is not None and others is not None:
        return not values & others
    types, other_types = _types(one, values), _types(other, others)
    if not types & other_types:
        return True
    if types & other_types != {"object"}:
        return False
    return any(
        _is_disjoint_in(key, one, other, peek, depth)
        for schema in (one, other)
        for key in _strings(schema.get("required"))
    )


def _is_disjoint_in(key: str, one: Any, other: Any, peek: Peek, depth: int) -> bool:
    """Whether a property that one of both requires cannot be what both want."""
    return _are_disjoint(_property(one, key), _property(other, key), peek, depth + 1)


def _property(schema: Any, key: str) -> Any:
    properties = schema.get("properties")
    if isinstance(properties, dict) and key in properties:
        return properties[key]
    return schema.get("additionalProperties") is not False or bool(schema.get("patternProperties"))


def _values(schema: Any) -> set[tuple[str, Any]] | None:
    """The scalar constants that a schema allows; None where it is not a list of such."""
    found = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(found, list) or any(isinstance(value, list | dict) for value in found):
        return None
    return {_key(value) for value in found}


def _key(value: Any) -> tuple[str, Any]:
    """1 and 1.0 are one number in JSON, true is another value."""
    kind = type(value).__name__
    return ("number", value) if kind in ("int", "float") else (kind, value)


def _types(schema: Any, values: Iterable[tuple[str, Any]] | None) -> set[str]:
    """As sets of types in which integers are numbers, and fractions too."""
    named = schema.get("type")
    types = {named} if isinstance(named, str) else set(_strings(named)) or set(_ALL)
    if "number" in types:
        types.add("integer")
    if values is not None:
        kinds = {"NoneType": "null", "bool": "boolean", "str": "string", "number": "integer"}
        found = {kinds[kind] for kind, _ in values}
        types &= found | ({"number"} if "integer" in found else set())
    return types


_ALL = ("null", "boolean", "integer", "number", "string", "array", "object")


def _strings(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
