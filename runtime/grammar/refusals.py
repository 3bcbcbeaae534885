"""Which part of a JSON schema the library refuses: it says why, and hardly ever where.

The parts of a schema are compiled alone, each with what it refers to, and what is refused for the same reason is looked
into further. What is named in the end is refused by itself, though nothing in it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from runtime.grammar.references import References, Unsupported, escaped
from runtime.grammar_spec import InvalidGrammar

MAX_TRIES = 128  # parts that are compiled
MAX_S = 0.3

# What the library says of the part of a schema at a pointer; None: nothing.
Refusal = Callable[[Any, str], str | None]


class Reason(NamedTuple):
    """Why the library refuses a schema."""

    said: str  # in its own words
    keyword: str
    words: str


NO_VALUE = "no value satisfies it"
REASONS = (
    Reason("circular references", "$ref", "it leads back to itself beside keywords that limit it further"),
    Reason("patternProperty regexes", "patternProperties", "two of its patterns may match the same name"),
    Reason(
        "if regex is empty",
        "pattern",
        "what patterns, formats and lengths leave of a text takes too long to find",
    ),
    Reason(
        "min/maxProperties",
        "minProperties or maxProperties",
        "properties are counted only where none is optional, or where the count stands beside them",
    ),
    Reason("nsatisfiable", "schema", NO_VALUE),
    Reason("no text matches", "schema", NO_VALUE),
    Reason("stack level", "allOf", "too many schemas hold at once"),
    Reason("too large", "schema", "it is too large for the library that compiles it"),
    Reason("too many", "schema", "it is too large for the library that compiles it"),
)
# Where parts of a schema stand: one of them, a list, or one for each name.
_PARTS = ("items", "additionalProperties", "additionalItems", "contains", "if", "then", "else", "not")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "dependentSchemas", "dependencies")


def placed(schemas: Sequence[tuple[str, Any]], error: str, refusal: Refusal) -> InvalidGrammar:
    """The refusal of a grammar that begins with `error`, with the keyword and the place that it is about.

    `schemas` are those in the grammar, with their places in it. Compiles up to `MAX_TRIES` parts, in about `MAX_S`;
    where that does not do, a part around the one that is meant is named. Without a schema that is refused alone, the
    error stays as it is.
    """
    until_s = time.perf_counter() + MAX_S
    for place, schema in schemas:
        said = error if len(schemas) == 1 and not place else refusal(schema, "")
        if said is not None:
            return _part(schema, _reason(said), lambda at, of=schema: refusal(of, at), until_s).inside(place)
        if time.perf_counter() > until_s:
            break
    return InvalidGrammar(error)


def _part(schema: Any, reason: Reason, refusal: Callable[[str], str | None], until_s: float) -> Unsupported:
    """The innermost part of a schema that is refused alone for this reason."""
    references = References(schema)
    path, seen = [""], {""}
    inside = _inside(references, "", reason)
    while len(seen) < MAX_TRIES and time.perf_counter() < until_s:
        pointer = next(inside, None)
        if pointer is None:
            break
        if pointer not in seen:
            seen.add(pointer)
            said = refusal(pointer)
            if said is not None and _reason(said).keyword == reason.keyword:
                path.append(pointer)
                inside = _inside(references, pointer, reason)
    found = path[-1]
    if reason.keyword == "$ref":  # the circle has no end
        found = next((each for each in reversed(path) if _refers(references.resolve(each))), found)
    where = f"{found}/{reason.keyword}" if _has(references.resolve(found), reason.keyword) else found
    return Unsupported(reason.keyword, where, reason.words)


def _reason(error: str) -> Reason:
    return next((each for each in REASONS if each.said in error), Reason("", "schema", error))


def _inside(references: References, pointer: str, reason: Reason) -> Iterator[str]:
    """The pointers to the parts of the schema at a pointer, those that it refers to last."""
    schema = references.resolve(pointer)
    if not isinstance(schema, dict):
        return
    no_value = reason.words == NO_VALUE
    for keyword, value in schema.items():
        if isinstance(value, dict) and keyword in _MAPS:
            names: Sequence[str] = list(value)
            if no_value:  # others may be left out
                names = [
                    name for name in names if name in schema.get("required", ()) and keyword == "properties"
                ]
            yield from (f"{pointer}/{keyword}/{escaped(name)}" for name in names)
        elif isinstance(value, list) and keyword in _LISTS:
            if not no_value or keyword == "allOf" or len(value) == 1:
                yield from (f"{pointer}/{keyword}/{index}" for index in range(len(value)))
        elif keyword in _PARTS and (not no_value or (keyword == "items" and "minItems" in schema)):
            yield f"{pointer}/{keyword}"
    if "$ref" in schema:
        with suppress(Unsupported):  # where nothing needs it
            yield references.target(schema["$ref"], pointer)


def _refers(schema: Any) -> bool:
    """Whether there is a reference, with something beside it."""
    return isinstance(schema, dict) and "$ref" in schema and len(schema) > 1


def _has(schema: Any, keyword: str) -> bool:
    return isinstance(schema, dict) and keyword in schema
