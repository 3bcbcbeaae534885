"""Keywords of JSON Schema that are written with others: each gives a schema that refuses at least what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runtime.grammar.disjoint import are_disjoint
from runtime.grammar.opposites import NoOppositeError, opposite

Schema = Any
Peek = Callable[[Any], Any]  # follows references
MAX_DEPENDENCIES = 8  # of one object: each doubles what is to be compared
MAX_UNKNOWN = 8  # names of which one tells an object from those that do not know them
IN_PLACE = ("anyOf", "oneOf", "if", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef")


def dependent(value: Any) -> Schema:
    """`dependentRequired`, `dependentSchemas`, `dependencies`. Raises `NoOppositeError`."""
    if not isinstance(value, dict) or len(value) > MAX_DEPENDENCIES:
        raise NoOppositeError("dependencies")
    found: list[Schema] = []
    for name, needed in value.items():
        present = {"type": "object", "required": [name, *needed] if isinstance(needed, list) else [name]}
        branch = present if isinstance(needed, list) else {"allOf": [present, needed]}
        found.append({"anyOf": [{"properties": {name: False}}, branch]})
    return {"allOf": found} if found else True


def names(value: Any, peek: Peek) -> Schema:
    """`propertyNames`. Raises `NoOppositeError` for what no pattern can say."""
    value = peek(value)
    if value is True or value == {}:
        return True
    if value is False:
        return {"maxProperties": 0}
    if not isinstance(value, dict):
        raise NoOppositeError("propertyNames")
    found: list[Schema] = []
    for keyword, part in value.items():
        if keyword in ("enum", "const"):
            listed = part if keyword == "enum" and isinstance(part, list) else [part]
            properties = {name: True for name in listed if isinstance(name, str)}
            found.append({"properties": properties, "additionalProperties": False})
        elif keyword == "pattern" and isinstance(part, str):
            found.append({"patternProperties": {part: True}, "additionalProperties": False})
        elif keyword in ("minLength", "maxLength") and _is_size(part):
            low, high = value.get("minLength", 0), value.get("maxLength", "")
            if keyword == "maxLength" and "minLength" in value:
                continue  # both were written together
            if not _is_size(low) or not (high == "" or _is_size(high)):
                raise NoOppositeError("propertyNames")
            pattern = f"^(?:.|[\\n\\r\\u2028\\u2029]){{{low},{high}}}$"
            found.append({"patternProperties": {pattern: True}, "additionalProperties": False})
        elif not (keyword == "type" and part == "string") and keyword not in _SAY_NOTHING:
            raise NoOppositeError("propertyNames")
    return {"allOf": found} if found else True


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1000


_SAY_NOTHING = frozenset({"title", "description", "$comment", "examples", "default", "$id", "$schema"})


def unevaluated(schema: Schema, peek: Peek) -> Schema:
    """`unevaluatedProperties`. Raises `NoOppositeError` where what is evaluated depends on the value."""
    listed: dict[str, Schema] = {}
    patterns: dict[str, Schema] = {}
    pending, depth = [schema], 0
    while pending:
        part, depth = pending.pop(), depth + 1
        if not isinstance(part, dict):
            continue
        if depth > 64 or any(keyword in part for keyword in IN_PLACE):
            raise NoOppositeError("unevaluatedProperties")
        if "additionalProperties" in part or (part is not schema and "unevaluatedProperties" in part):
            return True
        listed.update(dict.fromkeys(part.get("properties") or {}, True))
        patterns.update(dict.fromkeys(part.get("patternProperties") or {}, True))
        pending += part["allOf"] if isinstance(part.get("allOf"), list) else []
        if "$ref" in part:
            pending.append(peek({"$ref": part["$ref"]}))
    rest = {"patternProperties": patterns} if patterns else {}
    return {"properties": listed, **rest, "additionalProperties": schema["unevaluatedProperties"]}


def exclusive(options: list[Schema], peek: Peek) -> list[list[Schema]] | tuple[int, int]:
    """What must hold beside each schema of a `oneOf`, so that no value that is left satisfies another one.

    Where two are not seen to exclude each other, a property that tells them apart is required, or one that the other
    requires is forbidden, or one that the other does not know is required; else each gets the other's opposite.
    Otherwise, and where that would leave nothing of one, the indices of two that may both hold.
    """
    seen = [peek(option) for option in options]
    narrowed: list[list[Schema]] = [[] for _ in options]
    for index in range(len(options)):
        for other in range(index + 1, len(options)):
            if are_disjoint(seen[index], seen[other], peek):
                continue
            for one, two in ((index, other), (other, index)):
                part = _apart(seen[one], seen[two], peek)
                if part is None:
                    part = _opposite_in_part(seen[two], peek)
                if are_disjoint(seen[one], part, peek):
                    return index, other
                if part not in narrowed[one]:
                    narrowed[one].append(part)
    return narrowed


def _opposite_in_part(schema: Schema, peek: Peek) -> Schema:
    """What `schema` refuses for reasons that can be said."""
    try:
        return opposite(schema, peek, known=())
    except NoOppositeError:
        return False


def _apart(one: Schema, other: Schema, peek: Peek) -> Schema | None:
    """What makes values of `one` break `other`; None where it is not seen."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return None
    mine, theirs = (schema.get("properties") or {} for schema in (one, other))
    if not isinstance(mine, dict) or not isinstance(theirs, dict):
        return None
    for name in mine:
        if name in theirs and are_disjoint(mine[name], theirs[name], peek):
            return {"type": "object", "required": [name]}
    needed, own = (schema.get("required") or [] for schema in (other, one))
    if isinstance(needed, list) and isinstance(own, list):
        for name in needed:
            if isinstance(name, str) and name not in own:
                return {"type": "object", "properties": {name: False}}
    if other.get("additionalProperties") is False and not other.get("patternProperties"):
        unknown = [name for name in mine if name not in theirs][:MAX_UNKNOWN]
        if unknown:
            return {"type": "object", "anyOf": [{"required": [name]} for name in unknown]}
    return None
