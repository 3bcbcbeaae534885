"""Complements of JSON schemas, written with keywords that are enforced.

The writer uses complements for `not`, `if` and `oneOf`. A complement never accepts a value that the schema accepts.
A complement may also reject values that the schema rejects: for example, the complement of `{"type": "integer"}`
rejects all numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

from runtime.grammar.patterns import automata

MAX_DEPTH = 8
MAX_LETTERS = 2_000  # maximum number of characters of all strings of an enum together

Schema = Any
Peek = Callable[[Any], Any]  # `References.peek`: returns the target of a reference, and any other schema unchanged
# All types except "integer", which is a part of "number".
TYPES = ("null", "boolean", "number", "string", "array", "object")
ANY_TEXT = r"(?:.|[\n\r\u2028\u2029])*"


class NoComplementError(Exception):
    """Raised if the complement of a keyword cannot be written."""


def complement(schema: Schema, peek: Peek, known: Iterable[str], depth: int = 0) -> Schema:
    """Return a schema that accepts only values that `schema` rejects.

    `known` has the keywords that limit values; other keywords are annotations. Raises `NoComplementError` with the
    keyword whose complement cannot be written.
    """
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        raise NoComplementError("schema")
    peek(None)  # counts this call, and raises after too many calls
    parts: list[Schema] = []
    if "$ref" in schema:  # some drafts ignore keywords beside $ref, so only $ref is read
        return complement(peek({"$ref": schema["$ref"]}), peek, known, depth + 1)
    for keyword, value in schema.items():
        if keyword in ("anyOf", "allOf", "oneOf") and isinstance(value, list) and value:
            inner = [complement(part, peek, known, depth + 1) for part in value]
            parts.append({"anyOf" if keyword == "allOf" else "allOf": inner})
        elif keyword == "not":
            parts.append(value)
        elif keyword == "properties" and isinstance(value, dict):
            for name, part in value.items():
                other = complement(part, peek, known, depth + 1)
                if other is not False:
                    parts.append({"type": "object", "required": [name], "properties": {name: other}})
        elif keyword == "items" and isinstance(value, dict | bool):
            other = complement(value, peek, known, depth + 1)
            # The complement accepts only arrays whose first item violates `items`, and rejects all other arrays.
            if other is not False and "prefixItems" not in schema:
                parts.append({"type": "array", "minItems": 1, "items": [other], "additionalItems": True})
        elif keyword == "pattern":
            parts.append(_without_pattern(value, peek))
        elif keyword in _SIMPLE:
            parts.append(_SIMPLE[keyword](value))
        elif keyword in known:
            raise NoComplementError(keyword)
    parts = [part for part in parts if part is not False]
    return {"anyOf": parts} if parts else False


def without_values(values: Iterable[Any]) -> Schema:
    """Return a schema that rejects these values and accepts all others.

    If an array (or object) is among the values, the schema rejects all arrays (or objects).
    """
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
    """Return an ECMA-262 pattern that matches all texts except those in `texts`."""
    texts = set(texts)
    if sum(map(len, texts)) > MAX_LETTERS:
        raise NoComplementError("enum")
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
        found.append(f"{written}[^{_spelled(sorted(following))}]{ANY_TEXT}" if following else f"{written}{ANY_ONE}")
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
        raise NoComplementError("type")
    left = [name for name in TYPES if name not in names and not (name == "number" and "integer" in names)]
    return {"type": left} if left else False


def _required(value: Any) -> Schema:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise NoComplementError("required")
    return {"anyOf": [{"type": "object", "properties": {name: False}} for name in value]} if value else False


def _enum(value: Any) -> Schema:
    if not isinstance(value, list):
        raise NoComplementError("enum")
    return without_values(value)


def _bound(keyword: str, inverse: str) -> Callable[[Any], Schema]:
    def write(value: Any) -> Schema:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise NoComplementError(keyword)
        return {"type": "number", inverse: value}

    return write


def _without_pattern(value: Any, peek: Peek) -> Schema:
    if not isinstance(value, str):
        raise NoComplementError("pattern")
    try:
        text = automata.complement(value, peek)
    except automata.TooComplexError:
        raise NoComplementError("a pattern with many states") from None
    return False if text is None else {"type": "string", "pattern": text}


def _size(keyword: str, inverse: str, type_: str, step: int) -> Callable[[Any], Schema]:
    def write(value: Any) -> Schema:
        if isinstance(value, bool) or not isinstance(value, int):
            raise NoComplementError(keyword)
        return {"type": type_, inverse: value + step} if value + step >= 0 else False

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
