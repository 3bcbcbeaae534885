"""The texts of a pattern that matches only a few, such as `^[A-D]$`."""

from __future__ import annotations

from functools import lru_cache

from runtime.grammar.automata import TooComplexError, characters
from runtime.grammar.patterns import MAX_SEEN, Either, Node, PatternError, Repeat, Row, Text, rows

MAX_CHARACTERS = 256  # of a text: repetitions within each other write any length shortly


@lru_cache(256)
def few_texts(pattern: str, most: int) -> tuple[str, ...]:
    """Sorted; nothing where it matches more than `most` or longer ones, or that is not plain to see."""
    found: set[str] = set()
    try:
        if len(pattern) > MAX_SEEN:
            return ()
        for at_start, row, at_end in rows(pattern, is_wide=False):
            if not (at_start and at_end):
                return ()
            found |= _of_row(row, most)
    except (PatternError, TooComplexError):
        return ()
    return tuple(sorted(found)) if len(found) <= most else ()


def _of_row(row: Row, most: int) -> set[str]:
    """Raises `TooComplexError` beyond `most` texts or `MAX_CHARACTERS`."""
    found = {""}
    for node in row:
        found = _followed(found, _of_node(node, most), most)
    return found


def _of_node(node: Node, most: int) -> set[str]:
    found: set[str] = set()
    if isinstance(node, Text):
        ranges = characters(node.regex)
        if sum(high - low + 1 for low, high in ranges) <= most:
            return {chr(code) for low, high in ranges for code in range(low, high + 1)}
    elif isinstance(node, Either):
        found = {text for branch in node.branches for text in _of_row(branch, most)}
    elif isinstance(node, Repeat) and node.high is not None and node.high <= most:
        again, item = {""}, _of_node(node.item, most)
        for count in range(node.high + 1):
            if count >= node.low:
                found |= again
            if count < node.high:
                again = _followed(again, item, most)
    if not 0 < len(found) <= most:
        raise TooComplexError
    return found


def _followed(texts: set[str], others: set[str], most: int) -> set[str]:
    longest = sum(max(map(len, each), default=0) for each in (texts, others))
    if len(texts) * len(others) > most or longest > MAX_CHARACTERS:
        raise TooComplexError
    return {text + other for text in texts for other in others}
