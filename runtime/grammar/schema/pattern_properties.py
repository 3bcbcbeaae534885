"""Replace overlapping patterns of `patternProperties` by disjoint patterns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from runtime.grammar.patterns.automata import TooComplexError, ambiguous, intersects, partition

Peek = Callable[[Any], Any]  # called for each unit of work; raises an error above a limit
MAX_OVERLAPPING = 16  # maximum number of patterns that overlap, directly or through other patterns


def disjoint_patterns(
    patterns: Sequence[str], peek: Peek, *, is_closed: bool
) -> list[tuple[str | int, tuple[int, ...]]] | None:
    """Return a list of disjoint patterns, so that no name matches two of them.

    Each entry is (pattern, indices). The pattern is a new pattern, or an index into `patterns`. Names that match it
    match the patterns in `patterns` with these indices. An entry without indices has the names on which ECMA-262 and
    Python differ; outputs must not contain these names. Closed objects (`additionalProperties: false`, `is_closed`)
    need no such entry, because they allow no other names.

    If the patterns are too complex to compare, return None for an open object. For a closed object, return the patterns
    unchanged; llguidance refuses them later if they overlap.
    """
    groups = _overlapping(patterns, peek)
    unchanged = [(index, (index,)) for index in range(len(patterns))]
    is_disjoint = len(groups) == len(patterns)
    if is_disjoint and is_closed:
        return [*unchanged]
    try:
        names = ambiguous(patterns) if is_disjoint else None
        if names is not None:
            return [*unchanged, *([(names, ())] if names else [])]
        parts: list[tuple[str | int, tuple[int, ...]]] = []
        for group in groups if is_closed else [[*range(len(patterns))]]:
            if len(group) > MAX_OVERLAPPING:
                raise TooComplexError
            classes = partition([patterns[index] for index in group], peek, with_ambiguous=not is_closed)
            parts += [(text, tuple(group[each] for each in indices)) for text, indices in classes]
    except TooComplexError:
        return [*unchanged] if is_closed else None
    return parts if not is_disjoint or any(not indices for _, indices in parts) else [*unchanged]


def _overlapping(patterns: Sequence[str], peek: Peek) -> list[list[int]]:
    """Return the indices of the patterns in groups, so that no name matches patterns of two groups."""
    groups: list[list[int]] = []
    for index, pattern in enumerate(patterns):
        joined, others = [index], []
        for group in groups:
            if any(_may_intersect(patterns[other], pattern, peek) for other in group):
                joined += group
            else:
                others.append(group)
        groups = [*others, sorted(joined)]
    return groups


def _may_intersect(one: str, other: str, peek: Peek) -> bool:
    """Whether a name may match both patterns. False for too complex patterns, which llguidance compares again."""
    try:
        return intersects([one, other], peek)
    except TooComplexError:
        return False
