"""What is decided and refused while a plan is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from runtime.config.args import Args
from runtime.config.plan import Section

Value = TypeVar("Value")
SomeSection = TypeVar("SomeSection", bound=Section)


class Decision(NamedTuple, Generic[Value]):
    """A value of the plan and why it is what it is."""

    value: Value
    reason: str  # a sentence without its first capital and its full stop


@dataclass(slots=True, kw_only=True)
class PlanBuilder:
    """The arguments, and what of them is refused."""

    args: Args
    refusals: dict[str, str] = field(default_factory=dict)  # option name -> sentence

    def follow(self, option: str, value: Any = None) -> Decision[Any]:
        """The option's value, or `value` that follows from it, because it was set or is the default."""
        asked = self.args.get(option)
        reason = "as asked" if option in self.args.explicitly_set else "the default"
        return Decision(asked if value is None else value, reason)

    def refuse(self, option: str, sentence: str) -> None:
        """Refuse the option; the first sentence about it stands, as the most basic one."""
        self.refusals.setdefault(option, sentence)


def build(section: type[SomeSection], **decisions: Decision[Any]) -> SomeSection:
    """A section of the plan with these values, each with its reason. Raises TypeError where a field is missing."""
    values = {name: decision.value for name, decision in decisions.items()}
    reasons = {name: decision.reason for name, decision in decisions.items()}
    return section(**values, reasons=reasons)
