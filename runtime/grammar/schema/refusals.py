"""Find the part of a JSON schema because of which llguidance refuses the schema.

llguidance's errors rarely name this part.

Each part of a refused schema is compiled alone, with the definitions that it refers to. If a part is refused for the
same reason as the schema, its own parts are tried next. The result is the innermost part that is refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from runtime.grammar.schema.references import References, Unsupported, escaped
from runtime.grammar_spec import InvalidGrammar

MAX_TRIES = 128  # maximum number of parts that are compiled
MAX_S = 0.3  # maximum time of the search

# (schema, JSON pointer) -> llguidance's error for the part at this place, or None if llguidance accepts it.
Refusal = Callable[[Any, str], str | None]


class Reason(NamedTuple):
    """A reason for which llguidance refuses schemas."""

    said: str  # text in llguidance's message by which the reason is recognised
    keyword: str  # the keyword to name in the error
    words: str  # the explanation for the client


NO_VALUE = "no value satisfies it"
TOO_LARGE = "it is too large for the library that compiles it"
ALTERNATIVES = "too many alternatives are possible at one place of an output"
REPETITIONS = "its repetitions are nested too deep, or have too large limits"
REASONS = (
    Reason("circular references", "$ref", "it is recursive, and other keywords limit it further"),
    Reason("patternProperty regexes", "patternProperties", "two of its patterns may match the same name"),
    Reason(
        "if regex is empty",
        "pattern",
        "its combination with other patterns, formats and lengths takes too long to compute",
    ),
    Reason(
        "min/maxProperties",
        "minProperties or maxProperties",
        "properties are counted only in the object schema that lists them",
    ),
    Reason("nsatisfiable", "schema", NO_VALUE),
    Reason("no text matches", "schema", NO_VALUE),
    Reason("stack level", "allOf", "too many schemas apply at once"),
    Reason(ALTERNATIVES, "anyOf", ALTERNATIVES),
    Reason(REPETITIONS, "pattern", REPETITIONS),
    Reason("too large", "schema", TOO_LARGE),
    Reason("too many", "schema", TOO_LARGE),
)
# Keywords whose value is a subschema (_PARTS), a list of subschemas (_LISTS), or a map of names to subschemas (_MAPS).
_PARTS = ("items", "additionalProperties", "additionalItems", "if", "then", "else", "not")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "dependentSchemas", "dependencies")


def placed(schemas: Sequence[tuple[str, Any]], error: str, refusal: Refusal) -> InvalidGrammar:
    """Return llguidance's error for a refused grammar, with the keyword and the place that cause it.

    `schemas` has (place, schema) for each schema in the grammar. Compiles up to `MAX_TRIES` parts in about `MAX_S`
    seconds; if this is not enough, the error names a larger part. If no schema is refused alone, the error has no
    place.
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
    """Return an error that names the innermost part of a schema which llguidance refuses for this reason."""
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
    if reason.keyword == "$ref":  # a cycle has no innermost part, so name a schema with $ref and other keywords
        found = next((each for each in reversed(path) if _refers(references.resolve(each))), found)
    where = f"{found}/{reason.keyword}" if _has(references.resolve(found), reason.keyword) else found
    return Unsupported(reason.keyword, where, reason.words)


def _reason(error: str) -> Reason:
    return next((each for each in REASONS if each.said in error), Reason("", "schema", error))


def _inside(references: References, pointer: str, reason: Reason) -> Iterator[str]:
    """Yield the JSON pointers of the parts of the schema at `pointer`, and last that of its `$ref` target."""
    schema = references.resolve(pointer)
    if not isinstance(schema, dict):
        return
    no_value = reason.words == NO_VALUE
    for keyword, value in schema.items():
        if isinstance(value, dict) and keyword in _MAPS:
            names: Sequence[str] = list(value)
            if no_value:  # an optional property is not the cause, because an output can omit it
                names = [name for name in names if name in schema.get("required", ()) and keyword == "properties"]
            yield from (f"{pointer}/{keyword}/{escaped(name)}" for name in names)
        elif isinstance(value, list) and keyword in _LISTS:
            if not no_value or keyword == "allOf" or len(value) == 1:
                yield from (f"{pointer}/{keyword}/{index}" for index in range(len(value)))
        elif keyword in _PARTS and (not no_value or (keyword == "items" and "minItems" in schema)):
            yield f"{pointer}/{keyword}"
    if "$ref" in schema:
        with suppress(Unsupported):  # an unsupported reference in a part that outputs can omit
            yield references.target(schema["$ref"], pointer)


def _refers(schema: Any) -> bool:
    """Whether the schema has `$ref` together with other keywords."""
    return isinstance(schema, dict) and "$ref" in schema and len(schema) > 1


def _has(schema: Any, keyword: str) -> bool:
    return isinstance(schema, dict) and keyword in schema
