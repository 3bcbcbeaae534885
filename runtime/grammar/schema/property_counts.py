"""Rewrite `minProperties` and `maxProperties`, which llguidance enforces only if no property is optional."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

Schema = Any
Peek = Callable[[Any], Any]  # `References.peek`: returns the target of a reference, and any other schema unchanged
MAX_NAMES = 2_000  # maximum number of optional names, summed over all alternatives


def alternatives(
    optional: Sequence[str], num_required: int, least: int, most: int | None, *, open_: bool
) -> list[Schema] | None:
    """Return one schema for each allowed set of optional properties, or None if there are too many sets.

    `open_` says whether unlisted names are allowed. At most one unlisted name counts towards the minimum, because JSON
    text may repeat a name, which a parser reads as one property.
    """
    count, least = len(optional), max(0, least - num_required)
    most = None if most is None else max(0, most - num_required)
    sizes = [least] if most is None else range(max(0, least - open_), min(most, count) + 1)
    num_ways = sum(math.comb(count, size) for size in sizes) + (
        math.comb(count, least - 1) if most is None and least else 0
    )
    if num_ways * count > MAX_NAMES:
        return None
    ways: list[Schema] = []
    for size in sizes:
        for present in combinations(optional, size):
            # Without a maximum, the properties after the last one in `present` stay optional.
            end = count if most is not None else optional.index(present[-1]) if present else 0
            limits: Schema = {}
            if size < least:
                limits["minProperties"] = num_required + least
            if open_ and most is not None:
                limits["maxProperties"] = num_required + most
            ways.append(_with_exactly(present, optional[:end], limits))
    if most is None and open_ and least:
        limits = {"minProperties": num_required + least}
        ways += [_with_exactly(present, optional, limits) for present in combinations(optional, least - 1)]
    return ways


def _with_exactly(present: Sequence[str], optional: Sequence[str], limits: Schema) -> Schema:
    absent = {name: False for name in optional if name not in present}
    return {
        "type": "object",
        "required": [*present],
        **({"properties": absent} if absent else {}),
        **limits,
    }


def may_exceed_maximum(schema: Schema, peek: Peek) -> bool:
    """Whether an object may require more names than its `maxProperties`. llguidance would then ignore the limit.

    `schema` must already be rewritten for the backend.
    """
    pending: list[tuple[Schema, frozenset[str], int, float]] = [(schema, frozenset(), 0, math.inf)]
    num_visited = 0
    while pending:
        option, required, num_elsewhere, most = pending.pop()
        num_visited += 1
        here, limit, choices = _required(option, peek)
        required, most = required | here, min(most, limit)
        if num_visited > MAX_NAMES or most < len(required) + num_elsewhere:
            return True
        sizes = [max((len(_required(each, peek)[0]) for each in choice), default=0) for choice in choices]
        for choice, size in zip(choices, sizes, strict=True):
            others = num_elsewhere + sum(sizes) - size
            pending += [(each, required, others, most) for each in choice]
    return False


def _required(schema: Schema, peek: Peek) -> tuple[frozenset[str], float, list[list[Schema]]]:
    """Return the names that an object's schema always requires, its `maxProperties` or inf, and its `anyOf` lists."""
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
