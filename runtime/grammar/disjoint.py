"""Whether two JSON schemas can hold for the same value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from runtime.grammar import automata
from runtime.grammar.patterns import Beginning, beginnings

MAX_DEPTH = 8
COMPARED_AT_ONCE = 8  # beginnings, in the time of a look behind a reference

Constant = tuple[str, Any]  # (its type, its value)
Peek = Callable[[Any], Any]  # follows references


def are_disjoint(one: Any, other: Any, peek: Peek) -> bool:
    """True only where no value can satisfy both; False where one may, or where it is not seen."""
    return _are_disjoint(one, other, peek, 0)


def _are_disjoint(one: Any, other: Any, peek: Peek, depth: int) -> bool:
    one, other = peek(one), peek(other)
    if one is False or other is False:
        return True
    if depth > MAX_DEPTH or not (isinstance(one, dict) and isinstance(other, dict)):
        return False
    for first, second in ((one, other), (other, one)):
        for keyword in ("anyOf", "oneOf"):
            options = first.get(keyword)
            if isinstance(options, list) and all(
                _are_disjoint(option, second, peek, depth + 1) for option in options
            ):
                return True
        options = first.get("allOf")
        if isinstance(options, list) and any(
            _are_disjoint(option, second, peek, depth + 1) for option in options
        ):
            return True
    ones, others = conjuncts(one, peek), conjuncts(other, peek)
    values, other_values = _values(ones), _values(others)
    if values is not None and other_values is not None:
        return not values & other_values
    types = _types(ones, values) & _types(others, other_values)
    if types == {"string"}:
        return _begin_differently(
            _beginnings(ones, values), _beginnings(others, other_values), peek
        ) or _never_meet([*ones, *others], [values, other_values], peek)
    if types != {"object"}:
        return not types
    keys = {key for part in (*ones, *others) for key in _strings(part.get("required"))}
    return any(
        _are_disjoint(property_of(ones, key), property_of(others, key), peek, depth + 1) for key in keys
    )


def conjuncts(schema: Any, peek: Peek, depth: int = 0) -> list[dict[str, Any]]:
    """The schema, which is no reference, and those in its `allOf`, which hold together."""
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return []
    parts = schema.get("allOf")
    found = [schema]
    for part in parts if isinstance(parts, list) else ():
        found += conjuncts(peek(part), peek, depth + 1)
    return found


def property_of(parts: Iterable[dict[str, Any]], key: str) -> Any:
    """What all of these schemas together want of a property."""
    found: list[Any] = []
    for part in parts:
        properties = part.get("properties")
        if isinstance(properties, dict) and key in properties:
            found.append(properties[key])
        elif part.get("additionalProperties") is False and not part.get("patternProperties"):
            return False
    return all_of(found)


def all_of(schemas: Sequence[Any]) -> Any:
    """What holds where all of these do."""
    return schemas[0] if len(schemas) == 1 else {"allOf": [*schemas]} if schemas else True


def _begin_differently(mine: Sequence[Beginning], theirs: Sequence[Beginning], peek: Peek) -> bool:
    """Whether texts of both cannot begin alike, as their constants and patterns say it."""
    for _ in range(len(mine) * len(theirs) // COMPARED_AT_ONCE):
        peek(None)  # counts
    return not any(_goes_on(one, two) or _goes_on(two, one) for one in mine for two in theirs)


def _never_meet(parts: Iterable[dict[str, Any]], values: Iterable[set[Constant] | None], peek: Peek) -> bool:
    """Whether no text matches all of these schemas' patterns and is one of the values."""
    patterns = [part["pattern"] for part in parts if isinstance(part.get("pattern"), str)]
    listed = [[automata.spelled(text) for kind, text in each if kind == "str"] for each in values if each]
    patterns += [f"^(?:{'|'.join(texts)})$" for texts in listed]
    if len(patterns) < 2:
        return False
    try:
        return not automata.can_meet(patterns, peek)
    except automata.TooComplexError:
        return False


def _goes_on(longer: Beginning, begun: Beginning) -> bool:
    """Whether what begins like `longer` may be what `begun` stands for; Python's `$` lets a line break follow."""
    rest = longer.text.removeprefix(begun.text)
    return longer.text.startswith(begun.text) and (not begun.is_whole or rest in ("", "\n"))


def _beginnings(parts: list[dict[str, Any]], values: set[Constant] | None) -> Sequence[Beginning]:
    if values is not None:
        return [Beginning(value, is_whole=True) for kind, value in values if kind == "str"]
    known = [beginnings(part["pattern"]) for part in parts if isinstance(part.get("pattern"), str)]
    return next((each for each in known if all(text for text, _ in each)), [Beginning("")])


def _values(parts: Iterable[dict[str, Any]]) -> set[Constant] | None:
    """The scalar constants that schemas allow together; None where none of them is a list of such."""
    allowed: set[Constant] | None = None
    for part in parts:
        found = [part["const"]] if "const" in part else part.get("enum")
        if isinstance(found, list) and not any(isinstance(value, list | dict) for value in found):
            keys = {_key(value) for value in found}
            allowed = keys if allowed is None else allowed & keys
    return allowed


def _key(value: Any) -> Constant:
    """1 and 1.0 are one number in JSON, true is another value."""
    kind = type(value).__name__
    return ("number", value) if kind in ("int", "float") else (kind, value)


def _types(parts: Iterable[dict[str, Any]], values: Iterable[Constant] | None) -> set[str]:
    """As sets of types in which integers are numbers, and fractions too."""
    types = {*_ALL}
    for part in parts:
        named = part.get("type")
        allowed = {named} if isinstance(named, str) else set(_strings(named)) or set(_ALL)
        types &= {*allowed, "integer"} if "number" in allowed else allowed
    if values is not None:
        kinds = {"NoneType": "null", "bool": "boolean", "str": "string", "number": "integer"}
        found = {kinds[kind] for kind, _ in values}
        types &= found | ({"number"} if "integer" in found else set())
    return types


_ALL = ("null", "boolean", "integer", "number", "string", "array", "object")


def _strings(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
