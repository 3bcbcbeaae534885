"""Decode parsed JSON to dataclasses. The dataclass declaration is the schema.

    @dataclass(slots=True, kw_only=True)          # frozen=True costs 10 us more with about fifty fields
    class Body:
        prompt: str | list[str]                       # required: no default
        n: Annotated[int, Range(1, 128)] = 1
        stop: str | list[str] | None = None
        suffix: NotBuilt = None                       # refused if it is set

    body = decode(Body, json, path="")                # InvalidRequest: "stop.1 must be a string, ..."

Supported annotations: bool, int, float, str, None, Any, Literal of strings and booleans, unions, list[T], dict[str, T],
nested dataclasses, `Annotated` with `Range` or `Length`, and `NotBuilt`. If the members of a union are dataclasses with
a Literal field `type`, the key `type` selects the member. Fields with `init=False` are not part of the schema.
`Fields` decodes objects whose keys are declared in a mapping instead of a dataclass.

An absent key takes the default. `null` also takes the default, unless the annotation lists None. An integer may be
written as 3.0, but not as "3" or true. Undeclared keys are ignored. If the caller passes `noted`, undeclared keys are
added to it, except those in the dataclass's `without_effect: ClassVar[frozenset[str]]`. If the dataclass has
`closed: ClassVar[bool] = True`, undeclared keys are refused with a hint.
"""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from runtime.errors import InvalidRequest

MAX_DEPTH = 64  # maximum nesting of values declared as Any
AT_ONCE = 16_384  # list items whose types are checked at a time, in about 0.2 ms
MAX_EXACT = 2**63  # integers of at least this size are refused: JSON parsers may round them
MAX_NOTED = 256  # maximum number of undeclared keys noted per body

T = TypeVar("T")
# Undeclared keys of a body, as (declaration, name of the key). `Unknown` maps each to the first object that has the
# key, `Noted` to the path of the key in the body.
Unknown = dict[tuple["Fields", str], Any]
Noted = dict[tuple["Fields", str], tuple[str | int, ...]]
Decoder = Callable[[Any, Unknown | None], Any]


@dataclass(frozen=True, slots=True)
class Range:
    """Limits of a number, inclusive."""

    low: float = -math.inf
    high: float = math.inf


@dataclass(frozen=True, slots=True)
class Length:
    """Limits on the number of characters, items or keys, inclusive."""

    low: int = 0
    high: int = 2**63


@dataclass(frozen=True, slots=True)
class _Refused:
    """Annotation of a field that other servers support and this server refuses, unless its value means "not set"."""

    zero_is_off: bool = False
    empty_is_off: bool = True  # whether an empty object means "not set"
    advice: str = "leave it out"


NotBuilt = Annotated[Any, _Refused()]
NotBuiltNumber = Annotated[Any, _Refused(zero_is_off=True)]  # 0 means off
NotBuiltOptions = Annotated[Any, _Refused(empty_is_off=False)]  # {} also asks for the feature


def is_not_built(annotation: Any) -> bool:
    """Whether a field with this annotation is refused if it is set."""
    return any(isinstance(mark, _Refused) for mark in getattr(annotation, "__metadata__", ()))


class _MismatchError(Exception):
    """A value that does not match its annotation. `trail` has the keys and indices of its path, innermost first."""

    def __init__(self, problem: str, *, wrong_type: bool = False) -> None:
        self.problem = problem
        self.wrong_type = wrong_type
        self.trail: list[str] = []
        super().__init__(problem)

    @property
    def closeness(self) -> tuple[bool, int, int]:
        """Sort key for the mismatches of a union's members. The union reports the mismatch with the largest key.

        A value of the right type outside its limits has the largest key. Of other mismatches, an error at a later list
        item has a larger key, and at the same item an error at a deeper level.
        """
        outermost = self.trail[-1] if self.trail else "-1"
        index = int(outermost) if outermost.removeprefix("-").isdecimal() else 0
        return not (self.trail or self.wrong_type), index, len(self.trail)

    def under(self, key: object) -> _MismatchError:
        self.trail.append(str(key)[:80])
        return self


def decode(cls: type[T], value: object, path: str = "", *, noted: Noted | None = None) -> T:
    """Decode `value` (from JSON) to the dataclass `cls`. `path` is the location of `value` in the body.

    If `noted` is set, undeclared keys at any depth are added to it, each key once per dataclass. Raises
    `InvalidRequest`, whose `param` is the dotted path of the invalid value, and no other error.
    """
    unknown: Unknown | None = None if noted is None else {}
    try:
        result = _decoder(cls)(value, unknown)
    except _MismatchError as mismatch:
        raise _refusal(mismatch, path) from None
    if noted is not None and unknown:
        _note_paths(unknown, value, path, noted)
    return result


def _note_paths(unknown: Unknown, value: object, path: str, noted: Noted) -> None:
    start = tuple(int(key) if key.isdecimal() else key for key in path.split(".")) if path else ()
    holder_ids = {id(holder) for holder in unknown.values() if holder is not value}
    paths = _paths_of(holder_ids, value) if holder_ids else {}
    for key, holder in unknown.items():
        if key not in noted and len(noted) < MAX_NOTED:
            noted[key] = (*start, *paths.get(id(holder), ()), key[1])


def _paths_of(ids: Collection[int], body: object) -> dict[int, tuple[str | int, ...]]:
    """Map the `id()` of objects within a body to their paths (keys and indices). Visits each object at most once."""
    paths: dict[int, tuple[str | int, ...]] = {}
    pending: list[tuple[object, tuple[str | int, ...]]] = [(body, ())]
    while pending and len(paths) < len(ids):
        container, path = pending.pop()
        if id(container) in ids:
            paths[id(container)] = path
        if isinstance(container, dict):
            inner = container.items()
        else:
            inner = enumerate(container) if isinstance(container, list) else ()
        pending += [(each, (*path, key)) for key, each in inner if isinstance(each, dict | list)]
    return paths


def _refusal(mismatch: _MismatchError, path: str) -> InvalidRequest:
    param = ".".join([path, *reversed(mismatch.trail)] if path else list(reversed(mismatch.trail)))
    end = "" if mismatch.problem.endswith("?") else "."
    return InvalidRequest(f"{param or 'The body'} {mismatch.problem}{end}", param=param or None)


class Fields:
    """Decodes JSON objects whose keys are declared by a mapping from names to annotations."""

    def __init__(self, hints: Mapping[str, Any], *, closed: bool = False, without_effect: Collection[str] = ()) -> None:
        self._without_effect = without_effect
        self._checks = {name: _decoder(hint) for name, hint in hints.items()}
        self._nullable = {name for name, hint in hints.items() if _lists_none(hint)}
        self._closed = closed

    @property
    def names(self) -> Collection[str]:
        """The declared keys."""
        return self._checks.keys() | set(self._without_effect)

    def read(self, value: object, path: str = "") -> dict[str, Any]:
        """Return the values of the declared keys that the object sets. `path` is the object's location in the body.

        Raises `InvalidRequest`, whose `param` is the dotted path of the invalid value.
        """
        try:
            return self.decode(value, None)
        except _MismatchError as mismatch:
            raise _refusal(mismatch, path) from None

    def decode(self, value: object, unknown: Unknown | None) -> dict[str, Any]:
        """Return the values of the declared keys that the object sets, and add undeclared keys to `unknown`.

        Raises `_MismatchError`.
        """
        if type(value) is not dict:
            raise _expected("an object", value)
        if self._closed:
            _refuse_unknown(value, self._checks)
        result = {}
        for name, item in value.items():  # loop over the body, because it sets only a few of the declared keys
            check = self._checks.get(name)
            if check is None:
                if unknown is not None and len(unknown) < MAX_NOTED and self._matters(name, item):
                    unknown.setdefault((self, name), value)
                continue
            if item is None and name not in self._nullable:
                continue
            try:
                result[name] = check(item, unknown)
            except _MismatchError as mismatch:
                raise mismatch.under(name) from None
        return result

    def _matters(self, name: str, item: Any) -> bool:
        """Whether an undeclared key is reported: it has a value, and is not known to be without effect."""
        return name not in self._without_effect and not _is_unset(item)


@cache
def _decoder(annotation: Any) -> Decoder:
    """Return the function that decodes values of this annotation. Results are cached."""
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    origin = get_origin(annotation)
    if origin is Annotated:
        return _annotated(annotation)
    if origin in (Union, types.UnionType):
        return _union(annotation)
    if origin is Literal:
        return _literal(get_args(annotation))
    if origin is list:
        return _list(get_args(annotation)[0])
    if origin is dict:
        return _dict(get_args(annotation)[1])
    if is_dataclass(annotation) and isinstance(annotation, type):
        return _object(annotation)
    raise TypeError(f"{annotation!r} cannot be decoded from JSON")


# --- values ---


def _bool(value: Any, unknown: Unknown | None) -> bool:
    if value is True or value is False:
        return value
    raise _expected("true or false", value)


def _int(value: Any, unknown: Unknown | None) -> int:
    if type(value) is int:
        return value
    if type(value) is float and value.is_integer():
        if abs(value) < MAX_EXACT:
            return int(value)
        raise _MismatchError("is too large")
    raise _expected("an integer", value)


def _float(value: Any, unknown: Unknown | None) -> float:
    if type(value) is float and math.isfinite(value):
        return value
    if type(value) is int:
        if abs(value) < MAX_EXACT:
            return float(value)
        raise _MismatchError("is too large")
    raise _expected("a number", value)


def _str(value: Any, unknown: Unknown | None) -> str:
    if type(value) is str:
        return value
    raise _expected("a string", value)


def _null(value: Any, unknown: Unknown | None) -> None:
    if value is not None:
        raise _expected("null", value)


def _any(value: Any, unknown: Unknown | None) -> Any:
    """Return the value if it has at most `MAX_DEPTH` nested levels: deeper values would break recursive code."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for item in level:
            if type(item) is dict:
                inner.extend(item.values())
            elif type(item) is list:
                inner.extend(item)
        if not inner:
            return value
        level = inner
    raise _MismatchError(f"is nested more than {MAX_DEPTH} levels deep")


_PLAIN: dict[Any, Decoder] = {bool: _bool, int: _int, float: _float, str: _str, Any: _any, type(None): _null}
_PLAIN[None] = _null


def _literal(choices: tuple[Any, ...]) -> Decoder:
    words = " or ".join(_written(choice) for choice in choices)

    def check(value: Any, unknown: Unknown | None) -> Any:
        if any(type(value) is type(choice) and value == choice for choice in choices):
            return value
        raise _MismatchError(f"must be {words}")

    return check


def _written(choice: str | bool) -> str:
    return f'"{choice}"' if isinstance(choice, str) else str(choice).lower()


def _annotated(annotation: Any) -> Decoder:
    inner, *marks = get_args(annotation)
    check = _decoder(inner)
    for mark in marks:
        if isinstance(mark, _Refused):
            check = _refusing(mark)
        elif isinstance(mark, Range):
            check = _ranged(check, mark)
        elif isinstance(mark, Length):
            check = _sized(check, mark)
    return check


def _refusing(mark: _Refused) -> Decoder:
    def refuse(value: Any, unknown: Unknown | None) -> None:
        is_off = value == 0 and mark.zero_is_off and type(value) in (int, float)
        if not (is_off or (_is_unset(value) and (mark.empty_is_off or value != {}))):
            raise _MismatchError(f"is not supported yet; {mark.advice}")

    return refuse


def _all_are(kind: type, values: list[Any]) -> bool:
    """Whether all values have exactly this type. Checks `AT_ONCE` values at a time, so that other threads can run."""
    return all(set(map(type, values[start : start + AT_ONCE])) <= {kind} for start in range(0, len(values), AT_ONCE))


def _is_unset(value: Any) -> bool:
    """Whether the value means "not set": null, false, an empty string, list or object, or a list of nulls."""
    if type(value) is list:
        return all(item is None for item in value)
    return value is None or value is False or value == "" or value == {}


def _ranged(check: Decoder, limits: Range) -> Decoder:
    low, high = limits.low, limits.high
    if high == math.inf:
        words = f"must be at least {low:.15g}"
    else:
        words = f"must be in [{low:.15g}, {high:.15g}]"

    def ranged(value: Any, unknown: Unknown | None) -> Any:
        number = check(value, unknown)
        if number is not None and not low <= number <= high:
            raise _MismatchError(words)
        return number

    return ranged


def _sized(check: Decoder, limits: Length) -> Decoder:
    def sized(value: Any, unknown: Unknown | None) -> Any:
        result = check(value, unknown)
        if isinstance(result, str | list | dict):
            if not result and limits.low:
                raise _MismatchError("must not be empty")
            if not limits.low <= len(result) <= limits.high:
                unit = "characters" if isinstance(result, str) else "items"
                raise _MismatchError(f"must have {limits.low} to {limits.high} {unit}, not {len(result)}")
        return result

    return sized


# --- structures ---


def _list(item: Any) -> Decoder:
    check = _decoder(item)
    only = item if item in (int, str) else None

    def decode_list(value: Any, unknown: Unknown | None) -> list[Any]:
        if type(value) is not list:
            raise _expected("a list", value)
        if only is not None and _all_are(only, value):  # fast path for tens of thousands of token ids
            return value
        result = []
        for index, element in enumerate(value):
            try:
                result.append(check(element, unknown))
            except _MismatchError as mismatch:
                raise mismatch.under(index) from None
        return result

    return decode_list


def _dict(item: Any) -> Decoder:
    check = _decoder(item)

    def decode_dict(value: Any, unknown: Unknown | None) -> dict[str, Any]:
        if type(value) is not dict:
            raise _expected("an object", value)
        result = {}
        for key, element in value.items():
            try:
                result[key] = check(element, unknown)
            except _MismatchError as mismatch:
                raise mismatch.under(key) from None
        return result

    return decode_dict


def _object(cls: type) -> Decoder:
    hints = get_type_hints(cls, include_extras=True)
    declared = [field for field in fields(cls) if field.init]
    keys = Fields(
        {field.name: hints[field.name] for field in declared},
        closed=getattr(cls, "closed", False),
        without_effect=getattr(cls, "without_effect", ()),
    )
    required = [f.name for f in declared if f.default is MISSING and f.default_factory is MISSING]

    def decode_object(value: Any, unknown: Unknown | None) -> Any:
        arguments = keys.decode(value, unknown)
        for name in required:
            if name not in arguments:
                raise _MismatchError("is required").under(name)
        return cls(**arguments)

    return decode_object


def _refuse_unknown(value: Mapping[str, Any], names: Collection[str]) -> None:
    for key in value:
        if key not in names:
            close = difflib.get_close_matches(key[:80], names, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise _MismatchError(f"is not known{hint}").under(key)


def _lists_none(annotation: Any) -> bool:
    if get_origin(annotation) is Annotated:
        return _lists_none(get_args(annotation)[0])
    return annotation is None or type(None) in get_args(annotation)


def _union(annotation: Any) -> Decoder:
    by_type = [member for member in get_args(annotation) if _types_of(member)]
    others = [member for member in get_args(annotation) if len(by_type) < 2 or member not in by_type]
    members = [(_decoder(member), _kinds(member)) for member in others]
    if len(by_type) > 1:
        members.append((_by_type(by_type), frozenset({dict})))
    words = _words(annotation)

    def decode_union(value: Any, unknown: Unknown | None) -> Any:
        problems: list[_MismatchError] = []
        kind = type(value)
        for check, kinds in members:
            if kind not in kinds:
                continue
            try:
                return check(value, unknown)
            except _MismatchError as mismatch:
                problems.append(mismatch)
        closest = max(problems, key=lambda mismatch: mismatch.closeness, default=None)
        if closest is None or (closest.wrong_type and not closest.trail):
            raise _expected(words, value)
        raise closest

    return decode_union


def _types_of(annotation: Any) -> tuple[str, ...]:
    """Return the values of a dataclass's field `type`. Empty if there is no such field or it is not a Literal."""
    if not (is_dataclass(annotation) and isinstance(annotation, type)):
        return ()
    hint = get_type_hints(annotation).get("type")
    return get_args(hint) if get_origin(hint) is Literal else ()


def _by_type(classes: Collection[type]) -> Decoder:
    """Return the decoder of a union of dataclasses. The object's key `type` selects the dataclass."""
    decoders = {name: _decoder(cls) for cls in classes for name in _types_of(cls)}
    *most, last = decoders
    words = f"{', '.join(most)} and {last}"

    def decode_by_type(value: Any, unknown: Unknown | None) -> Any:
        name = value.get("type")
        if type(name) is str and name in decoders:
            return decoders[name](value, unknown)
        shown = f'"{name[:40]}" ' if type(name) is str else ""
        raise _MismatchError(f"{shown}is not supported here; {words} are").under("type")

    return decode_by_type


def _kinds(annotation: Any) -> frozenset[type]:
    """Return the JSON types that a member of a union accepts."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _kinds(get_args(annotation)[0])
    if annotation in (None, type(None)):
        return frozenset({type(None)})
    if annotation in (int, float):
        return frozenset({int, float})
    if annotation in (bool, str):
        return frozenset({annotation})
    if annotation is Any:
        return frozenset({type(None), bool, int, float, str, list, dict})
    if origin is Literal:
        return frozenset(map(type, get_args(annotation)))
    return frozenset({list if origin is list else dict})


# --- messages ---


def _expected(words: str, value: Any) -> _MismatchError:
    return _MismatchError(f"must be {words}, not {_kind(value)}", wrong_type=True)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if value is True or value is False:
        return "true" if value else "false"
    if type(value) is float and not math.isfinite(value):
        return f"{value}"
    names = {str: "a string", int: "an integer", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")


_WORDS: dict[Any, str] = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


def _words(annotation: Any) -> str:
    """Return a description of the annotation for error messages, for example "a string or a list"."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_words(arg) for arg in args if arg is not type(None)))
    if origin is Annotated:
        return _words(args[0])
    if origin is list:
        return "a list"
    if origin is Literal:
        return " or ".join(_written(choice) for choice in args)
    return _WORDS.get(annotation, "an object")
