"""Collects decisions and refusals while a plan is made."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Generic, NamedTuple, TypeVar, get_type_hints

from runtime.config.args import Args, options
from runtime.config.option_table import Option
from runtime.config.plan import Plan, Section

Value = TypeVar("Value")
SomeSection = TypeVar("SomeSection", bound=Section)


class Decision(NamedTuple, Generic[Value]):
    """A value of the plan with its reason."""

    value: Value
    reason: str  # a sentence without initial capital and full stop


@dataclass(slots=True, kw_only=True)
class PlanBuilder:
    """The arguments and the refusals collected so far."""

    args: Args
    refusals: dict[str, str] = field(default_factory=dict)  # option name -> sentence

    def follow(self, option: str, value: Any = None) -> Decision[Any]:
        """Return the option's value with its reason ("as asked" or "the default").

        If the plan stores a value derived from the option, `value` is that derived value.
        """
        asked = self.args.get(option)
        reason = "as asked" if option in self.args.explicitly_set else "the default"
        return Decision(asked if value is None else value, reason)

    def refuse(self, option: str, sentence: str) -> None:
        """Refuse the option with this error message. Later refusals of the same option are ignored."""
        self.refusals.setdefault(option, sentence)

    def follow_or(self, option: str, value: Value, reason: str) -> Decision[Value]:
        """Return the option's value, or `value` with `reason` if the option is None."""
        asked = self.args.get(option)
        return Decision(value, reason) if asked is None else Decision(asked, "as asked")

    def build(self, section: type[SomeSection], **decisions: Decision[Any]) -> SomeSection:
        """Make a section of the plan.

        A field without a decision takes the value of the option whose declaration names the field
        (`OptionSpec.plan`). Raises TypeError if a field has no decision, no such option and no default.
        """
        for name, option in _followed()[section].items():
            if name not in decisions:
                value = not self.args.get(option.name) if option.spec.invert else None
                decisions[name] = self.follow(option.name, value)
        values = {name: decision.value for name, decision in decisions.items()}
        reasons = {name: decision.reason for name, decision in decisions.items()}
        return section(**values, reasons=reasons)


@cache
def _followed() -> dict[type, dict[str, Option]]:
    """Return section -> {field: option}, for the fields that copy the value of one option."""
    count = Counter(option.spec.plan for option in options())
    sections = get_type_hints(Plan)
    followed: dict[type, dict[str, Option]] = {section: {} for section in sections.values()}
    for option in options():
        spec = option.spec
        if count[spec.plan] == 1 and not (spec.other_unit or spec.if_false_true or spec.zero_is_off):
            section, _, name = spec.plan.partition(".")
            if section:
                followed[sections[section]][name] = option
    return followed
