"""Find the arrays of a JSON schema whose items must be unique (`uniqueItems`).

No grammar can express unique items, so `backends.unique_texts` enforces them while an output is generated. Items must
be strings, or objects that differ in one string property.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from runtime.grammar.patterns.finite import matches_few
from runtime.grammar.schema.references import Unsupported

MAX_LISTED = 256  # a longer list of allowed strings is treated as if every string were allowed
MAX_DEPTH = 8
MAX_PLACES = 50_000  # maximum number of pairs (subschema, name of the nearest enclosing property)
# Keywords whose subschemas apply to the same value (_SAME), to properties of any name (_ANY_NAME), and to items of an
# array (_ITEMS).
_SAME = ("anyOf", "oneOf", "allOf", "not", "if", "then", "else", "dependentSchemas", "dependencies")
_ANY_NAME = ("patternProperties", "additionalProperties")
_ITEMS = ("items", "prefixItems", "additionalItems")

Schema = Any
Peek = Callable[[Any], Any]  # `References.peek`: returns the target of a reference, and any other schema unchanged
# The unique arrays of a schema. An outer key is the name of the nearest property that contains the array: "" if there
# is none, None if the property may have any name. An inner key says what must differ: None for the items themselves,
# which are strings, or the name of a string property. The values are the strings that the schema lists, or () if it
# allows other strings.
UniqueArrays = dict[str | None, dict[str | None, tuple[str, ...]]]


def texts(items: Schema, peek: Peek, depth: int = 0) -> tuple[str, ...] | None:
    """Return the strings that a schema lists, () if it allows unlisted strings, or None if it may allow other types."""
    items = peek(items)
    if not isinstance(items, dict) or depth > MAX_DEPTH:
        return None
    listed = items.get("enum", [items["const"]] if "const" in items else None)
    if isinstance(listed, list):
        return tuple(dict.fromkeys(listed)) if all(isinstance(each, str) for each in listed) else None
    if items.get("type") == "string":
        pattern = items.get("pattern")
        # Few possible strings are not supported: an array could use all of them before it has enough items.
        return None if isinstance(pattern, str) and matches_few(pattern, MAX_LISTED) else ()
    for keyword in ("anyOf", "oneOf"):
        options = items.get(keyword)
        if isinstance(options, list) and options:
            found = [texts(option, peek, depth + 1) for option in options]
            if None not in found:
                return tuple(dict.fromkeys(text for each in found for text in each or ())) if all(found) else ()
    parts = items.get("allOf")
    if isinstance(parts, list) and any(texts(part, peek, depth + 1) is not None for part in parts):
        return ()
    return None


def text_properties(items: Schema, peek: Peek, depth: int = 0) -> dict[str, tuple[str, ...]] | None:
    """Return name -> result of `texts` for the properties that are always strings. Required properties come first.

    Returns None if the schema may allow values other than objects.
    """
    items = peek(items)
    if not isinstance(items, dict) or depth > MAX_DEPTH:
        return None
    found: dict[str, tuple[str, ...]] | None = None
    if items.get("type") == "object":
        properties, required = items.get("properties"), items.get("required")
        properties = properties if isinstance(properties, dict) else {}
        required = required if isinstance(required, list) else []
        names = [*(name for name in required if name in properties), *properties]
        listed = {name: texts(properties[name], peek, depth + 1) for name in dict.fromkeys(names)}
        found = {name: values for name, values in listed.items() if values is not None}
    for part in _list(items.get("allOf")):
        others = text_properties(part, peek, depth + 1)
        if others is not None:
            found = {**others, **(found or {})}
    for keyword in ("anyOf", "oneOf"):
        options = [text_properties(part, peek, depth + 1) for part in _list(items.get(keyword))]
        known = [option for option in options if option is not None]
        if options and len(known) == len(options):
            shared = [name for name in known[0] if all(name in option for option in known)]
            found = {**dict.fromkeys(shared, ()), **(found or {})}
    return found


def text_property(items: Schema, peek: Peek) -> tuple[str, tuple[str, ...]] | None:
    """Return (name, result of `texts`) of the property in which items must differ, or None if there is none.

    The property must always be a string. Properties that allow unlisted strings are preferred.
    """
    found = text_properties(items, peek) or {}
    name = next((name for name, values in found.items() if not values), next(iter(found), None))
    return None if name is None else (name, found[name])


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def unique_names(root: Schema, peek: Peek) -> UniqueArrays:
    """Return all unique arrays in a schema. Raises `Unsupported` if the schema is too large."""
    found: UniqueArrays = {}
    pending: list[tuple[Schema, str | None]] = [(root, "")]
    seen: set[tuple[int, str | None]] = set()
    while pending:
        schema, name = pending.pop()
        if not isinstance(schema, dict) or (id(schema), name) in seen:
            continue
        seen.add((id(schema), name))
        if len(seen) % 64 == 0:
            time.sleep(0)  # yield the GIL
        if len(seen) > MAX_PLACES:
            raise Unsupported("uniqueItems", "", "the schema is too large to find all such arrays")
        if schema.get("uniqueItems") is True:
            values, key = texts(schema.get("items"), peek), None
            if values is None:
                key, values = text_property(schema.get("items"), peek) or (None, ())
            beside = found.setdefault(name, {})
            beside[key] = values if beside.get(key, values) == values else ()
        pending += _places(schema, name, peek)
    return found


def _places(schema: dict[str, Any], name: str | None, peek: Peek) -> Iterable[tuple[Schema, str | None]]:
    """Yield (subschema, name of the nearest property that contains its values); None means any name."""
    for keyword, value in schema.items():
        if keyword == "$ref":
            yield peek({"$ref": value}), name
        elif keyword == "properties" and isinstance(value, dict):
            yield from ((part, each) for each, part in value.items())
        elif keyword in _ANY_NAME:
            yield value, None
            yield from (
                ((part, None) for part in value.values() if keyword == "patternProperties")
                if isinstance(value, dict)
                else ()
            )
        elif keyword in _SAME or keyword in _ITEMS:
            parts = value if isinstance(value, list) else [value]
            yield from ((part, name) for part in parts)
            if keyword in ("dependentSchemas", "dependencies") and isinstance(value, dict):
                yield from ((part, name) for part in value.values())
