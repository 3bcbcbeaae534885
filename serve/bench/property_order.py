"""JSON values with the names of their objects in the order in which a schema lists them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MAX_STEPS = 2_000  # of looking for the schemas of one value
BRANCHES = ("allOf", "anyOf", "oneOf")


def in_schema_order(value: Any, schema: Any) -> Any:
    """The same value; where several schemas order it, the first one that lists a name says where it comes."""
    return _ordered(value, [schema], schema)


def _ordered(value: Any, schemas: list[Any], root: Any) -> Any:
    if isinstance(value, list):
        return [
            _ordered(item, list(_of_item(index, schemas, root)), root) for index, item in enumerate(value)
        ]
    if not isinstance(value, dict):
        return value
    found = list(_all(schemas, root))
    listed: dict[str, None] = {}
    for keyword in ("properties", "required"):
        for schema in found:
            names = schema.get(keyword)
            listed.update(dict.fromkeys(names if isinstance(names, dict | list) else ()))
    names = [name for name in listed if name in value] + [name for name in value if name not in listed]
    return {name: _ordered(value[name], list(_of_name(name, found)), root) for name in names}


def _all(schemas: list[Any], root: Any) -> Iterator[Mapping[str, Any]]:
    """These schemas and those that they are made of, references followed, each once."""
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
            yield (
                schema.get("items")
                if not isinstance(schema.get("items"), list)
                else schema.get("additionalItems")
            )


def _of_name(name: str, schemas: list[Mapping[str, Any]]) -> Iterator[Any]:
    for schema in schemas:
        properties = schema.get("properties")
        if isinstance(properties, dict) and name in properties:
            yield properties[name]
        else:
            yield from (schema.get("patternProperties") or {}).values()
            yield schema.get("additionalProperties")


def _resolved(reference: str, root: Any) -> Any:
    found = root
    for part in reference.partition("#")[2].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
