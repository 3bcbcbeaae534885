"""Reorder the properties of JSON values to the order in their schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MAX_STEPS = 2_000  # limit on the subschemas that are visited per value
BRANCHES = ("allOf", "anyOf", "oneOf")


def in_schema_order(value: Any, schema: Any) -> Any:
    """Return the same value with ordered properties. If several schemas list a name, the first one decides."""
    return _ordered(value, [schema], schema)


def _ordered(value: Any, schemas: list[Any], root: Any) -> Any:
    if isinstance(value, list):
        return [_ordered(item, list(_of_item(index, schemas, root)), root) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    subschemas = list(_all(schemas, root))
    listed: dict[str, None] = {}
    for keyword in ("properties", "required"):
        for schema in subschemas:
            names = schema.get(keyword)
            listed.update(dict.fromkeys(names if isinstance(names, dict | list) else ()))
    names = [name for name in listed if name in value] + [name for name in value if name not in listed]
    return {name: _ordered(value[name], list(_of_name(name, subschemas)), root) for name in names}


def _all(schemas: list[Any], root: Any) -> Iterator[Mapping[str, Any]]:
    """Yield these schemas and their subschemas for the same value, with references resolved, each once."""
    pending, seen = list(reversed(schemas)), set[int]()
    while pending and len(seen) < MAX_STEPS:
        schema = pending.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        yield schema
        parts = [part for name in BRANCHES for part in _list(schema.get(name))]
        parts += [schema[name] for name in ("then", "else") if name in schema]
        if isinstance(schema.get("$ref"), str):
            parts.insert(0, _resolved(schema["$ref"], root))
        pending += reversed(parts)


def _of_item(index: int, schemas: list[Any], root: Any) -> Iterator[Any]:
    for schema in _all(schemas, root):
        first = schema.get("prefixItems", schema.get("items"))
        if isinstance(first, list) and index < len(first):
            yield first[index]
        else:
            yield (schema.get("items") if not isinstance(schema.get("items"), list) else schema.get("additionalItems"))


def _of_name(name: str, schemas: list[Mapping[str, Any]]) -> Iterator[Any]:
    for schema in schemas:
        properties = schema.get("properties")
        if isinstance(properties, dict) and name in properties:
            yield properties[name]
        else:
            yield from (schema.get("patternProperties") or {}).values()
            yield schema.get("additionalProperties")


def _resolved(reference: str, root: Any) -> Any:
    value = root
    for part in reference.partition("#")[2].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
