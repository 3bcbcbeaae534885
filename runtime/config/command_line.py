"""Reads option values from the words of a command line.

Unlike argparse, which stops at the first mistake, this parser reports all mistakes together.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from runtime.config.option_table import Option, Options
from runtime.config.suggestions import closest
from runtime.config.values import from_words
from runtime.errors import ConfigurationError

COMMANDS = ("serve", "explain", "bench", "batch", "quantize", "shard", "models", "top", "help")
_NUMBER = re.compile(r"-\.?\d")


def read(options: Options, words: Sequence[str], refusals: list[str]) -> dict[str, Any]:
    """Return the values of the given options by name. If a flag is repeated, the last value is used.

    If an option cannot be read, it is left out of the result, and an error message is appended to `refusals`.
    """
    values: dict[str, Any] = {}
    for flag, rest in _split(words, refusals):
        try:
            option, negated = options.by_flag(flag)
            value = _value(option, negated, rest)
            if option.name == "config" and "config" in values:
                raise ConfigurationError("--config can be given only once.")
            values[option.name] = value
        except ConfigurationError as refusal:
            refusals.extend(refusal.refusals)
    return values


def _stray(word: str) -> str:
    if word == "serve":
        return "unknown command 'serve': without one a server starts; leave it out."
    if "/" in word:
        return f"{word!r} stands alone: a model is given by `penstock serve {word}` or --model-path {word}."
    likely = closest(word, COMMANDS)
    hint = f"; did you mean {likely}?" if likely else "; options begin with two dashes."
    return f"unknown command {word!r}{hint}"


def _value(option: Option, negated: bool, words: list[str]) -> Any:
    if not negated:
        return from_words(option, words)
    if words:
        raise ConfigurationError(f"{option.negated_flag} takes no value.")
    return False


def _split(words: Sequence[str], refusals: list[str]) -> list[tuple[str, list[str]]]:
    """Split the words into flags with the values that follow them."""
    cut: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("-") and len(word) > 1 and not _NUMBER.match(word):
            flag, equals, value = word.partition("=")
            cut.append((flag, [value] if equals else []))
        elif cut:
            cut[-1][1].append(word)
        else:
            refusals.append(_stray(word))
    return cut
