"""What was said but is not built yet, or has no effect."""

from __future__ import annotations

from typing import Any

from runtime.config.args import Args, options
from runtime.config.option_spec import Outcome
from runtime.config.option_table import Option
from runtime.config.values import shown


def not_built(args: Args) -> dict[str, str]:
    """Option name -> one sentence, for every option whose value asks for what does not exist yet."""
    return {
        option.name: _sentence(option, args.get(option.name))
        for option in options()
        if not _is_built(option, args.get(option.name))
    }


def without_effect(args: Args) -> dict[str, str]:
    """Option name -> one sentence, for every option that was set and is accepted for compatibility only."""
    return {
        option.name: f"{option.flag} has no effect: {option.spec.instead}."
        for option in options()
        if option.spec.outcome is Outcome.INERT and option.name in args.said
    }


def _is_built(option: Option, value: Any) -> bool:
    if value == option.default or value in (option.spec.built or ()):
        return True
    return option.spec.outcome is not Outcome.PLANNED and option.spec.built is None


def _sentence(option: Option, value: Any) -> str:
    said = option.flag if value is True else f"{option.flag} {shown(option, value)}"
    needs = option.spec.needs.get(value, "") if isinstance(value, str) else ""
    return f"{said} is not built yet{f' (and needs {needs})' if needs else ''}{_instead(option)}."


def _instead(option: Option) -> str:
    if option.spec.instead:
        return f"; {option.spec.instead}"
    if option.spec.outcome is Outcome.PLANNED:
        return ""
    works = [shown(option, value) for value in option.spec.built or () if value is not None]
    return f"; use {' or '.join([', '.join(works[:-1]), works[-1]] if len(works) > 1 else works)}"
