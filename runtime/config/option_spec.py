"""How an option is declared: its default, help, spellings, allowed values, and whether it does anything yet."""

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
    ALWAYS = "always"  # accepted, and nothing reads it: what it asks for is so whether it is set or not
    INERT = "inert"  # accepted for compatibility, without effect; noted in help and logged once


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionSpec:
    """The metadata of one option, which stands beside its type and default in a group's dataclass.

    The type of the field fixes how text is read: `bool`, `int`, `float`, `str`, `Json`, `tuple[X, ...]` for
    several values, and `| None` where an option that is not set has a meaning of its own.
    """

    help: str = field(kw_only=False)  # what it does, the unit, what the default means
    aliases: tuple[str, ...] = ()  # further flags, such as "--model"
    choices: tuple[Any, ...] = ()  # the values that have a meaning; (): any
    built: tuple[Any, ...] | None = None  # the values that work so far besides the default; None: all of them
    needs: Mapping[str, str] = field(default_factory=dict)  # value -> what it takes beyond our code
    any_case: bool = False  # the choices may be written in capitals
    low: float | None = None  # smallest value
    high: float | None = None  # largest value
    above: float | None = None  # the value must be larger than this
    const: Any = None  # the value of a flag that stands alone, for options that usually take one
    empty: bool = False  # whether a list may be empty
    none_text: bool = False  # "None" and "" mean nothing
    secret: bool = False  # never shown
    plan: Any = None  # the field of the plan that shows what is done, such as `CachePlan.page_size`
    # As the plan says it; or "the opposite", or "other" where that is no value of the option; or the values of the
    # option for what the plan has as false and as true.
    says: str | tuple[str, str] = "the same"
    outcome: Outcome = Outcome.WORKS
    instead: str = ""  # what serves in the meantime, of an option or value that is not supported yet
    reason: str = ""  # why nothing reads it (always, inert); ends a sentence
    sglang: str = ""  # what SGLang does by default, where that is something else


def option(default: Any, help: str, **spec: Any) -> Any:
    """The dataclass field of an option: `page_size: int = option(16, "Tokens in one page.", low=1)`.

    The keywords are those of `OptionSpec`.
    """
    made = OptionSpec(help, **spec)
    given: dict[str, Any] = {"default_factory": dict} if default == {} else {"default": default}
    return field(**given, repr=not made.secret, metadata={"spec": made})


def planned(default: Any, help: str, **spec: Any) -> Any:
    """An option that is not supported yet: it is refused unless it keeps its default."""
    return option(default, help, outcome=Outcome.PLANNED, **spec)


def always(default: Any, help: str, *, reason: str, **spec: Any) -> Any:
    """An option that asks for what is so anyway; `reason` says why."""
    return option(default, help, outcome=Outcome.ALWAYS, reason=reason, **spec)


def inert(default: Any, help: str, *, reason: str, **spec: Any) -> Any:
    """An option that is accepted for compatibility and has no effect; `reason` says why."""
    return option(default, help, outcome=Outcome.INERT, reason=reason, **spec)
