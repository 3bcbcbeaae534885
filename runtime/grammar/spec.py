"""What a request's output must match, as handlers say it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

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
    # What the client called it, for errors; None: the kind.
    param: str | None = field(default=None, compare=False)
