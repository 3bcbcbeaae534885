"""`uniqueItems` of JSON schemas: arrays of few values are written out, those of texts are kept by `unique_texts`.

Items that are objects are told apart by one text in each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import combinations, permutations
from typing import Any

from runtime.grammar.few_texts import few_texts
from runtime.grammar.references import REFERENCES, Unsupported

MAX_UNIQUE = 7  # values that are written out; of more than MAX_ARRANGED in the order of the schema alone
MAX_ARRANGED = 4
MAX_LISTED = 256  # texts of an enum that are looked at, so that an array does not want more than there are
MAX_DEPTH = 8
MAX_PLACES = 50_000  # of a schema, each under so many names as lead to it
# Keywords whose schemas are about the same value, about properties of any name, and about items.
_SAME = ("anyOf", "oneOf", "allOf", "not", "if", "then", "else", "dependentSchemas", "dependencies")
_ANY_NAME = ("patternProperties", "additionalProperties", "unevaluatedProperties")
_ITEMS = ("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains")

_BESIDE_PATTERNS = frozenset({"minLength", "maxLength", "format", "allOf", "anyOf", "oneOf", "not", "if"})

Schema = Any
Peek = Callable[[Any], Any]  # follows references
# What must not repeat in arrays, by the property name that they stand under: the items themselves (None), which are
# texts then, or the text in one property of items that are objects. With each go the texts that it may be where a
# schema lists them, else none. The name "" stands for arrays below no property, and None for those of any name.
UniqueArrays = dict[str | None, dict[str | None, tuple[str, ...]]]


def unique_arrays(items: Schema, schema: Schema) -> list[list[Any]] | None:
    """All arrays of different values that `items` lists; None where it does not, or lists too many.

    `schema` is the array's own: its minItems and maxItems are looked at.
    """
    if not isinstance(items, dict):
        return None
    values = items.get("enum", [items["const"]] if "const" in items else None)
    if not isinstance(values, list) or any(not isinstance(value, str | bool | None) for value in values):
        return None
    if items.keys() - {"enum", "const", "type", "title", "description", "default", "examples", "$comment"}:
        return None
    values = list(dict.fromkeys(values))
    low, high = schema.get("minItems", 0), schema.get("maxItems", len(values))
    if len(values) > MAX_UNIQUE or not isinstance(low, int) or not isinstance(high, int):
        return None
    found: list[list[Any]] = []
    for count in range(low, min(high, len(values)) + 1):
        chosen: Iterable[tuple[Any, ...]] = (
            permutations(values, count) if len(values) <= MAX_ARRANGED else combinations(values, count)
        )
        found += [list(each) for each in chosen]
    return found


def texts(items: Schema, peek: Peek, depth: int = 0) -> tuple[str, ...] | None:
    """The texts that a schema lists, nothing where it allows others; None where it may allow what is no text."""
    items = peek(items)
    if not isinstance(items, dict) or depth > MAX_DEPTH:
        return None
    listed = items.get("enum", [items["const"]] if "const" in items else None)
    if isinstance(listed, list):
        return tuple(dict.fromkeys(listed)) if all(isinstance(each, str) for each in listed) else None
    if items.get("type") == "string":
        pattern = items.get("pattern")
        is_all = not items.keys() & _BESIDE_PATTERNS and isinstance(pattern, str)
        return few_texts(pattern, MAX_LISTED) if is_all else ()
    for keyword in ("anyOf", "oneOf"):
        options = items.get(keyword)
        if isinstance(options, list) and options:
            found = [texts(option, peek, depth + 1) for option in options]
            if None not in found:
                return (
                    tuple(dict.fromkeys(text for each in found for text in each or ())) if all(found) else ()
                )
    parts = items.get("allOf")
    if isinstance(parts, list) and any(texts(part, peek, depth + 1) is not None for part in parts):
        return ()
    return None


def text_properties(items: Schema, peek: Peek, depth: int = 0) -> dict[str, tuple[str, ...]] | None:
    """The properties that are texts in all objects that a schema allows, as `texts` has them, required ones first.

    None where it may allow what is no object.
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
    """The property by which items of an array are told apart, one that is not listed if there is any."""
    found = text_properties(items, peek) or {}
    name = next((name for name, values in found.items() if not values), next(iter(found), None))
    return None if name is None else (name, found[name])


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def unique_names(root: Schema, peek: Peek) -> UniqueArrays:
    """The names of properties under which arrays must not repeat texts. Raises `Unsupported`."""
    found: UniqueArrays = {}
    pending: list[tuple[Schema, str | None]] = [(root, "")]
    seen: set[tuple[int, str | None]] = set()
    while pending:
        schema, name = pending.pop()
        if not isinstance(schema, dict) or (id(schema), name) in seen:
            continue
        seen.add((id(schema), name))
        if len(seen) % 64 == 0:
            time.sleep(0)  # others want to run
        if len(seen) > MAX_PLACES:
            raise Unsupported("uniqueItems", "", "there is too much in the schema to find all such arrays")
        if schema.get("uniqueItems") is True:
            values, key = texts(schema.get("items"), peek), None
            if values is None:
                key, values = text_property(schema.get("items"), peek) or (None, ())
            beside = found.setdefault(name, {})
            beside[key] = values if beside.get(key, values) == values else ()
        pending += _places(schema, name, peek)
    return found


def _places(schema: dict[str, Any], name: str | None, peek: Peek) -> Iterable[tuple[Schema, str | None]]:
    """The schemas in it, with the names of the nearest property that their values stand under."""
    for keyword, value in schema.items():
        if keyword in REFERENCES:
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
