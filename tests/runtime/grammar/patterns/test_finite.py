"""Patterns that match only a few texts."""

from __future__ import annotations

import pytest

from runtime.grammar.patterns.finite import matches_few


@pytest.mark.parametrize(
    ("pattern", "few"),
    [
        ("^[a-c]$", True),
        ("^(yes|no)?$", True),
        ("^a{0,2}b$", True),
        ("^(a{16}){16}$", True),
        ("^a{300}$", True),
        (r"^[^\s\S]$", True),
        ("^(((){255}){255}){255}$", True),
        (r"^\w$", True),
        ("^a|b$", False),
        ("[ab]", False),
        ("^a*$", False),
        ("^[a-z]{2}$", False),
        ("^[a-z]{1,30}$", False),
        ("^((((a{0,200}){0,200}){0,200}){0,200}){0,200}$", False),
        ("^(", False),
    ],
)
def test_the_number_of_texts_is_bounded(pattern: str, *, few: bool) -> None:
    assert matches_few(pattern, 256) is few
