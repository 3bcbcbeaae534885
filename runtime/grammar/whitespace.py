"""What may stand between the tokens of constrained JSON."""

from __future__ import annotations

import re

from runtime.grammar.errors import InvalidGrammar

MAX_CHARACTERS = 256
# Enough for what serializers write, and no more: a model must not go on with blanks for ever.
WHITESPACE = r"(?: |\r?\n[ \t]{0,40})"
# What a whitespace pattern may be made of: blanks, classes of them, groups and repetitions.
_BLANK_PATTERN = re.compile(
    r"(?:\\[ntrs]|[ \t\n\r]|\[(?:\\[ntr]|[ \t\n\r])+\]|\((?:\?:)?|[)|*+?]|\{\d{1,4}(?:,\d{0,4})?\})*"
)


def check_whitespace(pattern: str) -> str:
    """The pattern as the backend reads it. Raises `InvalidGrammar` where it may match what is no blank of JSON."""
    if len(pattern) > MAX_CHARACTERS or _BLANK_PATTERN.fullmatch(pattern) is None:
        raise InvalidGrammar(
            f"the whitespace pattern {pattern!r:.80} must be made of blanks, such as [ \\n\\t]{{0,20}}"
        )
    return pattern.replace(r"\s", r"[ \t\n\r]")
