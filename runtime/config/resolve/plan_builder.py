"""The record that is kept while a plan is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from runtime.config import Args

Value = TypeVar("Value")


@dataclass(slots=True, kw_only=True)
class PlanBuilder:
    """What has been decided so far, why, and what is refused."""

    args: Args
    because: dict[str, str] = field(default_factory=dict)  # "cache.page_size" -> sentence
    refusals: dict[str, str] = field(default_factory=dict)  # option name -> sentence

    def decide(self, place: str, value: Value, why: str) -> Value:
        """Note why `place` of the plan has this value; returns the value."""
        self.because[place] = why
        return value

    def take(self, place: str, option: str, value: Any = None) -> Any:
        """Note that `place` follows the option as it stands; returns `value`, or else the option's value."""
        self.because[place] = "as asked" if option in self.args.said else "the default"
        return self.args.get(option) if value is None else value

    def refuse(self, option: str, sentence: str) -> None:
        """Refuse the option; the first sentence about it stands, as the most basic one."""
        self.refusals.setdefault(option, sentence)
