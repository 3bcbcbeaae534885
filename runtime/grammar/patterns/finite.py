"""Recognise patterns that match only a few texts, for example `^[A-D]$`."""

from __future__ import annotations

from runtime.grammar.patterns.automata import TooComplexError, characters
from runtime.grammar.patterns.expressions import Either, Node, PatternError, Repeat, Row, Text, rows


def matches_few(pattern: str, most: int) -> bool:
    """Whether it is certain that at most `most` texts match the pattern. False for a malformed pattern."""
    total = 0
    try:
        for at_start, row, at_end in rows(pattern, is_wide=False):
            total += _count_row(row, most) if at_start and at_end else most + 1
    except (PatternError, TooComplexError):
        return False
    return total <= most


def _count_row(row: Row, most: int) -> int:
    total = 1
    for node in row:
        total = min(total * _count(node, most), most + 1)
    return total


def _count(node: Node, most: int) -> int:
    """Return an upper bound on the number of matching texts. Counting stops at `most` + 1."""
    if isinstance(node, Text):
        total = sum(high - low + 1 for low, high in characters(node.regex))
    elif isinstance(node, Either):
        total = sum(_count_row(branch, most) for branch in node.branches)
    elif isinstance(node, Repeat):
        times = _count(node.item, most)
        if times == 1 and node.high is not None:
            total = node.high - node.low + 1
        elif node.high is None or (times and node.high > most):
            total = most + 1
        else:
            total = sum(min(times**count, most + 1) for count in range(node.low, node.high + 1))
    else:
        raise TooComplexError  # the node is an anchor
    return min(total, most + 1)
