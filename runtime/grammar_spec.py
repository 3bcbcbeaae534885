"""The grammar of a request's output, as route handlers describe it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


class InvalidGrammar(ValueError):
    """The grammar is invalid, too large or cannot be enforced. The message says what is wrong and where."""


MAX_WHITESPACE = 256
# White space that serializers write between JSON tokens. More must not be allowed, or a model could write endless
# blanks.
WHITESPACE = r"(?: |\r?\n[ \t]{0,40})"
# The parts that a whitespace pattern may have: blanks, classes of blanks, groups and repetitions.
_BLANK_PATTERN = re.compile(
    r"(?:\\[ntrs]|[ \t\n\r]|\[(?:\\[ntr]|[ \t\n\r])+\]|\((?:\?:)?|[)|*+?]|\{\d{1,4}(?:,\d{0,4})?\})*"
)

Kind = Literal["json_object", "json_schema", "regex", "ebnf", "structural_tag", "choice", "lark"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that an output must match from its first token to its end.

    `source` is the text of a JSON schema, a regular expression, an EBNF grammar, a structural tag (JSON), a JSON list
    of choices, or a grammar in llguidance's dialect of Lark. `source` is empty for any JSON object ("json_object").
    """

    kind: Kind
    source: str = ""
    # Regular expression of the white space between JSON tokens. None: the server's default.
    whitespace: str | None = None
    # Text after which the grammar applies; before it, the output is free. None: the grammar applies from the first
    # token.
    begins_after: str | None = None
    # With `begins_after`: the output has a free part only if this is its first token. None: it always has one.
    opened_by: int | None = None
    must_begin: bool = True  # with `begins_after`: whether the output must contain this text before it may end
    # The name by which the client knows the grammar, for errors. None: the kind of the grammar.
    param: str | None = field(default=None, compare=False)
    # For Lark grammars that Penstock writes: rule -> name by which the client knows its schema, for errors.
    places: Mapping[str, str] = field(default_factory=dict[str, str], compare=False)


@dataclass(frozen=True, slots=True)
class ThinkingLimit:
    """A limit on reasoning tokens. When it is reached, the closing mark of the reasoning block is forced."""

    max_tokens: int  # maximum number of tokens in the block, before its closing mark
    open: str | None  # mark that may open the block at the output's start; None: the output begins inside the block
    close: str
    param: str = "max_thinking_tokens"
    reopens: bool = False  # whether more blocks may follow; their tokens count towards the same limit
    also_close: tuple[str, ...] = ()  # other texts that end the block


def check_whitespace(pattern: str) -> str:
    """Return the pattern for the backend. Raises `InvalidGrammar` if it may match other characters than JSON blanks."""
    if len(pattern) > MAX_WHITESPACE or _BLANK_PATTERN.fullmatch(pattern) is None:
        raise InvalidGrammar(
            f"the whitespace pattern {pattern!r:.80} must be made of blanks, such as [ \\n\\t]{{0,20}}"
        )
    return pattern.replace(r"\s", r"[ \t\n\r]")
