"""Keywords of JSON Schema that are written with others: each gives a schema that refuses at least what they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

from runtime.grammar.automata import TooComplexError, apart, can_meet, unsure
from runtime.grammar.disjoint import are_disjoint, conjuncts, property_of
from runtime.grammar.opposites import NoOppositeError, opposite

Schema = Any
Peek = Callable[[Any], Any]  # follows references
MAX_DEPENDENCIES = 8  # of one object: each doubles what is to be compared
MAX_COUNTED = 2_000  # names of optional properties, over all ways to have as many as an object must or may
MAX_OVERLAPPING = 16  # patterns of names
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
        return {"properties": {}, "additionalProperties": False}
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


# Keywords that say the same whatever stands beside them.
_ALONE = frozenset(
    {
        "type",
        "enum",
        "const",
        "properties",
        "pattern",
        "format",
        "minLength",
        "maxLength",
        "minItems",
        "maxItems",
    }
    | {
        "minimum",
        "maximum",
        "multipleOf",
        "uniqueItems",
        "minProperties",
        "maxProperties",
        "not",
        "anyOf",
        "allOf",
    }
)
_OF_TEXTS = frozenset({"pattern", "minLength", "maxLength"})
_SAY_NOTHING = frozenset({"title", "description", "$comment", "examples", "default", "$id", "$schema"})


def counted(
    optional: Sequence[str], num_required: int, least: int, most: int | None, *, others: bool
) -> list[Schema] | None:
    """`minProperties` and `maxProperties` beside optional properties: the ways to have as many, one for each object.

    None where there are too many, or where names that are not listed (`others`) would have to count as two: they may
    repeat in a JSON text.
    """
    count, least = len(optional), max(0, least - num_required)
    most = None if most is None else max(0, most - num_required)
    sizes = [least] if most is None else range(max(0, least - others), min(most, count) + 1)
    ways = sum(math.comb(count, size) for size in sizes) + (
        math.comb(count, least - 1) if most is None and least else 0
    )
    if ways * count > MAX_COUNTED:
        return None
    found: list[Schema] = []
    for size in sizes:
        for present in combinations(optional, size):
            # Without a limit, whatever stands behind those that are counted may come as well.
            end = count if most is not None else optional.index(present[-1]) if present else 0
            rest: Schema = {}
            if size < least:
                rest["minProperties"] = num_required + least
            if others and most is not None:
                rest["maxProperties"] = num_required + most
            found.append(_with_just(present, optional[:end], rest))
    if most is None and others and least:
        beside = {"minProperties": num_required + least}
        found += [_with_just(present, optional, beside) for present in combinations(optional, least - 1)]
    return found


def _with_just(present: Sequence[str], of: Sequence[str], rest: Schema) -> Schema:
    absent = {name: False for name in of if name not in present}
    return {"type": "object", "required": [*present], **({"properties": absent} if absent else {}), **rest}


def may_need_too_many(schema: Schema, peek: Peek) -> bool:
    """Whether an object may have to hold more names than `maxProperties` lets it: the library would let it then.

    `schema` is written for the backend already.
    """
    pending: list[tuple[Schema, frozenset[str], int, float]] = [(schema, frozenset(), 0, math.inf)]
    looked = 0
    while pending:
        option, needed, beside, most = pending.pop()
        looked += 1
        here, limit, choices = _needed(option, peek)
        needed, most = needed | here, min(most, limit)
        if looked > MAX_COUNTED or most < len(needed) + beside:
            return True
        numbers = [max((len(_needed(each, peek)[0]) for each in choice), default=0) for choice in choices]
        for choice, number in zip(choices, numbers, strict=True):
            others = beside + sum(numbers) - number
            pending += [(each, needed, others, most) for each in choice]
    return False


def _needed(schema: Schema, peek: Peek) -> tuple[frozenset[str], float, list[list[Schema]]]:
    """Of an object: the names that are required in any case, how many there may be, and the alternatives beside."""
    names, most, choices = set[str](), math.inf, list[list[Schema]]()
    pending, seen = [schema], set[int]()
    while pending:
        part = pending.pop()
        if isinstance(part, dict) and id(part) not in seen:
            seen.add(id(part))
            names.update(part.get("required", ()))
            most = min(most, part.get("maxProperties", most))
            pending += part.get("allOf", ())
            pending += [peek(part)] if "$ref" in part else []
            choices += [part["anyOf"]] if "anyOf" in part else []
    return frozenset(names), most, choices


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
    A schema that implies another one never holds alone, and is left out. Otherwise, and where that would leave nothing
    of one, the indices of two that may both hold.
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
                    if not _implies(seen[one], seen[two]):
                        return index, other
                    part = False
                if part not in narrowed[one]:
                    narrowed[one].append(part)
    return narrowed if any(False not in each for each in narrowed) else (0, len(options) - 1)


def _opposite_in_part(schema: Schema, peek: Peek) -> Schema:
    """What `schema` refuses for reasons that can be said."""
    try:
        return opposite(schema, peek, known=())
    except NoOppositeError:
        return False


def _implies(one: Schema, other: Schema) -> bool:
    """Whether each value of `one` is seen to be one of `other`."""
    if other is True or one == other:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    for keyword, value in other.items():
        if keyword in _SAY_NOTHING or (keyword in _ALONE and one.get(keyword) == value):
            continue
        own = _list(one.get("required"))
        if keyword == "required" and isinstance(value, list) and all(name in own for name in value):
            continue
        return False
    return True


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _names(value: Any) -> list[str]:
    return list(value) if isinstance(value, dict) else []


def _apart(one: Schema, other: Schema, peek: Peek) -> Schema | None:
    """What makes values of `one` break `other`; None where it is not seen."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return None
    if "pattern" in other and other.keys() <= _OF_TEXTS | _SAY_NOTHING:  # it refuses texts alone
        text: Schema = {"type": "string"}
        if are_disjoint({"allOf": [one, text]}, other, peek):
            return text
    ones, others = conjuncts(one, peek), conjuncts(other, peek)
    mine, theirs = (
        {name: None for part in parts for name in _names(part.get("properties"))} for parts in (ones, others)
    )
    for name in mine:
        if name in theirs and are_disjoint(property_of(ones, name), property_of(others, name), peek):
            return {"type": "object", "required": [name]}
    needed, own = (
        [name for part in parts for name in _list(part.get("required"))] for parts in (others, ones)
    )
    for name in needed:
        if isinstance(name, str) and name not in own:
            return {"type": "object", "properties": {name: False}}
    if other.get("additionalProperties") is False and not other.get("patternProperties"):
        unknown = [name for name in mine if name not in theirs][:MAX_UNKNOWN]
        if unknown:
            return {"type": "object", "anyOf": [{"required": [name]} for name in unknown]}
    return None


def names_apart(
    patterns: Sequence[str], peek: Peek, *, is_closed: bool
) -> list[tuple[str | int, tuple[int, ...]]] | None:
    """`patternProperties`, of which no name matches two: (an index or a pattern, the indices of those that it stands
    for). Names about which ECMA-262 and Python differ have none; they are left out if other names are (`is_closed`).

    Patterns that cannot be compared with others are left as they are; None where it cannot be said what they match.
    """
    groups: list[list[int]] = []
    for index, pattern in enumerate(patterns):
        joined, others = [index], []
        for group in groups:
            if any(_may_meet(patterns[other], pattern, peek) for other in group):
                joined += group
            else:
                others.append(group)
        groups = [*others, sorted(joined)]
    as_they_are = [(index, (index,)) for index in range(len(patterns))]
    is_apart = len(groups) == len(patterns)
    if is_apart and is_closed:
        return [*as_they_are]
    try:
        others = unsure(patterns) if is_apart else None
        if others is not None:
            return [*as_they_are, *([(others, ())] if others else [])]
        found: list[tuple[str | int, tuple[int, ...]]] = []
        for group in groups if is_closed else [[*range(len(patterns))]]:
            if len(group) > MAX_OVERLAPPING:
                raise TooComplexError
            parts = apart([patterns[index] for index in group], peek, with_unsure=not is_closed)
            found += [(text, tuple(group[each] for each in indices)) for text, indices in parts]
    except TooComplexError:
        return [*as_they_are] if is_closed else None  # what overlaps is then refused by the library
    return found if not is_apart or any(not indices for _, indices in found) else [*as_they_are]


def _may_meet(one: str, other: str, peek: Peek) -> bool:
    """False where it is not seen: the library compares them too."""
    try:
        return can_meet([one, other], peek)
    except TooComplexError:
        return False
