"""Declaration of an option: default, help, spellings, allowed values, and whether it works."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Json = Mapping[str, Any]  # type of an option whose value is a JSON object


class Outcome(StrEnum):
    """The effect of an option."""

    WORKS = "works"
    REFUSED = "refused"  # any value except the default is refused, because something that it needs is missing
    RENAMED = "renamed"  # an old spelling of a value of another option, and has the outcome of that option
    ALWAYS = "always"  # accepted: Penstock always behaves as if the option were set
    INERT = "inert"  # accepted for compatibility without effect; help says so and the log says so once


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionSpec:
    """Metadata of one option. The option's type and default are those of its field in a group's dataclass.

    The type determines how words of the command line are read. The type is `bool`, `int`, `float`, `str` or `Json`, or
    `tuple[X, ...]` for several values. If the option may be unset, `| None` is added.
    """

    help: str = field(kw_only=False)  # purpose, unit, and meaning of the default
    aliases: tuple[str, ...] = ()  # further flags, such as "--model"
    choices: tuple[Any, ...] = ()  # valid values; (): any
    built: tuple[Any, ...] | None = None  # values that are supported besides the default; None: all
    needs: Mapping[str, str] = field(default_factory=dict)  # maps a value to the library or hardware that it needs
    any_case: bool = False  # whether upper case is accepted and converted to lower case
    low: float | None = None  # smallest value
    high: float | None = None  # largest value
    above: float | None = None  # exclusive lower bound
    const: Any = None  # value if the flag has no argument; None: the flag needs one
    empty: bool = False  # whether a list may be empty
    none_text: bool = False  # whether the words "None" and "" mean None
    secret: bool = False  # never shown or logged
    plan: str = ""  # field of the plan with the decided value, such as "cache.page_size"; "": no field
    invert: bool = False  # whether the option is on exactly if the plan's field is off
    zero_is_off: bool = False  # whether the plan's field is 0 if the flag is off; otherwise it is None or False
    other_unit: bool = False  # whether the plan's field has another unit, so that the value cannot be converted back
    if_false_true: tuple[str, str] | None = None  # the option's values if the plan's field is false, and if it is true
    outcome: Outcome = Outcome.WORKS
    instead: str = ""  # what to do instead of using an unsupported or refused option or value, such as "use tcp"
    reason: str = ""  # reason for `always`, `inert` and `refused`, as the end of a sentence
    means: tuple[str, Any] | None = None  # name and value of the option that a renamed option sets
    sglang: str = ""  # SGLang's default, if it differs


def option(default: Any, help: str, **spec: Any) -> Any:
    """Declare an option: `page_size: int = option(16, "Tokens in one page.", low=1)`.

    Keywords are the fields of `OptionSpec`.
    """
    made = OptionSpec(help, **spec)
    given: dict[str, Any] = {"default_factory": dict} if default == {} else {"default": default}
    return field(**given, repr=not made.secret, metadata={"spec": made})


def refused(default: Any, help: str, *, reason: str, **spec: Any) -> Any:
    """Declare an option that is refused. `reason` says what it needs, such as a package or hardware."""
    return option(default, help, outcome=Outcome.REFUSED, reason=reason, **spec)


def renamed(name: str, value: Any) -> Any:
    """Declare a flag that is an old spelling of a value of the option `name`. Setting it sets that option."""
    flag = "--" + name.replace("_", "-")
    return option(False, f"Old spelling of {flag} {value}.", outcome=Outcome.RENAMED, means=(name, value))


def always(default: Any, help: str, *, reason: str, **spec: Any) -> Any:
    """Declare an option for behaviour that Penstock always has. `reason` says why."""
    return option(default, help, outcome=Outcome.ALWAYS, reason=reason, **spec)


def inert(default: Any, help: str, *, reason: str, **spec: Any) -> Any:
    """Declare an option that is accepted without effect; `reason` says why."""
    return option(default, help, outcome=Outcome.INERT, reason=reason, **spec)
