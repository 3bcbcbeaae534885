"""The grammar of a request's output, as route handlers describe it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


class InvalidGrammar(ValueError):
    """The grammar is invalid, too large or not enforceable. The message says what is wrong and where."""


MAX_WHITESPACE = 256
# As much white space as serializers write. With more, a model could write blanks without end.
WHITESPACE = r"(?: |\r?\n[ \t]{0,40})"
# Allowed parts of a whitespace pattern: blanks, classes of blanks, groups and repetitions.
_BLANK_PATTERN = re.compile(
    r"(?:\\[ntrs]|[ \t\n\r]|\[(?:\\[ntr]|[ \t\n\r])+\]|\((?:\?:)?|[)|*+?]|\{\d{1,4}(?:,\d{0,4})?\})*"
)

Kind = Literal["json_object", "json_schema", "regex", "ebnf", "structural_tag", "choice", "lark"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that an output must match from its first token to its end.

    `source` is the text of a JSON schema, a regular expression, an EBNF grammar, a structural tag (JSON), a JSON list
    of choices, or a grammar in llguidance's dialect of Lark. It is empty for a json_object.
    """

    kind: Kind
    source: str = ""
    # Regular expression of the white space between JSON tokens. None: the server's default.
    whitespace: str | None = None
    # The grammar begins after this text, which ends a free part of the output. None: it begins with the first token.
    begins_after: str | None = None
    # With `begins_after`: the output has a free part only if its first token is this one. None: it always has one.
    opened_by: int | None = None
    must_begin: bool = True  # with `begins_after`: whether the output must contain this text before it may end
    # The client's name of the grammar, for errors. None: the grammar's kind.
    param: str | None = field(default=None, compare=False)
    # For Lark grammars that Penstock wrote: rule -> the client's name of its schema, for errors.
    places: Mapping[str, str] = field(default_factory=dict[str, str], compare=False)


@dataclass(frozen=True, slots=True)
class ThinkingLimit:
    """A limit on reasoning. When it is reached, the reasoning block is closed by force."""

    max_tokens: int  # maximum number of tokens in the block, before its closing mark
    open: str | None  # mark that may open the block at the output's start; None: the output begins inside
    close: str
    param: str = "max_thinking_tokens"
    reopens: bool = False  # whether further blocks may follow, whose tokens count too
    also_close: tuple[str, ...] = ()  # other texts that end the block


def check_whitespace(pattern: str) -> str:
    """Return the pattern for the backend. Raises `InvalidGrammar` if it may match anything but JSON blanks."""
    if len(pattern) > MAX_WHITESPACE or _BLANK_PATTERN.fullmatch(pattern) is None:
        raise InvalidGrammar(
            f"the whitespace pattern {pattern!r:.80} must be made of blanks, such as [ \\n\\t]{{0,20}}"
        )
    return pattern.replace(r"\s", r"[ \t\n\r]")
