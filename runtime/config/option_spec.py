"""What an option says about itself: help, spellings, allowed values, and whether it does anything yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Json = Mapping[str, Any]  # the type of an option whose value is a JSON object


class Outcome(StrEnum):
    """What becomes of an option that somebody sets."""

    WORKS = "works"
    PLANNED = "planned"  # refused unless it keeps its default
    INERT = "inert"  # accepted for compatibility, without effect; said in help and logged once


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionSpec:
    """The metadata of one option, written as `name: Annotated[type, OptionSpec("help", ...)] = default`.

    The annotated type fixes how text is read: `bool`, `int`, `float`, `str`, `Json`, `tuple[X, ...]` for
    several values, and `| None` where nothing said has a meaning of its own.
    """

    help: str = field(kw_only=False)  # what it does, the unit, what the default means
    aliases: tuple[str, ...] = ()  # further flags, such as "--model"
    choices: tuple[Any, ...] = ()  # the values that have a meaning; (): any
    built: tuple[Any, ...] | None = None  # the values that work so far besides the default; None: all of them
    needs: Mapping[str, str] = field(default_factory=dict)  # value -> what it takes beyond our code
    low: float | None = None  # smallest value
    high: float | None = None  # largest value
    above: float | None = None  # the value must be larger than this
    const: Any = None  # the value of a flag that stands alone, for options that usually take one
    empty: bool = False  # whether a list may be empty
    none_text: bool = False  # "None" and "" mean nothing
    secret: bool = False  # never shown
    plan: str = ""  # where the Plan says what is done, as "section.field"
    outcome: Outcome = Outcome.WORKS
    instead: str = ""  # what to do meanwhile (planned); why it does nothing (inert)


def planned(help: str, *, instead: str = "", **more: Any) -> OptionSpec:
    """An option that is not built yet; `instead` names what serves in the meantime."""
    return OptionSpec(help, outcome=Outcome.PLANNED, instead=instead, **more)


def inert(help: str, *, because: str, **more: Any) -> OptionSpec:
    """An option that is accepted for compatibility and has no effect; `because` ends that sentence."""
    return OptionSpec(help, outcome=Outcome.INERT, instead=because, **more)
