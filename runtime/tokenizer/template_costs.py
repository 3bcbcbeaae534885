"""Cost estimates for calls in chat templates.

An estimate is computed from the arguments before the call. It is the size of the result in bytes, or infinity if the
call must be refused.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

MAX_WIDTH = 1_000_000  # maximum padding in characters
MAX_DIGITS = 400  # maximum number of digits to which a number is rounded
_PERCENT_WIDTH = re.compile(r"%[^%a-zA-Z]*?(\d+)(?:\.(\d+))?")
_FORMAT_WIDTH = re.compile(r"[:.][^{}:]*?(\d+)(?:\.(\d+))?")
BIG_TYPES = (str, bytes, int, list, tuple, dict, set)


class TemplateLimit(Exception):
    """Raised if rendering takes too much time or memory."""


def size_of(value: Any) -> int:
    return sys.getsizeof(value) if isinstance(value, BIG_TYPES) else 0


def _text_size(value: Any) -> int:
    return size_of(value if isinstance(value, str | bytes) else str(value))


def product_cost(left: Any, right: Any) -> float:
    if isinstance(left, int) and isinstance(right, int):
        return min(left.bit_length(), right.bit_length()) ** 2  # here an estimate of the time, in place of bytes
    if isinstance(left, int):
        left, right = right, left
    return float(size_of(left)) * max(right, 0) if isinstance(right, int) else 0


def power_cost(left: Any, right: Any) -> float:
    whole = isinstance(left, int) and isinstance(right, int)
    return float(left.bit_length() * max(right, 0)) ** 2 if whole else 0


def check_format(pattern: str | bytes, values: Any) -> None:
    """Raise `TemplateLimit` if the widths or precisions in a `%` format would fill memory."""
    text = pattern.decode("latin-1") if isinstance(pattern, bytes) else pattern
    parts = values if isinstance(values, tuple) else (values,)
    starred = "*" in text and any(isinstance(part, int) and part > MAX_WIDTH for part in parts)
    if starred or _widths(_PERCENT_WIDTH, text) > MAX_WIDTH:
        raise TemplateLimit("memory")


def _widths(form: re.Pattern[str], text: str) -> float:
    """Return the sum of all widths and precisions in a format."""
    return sum(float(number) for found in form.findall(text) for number in found if number)


def _width(_: Any, width: Any = 80, *rest: Any, **more: Any) -> float:
    return _too_much(width, MAX_WIDTH)


def _too_much(value: Any, limit: int) -> float:
    return float("inf") if isinstance(value, int | float) and abs(value) > limit else 0.0


def _rounding(_: Any, precision: Any = 0, method: Any = "common") -> float:
    return _too_much(precision, MAX_DIGITS)


def _replacing(text: Any, old: Any, new: Any, count: Any = None) -> float:
    text, old, new = (value if isinstance(value, str | bytes) else str(value) for value in (text, old, new))
    return float(size_of(text)) + float(text.count(old)) * size_of(new)  # type: ignore[arg-type]


def _splitting(text: Any, *separator: Any, **more: Any) -> float:
    named = more.get("sep", separator[0] if separator else None)
    pieces = text.count(named) if isinstance(named, type(text)) and named else len(text) // 2
    return 64.0 * pieces + size_of(text)


def _joining(separator: Any, values: Any = (), *rest: Any, **more: Any) -> float:
    num = len(values) if hasattr(values, "__len__") else MAX_WIDTH // 10
    return float(num) * len(separator) if isinstance(separator, str | bytes) else 0


def _filter_joining(values: Any, d: Any = "", attribute: Any = None) -> float:
    many = isinstance(values, Iterable) and hasattr(values, "__len__")
    num = len(values) if many else MAX_WIDTH // 10  # type: ignore[arg-type]
    return float(num) * _text_size(d)


def _indenting(text: Any, width: Any = 4, *rest: Any, **more: Any) -> float:
    step = width if isinstance(width, int) else len(str(width))
    return float(str(text).count("\n") + 1) * step


def _wrapping(
    text: Any, width: Any = 79, break_long_words: Any = True, wrapstring: Any = None, *rest: Any, **more: Any
) -> float:
    return float(len(str(text))) * (1 + len(str(wrapstring or "")))


def _pieces(values: Any, num: Any = 1, fill_with: Any = None, *, linecount: Any = None, slices: Any = None) -> float:
    num = linecount or slices or num
    size = len(values) if hasattr(values, "__len__") else MAX_WIDTH // 10
    return 64.0 * size + _too_much(num, MAX_WIDTH // 10) + 8.0 * (num if isinstance(num, int) else 0)


def _listing(values: Any) -> float:
    return 40.0 * len(values) if hasattr(values, "__len__") else 0.0


def _to_json(
    value: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, sort_keys: Any = False
) -> float:
    step = indent if isinstance(indent, int) else len(str(indent or ""))
    between = sum(len(str(each)) for each in separators or ())
    return _depths(value) * step + between * _depths(value) if step or between > 8 else 0.0


def _depths(value: Any) -> float:
    """Return the sum of the depths of all parts of a value. The time to indent the value is proportional to it."""
    total, rest = 0.0, [(value, 1)]
    while rest:
        part, depth = rest.pop()
        total += depth
        if isinstance(part, dict):
            rest.extend((each, depth + 1) for each in part.values())
        elif isinstance(part, list | tuple):
            rest.extend((each, depth + 1) for each in part)
    return total


def _summing(values: Any, attribute: Any = None, start: Any = 0) -> float:
    return 0.0 if isinstance(start, int | float) else float("inf")  # refuse to add lists, which takes quadratic time


def _expanding(text: Any, tabsize: Any = 8) -> float:
    tabs = text.count("\t" if isinstance(text, str) else b"\t")
    return float(tabs) * max(tabsize, 0) + _too_much(tabsize, MAX_WIDTH)


def _to_bytes(_: Any, length: Any = 1, *rest: Any, **more: Any) -> float:
    return _width(_, length)


def _translating(text: Any, table: Any, *rest: Any) -> float:
    longest = max((size_of(value) for value in table.values()), default=0) if isinstance(table, dict) else 8
    return float(len(text)) * longest


def _formatting(pattern: Any, *args: Any, **more: Any) -> float:
    """Return infinity if `str.format` would pad too much, else 0. Widths may also be arguments."""
    values = (*args, *more.values())
    wide = any(isinstance(value, int) and value > MAX_WIDTH for value in values)
    nested = re.search(r"\{[^{}]*\{", pattern) is not None
    too_wide = _widths(_FORMAT_WIDTH, pattern) > MAX_WIDTH or (wide and nested)
    return float("inf") if too_wide else 0.0


def _percent(pattern: Any, *args: Any, **more: Any) -> float:
    check_format(str(pattern), args or tuple(more.values()))
    return 0.0


OF_TEXT = frozenset(  # filters that read every part of a nested argument; each part is billed as one step
    (
        *("string", "join", "tojson", "pprint", "format", "replace", "upper", "lower", "title", "capitalize"),
        *("trim", "center", "indent", "escape", "e", "forceescape", "safe", "urlencode", "urlize", "sort"),
        *("wordcount", "wordwrap", "striptags", "truncate", "xmlattr", "unique", "min", "max", "groupby"),
        "dictsort",
    )
)
FILTER_COSTS: dict[str, Callable[..., float]] = {
    "batch": _pieces,
    "center": _width,
    "format": _percent,
    "indent": _indenting,
    "join": _filter_joining,
    "list": _listing,
    "pprint": _depths,
    "replace": _replacing,
    "round": _rounding,
    "slice": _pieces,
    "sum": _summing,
    "tojson": _to_json,
    "wordwrap": _wrapping,
}
METHOD_COSTS: dict[str, Callable[..., float]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _width),
    **dict.fromkeys(("format", "format_map"), _formatting),
    **dict.fromkeys(("split", "rsplit", "splitlines"), _splitting),
    "expandtabs": _expanding,
    "join": _joining,
    "replace": _replacing,
    "to_bytes": _to_bytes,
    "translate": _translating,
}
