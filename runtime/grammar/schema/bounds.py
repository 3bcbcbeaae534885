"""Rewrite limits of numbers in JSON schemas, so that llguidance enforces them exactly."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

from runtime.grammar.schema.formats import INTEGER_BITS
from runtime.grammar.schema.references import Unsupported

MAX_EXACT = 2**53  # up to this number, float64 represents every integer exactly
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
Schema = dict[str, Any]


def limit(value: Any, pointer: str, schema: Schema) -> Schema:
    """Rewrite one of the keywords for limits (`minimum`, `exclusiveMaximum`, ...). `pointer` ends with the keyword."""
    keyword = pointer.rpartition("/")[2]
    value = _within_exact(value, keyword)
    check_number(value, keyword, pointer)
    limit = "minimum" if keyword.endswith("inimum") else "maximum"
    exclusive = f"exclusive{limit.capitalize()}"
    if keyword == exclusive and abs(value) >= MAX_EXACT:
        raise Unsupported(keyword, pointer, "integers beyond 2^53 are not enforced exactly")
    beside = schema.get(exclusive if keyword == limit else limit)
    if schema.get("type") == "integer":
        return {keyword: value}
    if keyword == limit and not is_number(beside):
        return _limited(limit, value)
    # A JSON parser reads 1.00000000000000000001 as 1. Therefore an exclusive limit becomes an inclusive limit at the
    # next number.
    both = {
        keyword: value,
        **({exclusive if keyword == limit else limit: beside} if is_number(beside) else {}),
    }
    upwards = limit == "minimum"
    limits = [_next(each, upwards) if name == exclusive else each for name, each in both.items()]
    return _limited(limit, max(limits) if upwards else min(limits))


def integer_range(name: str) -> Schema:
    bits, unsigned = INTEGER_BITS[name], name.startswith("u")
    low, high = (0, 2**bits - 1) if unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return {"type": "integer", "minimum": low, "maximum": high}


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _within_exact(value: Any, keyword: str) -> Any:
    """Return the limit, clipped to the range in which float64 distinguishes all integers."""
    if not isinstance(value, bool) and isinstance(value, int | float):
        inside = MAX_EXACT - keyword.startswith("exclusive")
        if keyword.endswith("aximum") and value > inside:
            return inside
        if keyword.endswith("inimum") and value < -inside:
            return -inside
    return value


def check_number(value: Any, keyword: str, pointer: str) -> None:
    if not is_number(value):
        raise Unsupported(keyword, pointer, "it must be a number")
    if abs(value) > MAX_EXACT:
        raise Unsupported(keyword, pointer, "integers beyond 2^53 are not enforced exactly")


def _limited(keyword: str, limit: float) -> Schema:
    """Return a schema with this minimum or maximum, in so few digits that llguidance does not round it.

    llguidance wrongly rejects some numbers with fewer digits than the limit, for example 4.9 for `maximum: 4.95`. The
    returned schema allows these numbers by an enum.
    """
    upwards = keyword == "minimum"
    exact, step = Decimal(repr(limit)), _step(limit)
    if exact % step:
        exact = exact.quantize(step, ROUND_CEILING if upwards else ROUND_FLOOR)
    digits, _, behind = format(exact, "f").lstrip("-").partition(".")
    written = {keyword: float(exact) if behind.strip("0") else int(exact)}
    if (exact > 0) == upwards or len(behind) < 2:
        return written
    left_out = [math.copysign(float(f"{digits}.{behind[:end]}"), exact) for end in range(1, len(behind))]
    return {"allOf": [{"anyOf": [written, {"enum": [value for value in left_out if value]}]}]}


def _step(value: float) -> Decimal:
    """Return the unit to which limits near `value` are rounded: 12 digits, at most 9 of them after the point."""
    return Decimal(1).scaleb(-min(9, max(0, 12 - len(str(int(abs(value)))))))


def _next(value: float, upwards: bool) -> float:
    """Return the next limit above `value`, or below it if `upwards` is false."""
    step = _step(value)
    near = Decimal(repr(value)).quantize(step, ROUND_FLOOR if upwards else ROUND_CEILING)
    found = near + step if upwards else near - step
    return int(found) if found == int(found) else float(found)
