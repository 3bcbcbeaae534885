"""Find conditions for the schemas of a `oneOf`, so that no value satisfies two of the schemas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runtime.grammar.schema.complement import NoComplementError, complement
from runtime.grammar.schema.disjoint import are_disjoint, conjuncts, property_of

Schema = Any
Peek = Callable[[Any], Any]  # `References.peek`: returns the target of a reference, and any other schema unchanged
MAX_UNKNOWN = 8  # maximum number of properties in the condition "requires a property that the other schema forbids"


def exclusive(options: list[Schema], peek: Peek) -> list[list[Schema]] | tuple[int, int]:
    """Return further conditions for each schema of a `oneOf`, which make the schemas disjoint.

    For each pair that is not known to be disjoint, each schema A gets the first possible condition against the other
    schema B:
    1. A requires a property whose schemas in A and B are disjoint.
    2. A forbids a property that B requires.
    3. A requires a property that B forbids.
    4. A must satisfy the complement of B.
    If a pair still overlaps, its two indices are returned instead.
    """
    schemas = [peek(option) for option in options]
    conditions: list[list[Schema]] = [[] for _ in options]
    for index in range(len(options)):
        for other in range(index + 1, len(options)):
            if are_disjoint(schemas[index], schemas[other], peek):
                continue
            for one, two in ((index, other), (other, index)):
                condition = _distinction(schemas[one], schemas[two], peek)
                if condition is None:
                    condition = _partial_complement(schemas[two], peek)
                if are_disjoint(schemas[one], condition, peek):
                    return index, other
                if condition not in conditions[one]:
                    conditions[one].append(condition)
    return conditions


def _partial_complement(schema: Schema, peek: Peek) -> Schema:
    """Return the complement of `schema`, or False (which accepts no value) if it cannot be written."""
    try:
        return complement(schema, peek, known=())
    except NoComplementError:
        return False


def _distinction(one: Schema, other: Schema, peek: Peek) -> Schema | None:
    """Return a condition that makes values of `one` violate `other`, or None if no simple condition is known."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return None
    ones, others = conjuncts(one, peek), conjuncts(other, peek)
    names, other_names = (
        {name: None for part in parts for name in _names(part.get("properties"))} for parts in (ones, others)
    )
    for name in names:
        if name in other_names and are_disjoint(property_of(ones, name), property_of(others, name), peek):
            return {"type": "object", "required": [name]}
    required, other_required = (
        [name for part in parts for name in _list(part.get("required"))] for parts in (ones, others)
    )
    for name in other_required:
        if isinstance(name, str) and name not in required:
            return {"type": "object", "properties": {name: False}}
    if other.get("additionalProperties") is False and not other.get("patternProperties"):
        unknown = [name for name in names if name not in other_names][:MAX_UNKNOWN]
        if unknown:
            return {"type": "object", "anyOf": [{"required": [name]} for name in unknown]}
    return None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _names(value: Any) -> list[str]:
    return list(value) if isinstance(value, dict) else []
