"""What a request's output must match, as handlers say it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


class InvalidGrammar(ValueError):
    """The grammar is malformed, too large, or asks for what cannot be enforced; the message says what and where."""


MAX_WHITESPACE = 256
# Enough for what serializers write, and no more: a model must not go on with blanks for ever.
WHITESPACE = r"(?: |\r?\n[ \t]{0,40})"
# What a whitespace pattern may be made of: blanks, classes of them, groups and repetitions.
_BLANK_PATTERN = re.compile(
    r"(?:\\[ntrs]|[ \t\n\r]|\[(?:\\[ntr]|[ \t\n\r])+\]|\((?:\?:)?|[)|*+?]|\{\d{1,4}(?:,\d{0,4})?\})*"
)

Kind = Literal["json_object", "json_schema", "regex", "ebnf", "structural_tag", "choice", "lark"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output must match, from its first token to its end.

    `source` is the text of a JSON schema, a regular expression, an EBNF grammar, a structural tag (JSON), a JSON list
    of the texts to choose from, or a grammar in llguidance's dialect of Lark; for a json_object it is empty.
    """

    kind: Kind
    source: str = ""
    # Regular expression of what may stand between the tokens of JSON; None: what the server takes by default.
    whitespace: str | None = None
    # The output is free up to and with this text, and constrained behind it; None: constrained from its first token.
    begins_after: str | None = None
    # With `begins_after`: only where this token begins the output; else it is constrained from its first token.
    opened_by: int | None = None
    # What the client called it, for errors; None: the kind.
    param: str | None = field(default=None, compare=False)
    # Of Lark that we wrote: what the client called the schema in a rule, by the rule's name; for errors.
    places: Mapping[str, str] = field(default_factory=dict[str, str], compare=False)


@dataclass(frozen=True, slots=True)
class ThinkingLimit:
    """How long a model may think: its block of reasoning is then closed by force."""

    max_tokens: int  # within the block, before its closing mark
    open: str | None  # the mark that an output may begin with; None: it begins within the block
    close: str
    param: str = "max_thinking_tokens"
    reopens: bool = False  # further blocks may follow; they count too


def check_whitespace(pattern: str) -> str:
    """The pattern as the backend reads it. Raises `InvalidGrammar` where it may match what is no blank of JSON."""
    if len(pattern) > MAX_WHITESPACE or _BLANK_PATTERN.fullmatch(pattern) is None:
        raise InvalidGrammar(
            f"the whitespace pattern {pattern!r:.80} must be made of blanks, such as [ \\n\\t]{{0,20}}"
        )
    return pattern.replace(r"\s", r"[ \t\n\r]")
