"""JSON schemas for what another one refuses, where the keywords that are enforced can say it.

With them `not`, `if` and dependencies are written as alternatives. What is written may refuse more than the opposite
does, never less: all numbers for `{"not": {"type": "integer"}}`, for example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

from runtime.grammar import automata

MAX_DEPTH = 8
MAX_LETTERS = 2_000  # of the strings of an enum

Schema = Any
Peek = Callable[[Any], Any]  # follows references
TYPES = ("null", "boolean", "number", "string", "array", "object")  # integers are numbers
ANY_TEXT = r"(?:.|[\n\r\u2028\u2029])*"


class NoOppositeError(Exception):
    """This keyword's opposite cannot be written."""


def opposite(schema: Schema, peek: Peek, known: Iterable[str], depth: int = 0) -> Schema:
    """Holds only for values that `schema` refuses; `known` are the keywords that limit values, others say nothing.

    Raises `NoOppositeError` with the keyword.
    """
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        raise NoOppositeError("schema")
    peek(None)  # counts
    found: list[Schema] = []
    if "$ref" in schema:  # what stands beside it counts in some drafts only
        return opposite(peek({"$ref": schema["$ref"]}), peek, known, depth + 1)
    for keyword, value in schema.items():
        if keyword in ("anyOf", "allOf", "oneOf") and isinstance(value, list) and value:
            parts = [opposite(part, peek, known, depth + 1) for part in value]
            found.append({"anyOf" if keyword == "allOf" else "allOf": parts})
        elif keyword == "not":
            found.append(value)
        elif keyword == "properties" and isinstance(value, dict):
            for name, part in value.items():
                other = opposite(part, peek, known, depth + 1)
                if other is not False:
                    found.append({"type": "object", "required": [name], "properties": {name: other}})
        elif keyword == "items" and isinstance(value, dict | bool):
            other = opposite(value, peek, known, depth + 1)
            # The first one breaks it: others may as well.
            if other is not False and "prefixItems" not in schema:
                found.append({"type": "array", "minItems": 1, "items": [other], "additionalItems": True})
        elif keyword.startswith("exclusive") and isinstance(value, bool):
            continue  # of draft 4: the limit beside it says enough
        elif keyword == "pattern":
            found.append(_without_pattern(value, peek))
        elif keyword in _SIMPLE:
            found.append(_SIMPLE[keyword](value))
        elif keyword in known:
            raise NoOppositeError(keyword)
    found = [part for part in found if part is not False]
    return {"anyOf": found} if found else False


def without_values(values: Iterable[Any]) -> Schema:
    """All but these values. Of lists and objects, none."""
    texts: set[str] = set()
    numbers: set[float] = set()
    rest: dict[str, list[Any]] = {"boolean": [False, True], "null": [None]}
    types = ["array", "object"]
    for value in values:
        if value is None:
            rest["null"] = []
        elif isinstance(value, bool):
            rest["boolean"] = [item for item in rest["boolean"] if item is not value]
        elif isinstance(value, int | float):
            numbers.add(value)
        elif isinstance(value, str):
            texts.add(value)
        else:
            types = [name for name in types if name != ("array" if isinstance(value, list) else "object")]
    left = [item for items in rest.values() for item in items]
    found: list[Schema] = [{"enum": left}] if left else []
    found += [{"type": types}] if types else []
    found.append({"type": "string", **({"pattern": without_texts(texts)} if texts else {})})
    return {"anyOf": [*found, *_without_numbers(sorted(numbers))]}


def without_texts(texts: Iterable[str]) -> str:
    """An ECMA-262 pattern for all texts but these."""
    texts = set(texts)
    if sum(map(len, texts)) > MAX_LETTERS:
        raise NoOppositeError("enum")
    prefixes: dict[str, set[str]] = {"": set()}
    for text in texts:
        for at, character in enumerate(text):
            prefixes.setdefault(text[:at], set()).add(character)
        prefixes.setdefault(text, set())
    found: list[str] = []
    for prefix, following in prefixes.items():
        written = _spelled(prefix)
        if prefix not in texts:
            found.append(written)
        found.append(
            f"{written}[^{_spelled(sorted(following))}]{ANY_TEXT}" if following else f"{written}{ANY_ONE}"
        )
    return f"^(?:{'|'.join(found)})$"


ANY_ONE = f"(?:.|[\\n\\r\\u2028\\u2029]){ANY_TEXT}"


def _spelled(characters: Iterable[str]) -> str:
    return "".join(f"\\u{{{ord(character):x}}}" for character in characters)


def _without_numbers(numbers: list[float]) -> list[Schema]:
    if not numbers:
        return [{"type": "number"}]
    found: list[Schema] = [{"type": "number", "exclusiveMaximum": numbers[0]}]
    for low, high in pairwise(numbers):
        found.append({"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high})
    return [*found, {"type": "number", "exclusiveMinimum": numbers[-1]}]


def _type(value: Any) -> Schema:
    names = {value} if isinstance(value, str) else set(value) if isinstance(value, list) else set()
    if not names or not names <= {*TYPES, "integer"}:
        raise NoOppositeError("type")
    left = [name for name in TYPES if name not in names and not (name == "number" and "integer" in names)]
    return {"type": left} if left else False


def _required(value: Any) -> Schema:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise NoOppositeError("required")
    return {"anyOf": [{"type": "object", "properties": {name: False}} for name in value]} if value else False


def _enum(value: Any) -> Schema:
    if not isinstance(value, list):
        raise NoOppositeError("enum")
    return without_values(value)


def _bound(keyword: str, opposite_keyword: str) -> Callable[[Any], Schema]:
    def write(value: Any) -> Schema:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise NoOppositeError(keyword)
        return {"type": "number", opposite_keyword: value}

    return write


def _without_pattern(value: Any, peek: Peek) -> Schema:
    if not isinstance(value, str):
        raise NoOppositeError("pattern")
    try:
        found = automata.outside(value, peek)
    except automata.TooComplexError:
        raise NoOppositeError("a pattern of many states") from None
    return False if found is None else {"type": "string", "pattern": found}


def _size(keyword: str, opposite_keyword: str, type_: str, step: int) -> Callable[[Any], Schema]:
    def write(value: Any) -> Schema:
        if isinstance(value, bool) or not isinstance(value, int):
            raise NoOppositeError(keyword)
        return {"type": type_, opposite_keyword: value + step} if value + step >= 0 else False

    return write


_SIMPLE: Mapping[str, Callable[[Any], Schema]] = {
    "type": _type,
    "required": _required,
    "enum": _enum,
    "const": lambda value: without_values([value]),
    "minimum": _bound("minimum", "exclusiveMaximum"),
    "maximum": _bound("maximum", "exclusiveMinimum"),
    "exclusiveMinimum": _bound("exclusiveMinimum", "maximum"),
    "exclusiveMaximum": _bound("exclusiveMaximum", "minimum"),
    "minLength": _size("minLength", "maxLength", "string", -1),
    "maxLength": _size("maxLength", "minLength", "string", 1),
    "minItems": _size("minItems", "maxItems", "array", -1),
    "maxItems": _size("maxItems", "minItems", "array", 1),
}
