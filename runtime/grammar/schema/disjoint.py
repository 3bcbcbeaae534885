"""Test whether two JSON schemas are disjoint, that is, whether no value satisfies both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from runtime.grammar.patterns import automata

MAX_DEPTH = 8

Constant = tuple[str, Any]  # (type, value)
Peek = Callable[[Any], Any]  # `References.peek`: returns the target of a reference, and any other schema unchanged


def are_disjoint(one: Any, other: Any, peek: Peek) -> bool:
    """Return True if it is certain that no value satisfies both schemas, else False."""
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
            if isinstance(options, list) and all(_are_disjoint(option, second, peek, depth + 1) for option in options):
                return True
        options = first.get("allOf")
        if isinstance(options, list) and any(_are_disjoint(option, second, peek, depth + 1) for option in options):
            return True
    ones, others = conjuncts(one, peek), conjuncts(other, peek)
    values, other_values = _values(ones), _values(others)
    if values is not None and other_values is not None:
        return not values & other_values
    types = _types(ones, values) & _types(others, other_values)
    if types == {"string"}:
        return _no_common_text([*ones, *others], [values, other_values], peek)
    if types != {"object"}:
        return not types
    keys = {key for part in (*ones, *others) for key in _strings(part.get("required"))}
    return any(_are_disjoint(property_of(ones, key), property_of(others, key), peek, depth + 1) for key in keys)


def conjuncts(schema: Any, peek: Peek, depth: int = 0) -> list[dict[str, Any]]:
    """Return `schema` and all schemas in its `allOf`, which a value must satisfy together.

    `schema` must not be a reference.
    """
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return []
    parts = schema.get("allOf")
    found = [schema]
    for part in parts if isinstance(parts, list) else ():
        found += conjuncts(peek(part), peek, depth + 1)
    return found


def property_of(parts: Iterable[dict[str, Any]], key: str) -> Any:
    """Return the schema of the property `key` for values that satisfy all of `parts`."""
    found: list[Any] = []
    for part in parts:
        properties = part.get("properties")
        if isinstance(properties, dict) and key in properties:
            found.append(properties[key])
        elif part.get("additionalProperties") is False and not part.get("patternProperties"):
            return False
    return all_of(found)


def all_of(schemas: Sequence[Any]) -> Any:
    """Return a schema for values that satisfy all of `schemas`."""
    return schemas[0] if len(schemas) == 1 else {"allOf": [*schemas]} if schemas else True


def _no_common_text(parts: Iterable[dict[str, Any]], values: Iterable[set[Constant] | None], peek: Peek) -> bool:
    """Whether it is certain that no text is in all lists of values and matches all patterns of `parts`."""
    patterns = [part["pattern"] for part in parts if isinstance(part.get("pattern"), str)]
    listed = [[automata.spelled(text) for kind, text in each if kind == "str"] for each in values if each]
    patterns += [f"^(?:{'|'.join(texts)})$" for texts in listed]
    if len(patterns) < 2:
        return False
    try:
        return not automata.intersects(patterns, peek)
    except automata.TooComplexError:
        return False


def _values(parts: Iterable[dict[str, Any]]) -> set[Constant] | None:
    """Return the constants that all schemas allow, or None if no schema lists only scalar constants."""
    allowed: set[Constant] | None = None
    for part in parts:
        found = [part["const"]] if "const" in part else part.get("enum")
        if isinstance(found, list) and not any(isinstance(value, list | dict) for value in found):
            keys = {_key(value) for value in found}
            allowed = keys if allowed is None else allowed & keys
    return allowed


def _key(value: Any) -> Constant:
    """Return (type, value). In JSON, 1 and 1.0 are the same number, but 1 and true are different values."""
    kind = type(value).__name__
    return ("number", value) if kind in ("int", "float") else (kind, value)


def _types(parts: Iterable[dict[str, Any]], values: Iterable[Constant] | None) -> set[str]:
    """Return the types that all schemas allow. "number" in a schema also allows "integer"."""
    types = {*_ALL}
    for part in parts:
        named = part.get("type")
        allowed = {named} if isinstance(named, str) else set(_strings(named)) or set(_ALL)
        types &= {*allowed, "integer"} if "number" in allowed else allowed
    if values is not None:
        kinds = {"NoneType": "null", "bool": "boolean", "str": "string", "number": "integer"}
        found = {kinds[kind] for kind, _ in values}
        types &= found | ({"number"} if "integer" in found else set())
    return types


_ALL = ("null", "boolean", "integer", "number", "string", "array", "object")


def _strings(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
