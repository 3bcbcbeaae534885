"""Arrays without repetitions, where few values may be items: written out."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, permutations
from typing import Any

MAX_UNIQUE = 7  # values; of more than MAX_ARRANGED each array is there in the order of the schema alone
MAX_ARRANGED = 4

Schema = Any


def unique_arrays(items: Schema, schema: Schema) -> list[list[Any]] | None:
    """All arrays of different values that `items` lists; None where it does not, or lists too many.

    `schema` is the array's own: its minItems and maxItems are looked at.
    """
    if not isinstance(items, dict):
        return None
    values = items.get("enum", [items["const"]] if "const" in items else None)
    if not isinstance(values, list) or any(not isinstance(value, str | bool | None) for value in values):
        return None
    if items.keys() - {"enum", "const", "type", "title", "description", "default", "examples", "$comment"}:
        return None
    values = list(dict.fromkeys(values))
    low, high = schema.get("minItems", 0), schema.get("maxItems", len(values))
    if len(values) > MAX_UNIQUE or not isinstance(low, int) or not isinstance(high, int):
        return None
    found: list[list[Any]] = []
    for count in range(low, min(high, len(values)) + 1):
        chosen: Iterable[tuple[Any, ...]] = (
            permutations(values, count) if len(values) <= MAX_ARRANGED else combinations(values, count)
        )
        found += [list(each) for each in chosen]
    return found
