"""What is wrong with a grammar."""

from __future__ import annotations


class InvalidGrammar(ValueError):
    """The grammar is malformed, too large, or asks for what cannot be enforced; the message says what and where."""
