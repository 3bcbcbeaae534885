"""The table of all options, derived from the group dataclasses."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, dataclass, fields
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from runtime.config.option_spec import Json, OptionSpec
from runtime.config.other_names import instead_of
from runtime.config.suggestions import closest
from runtime.errors import ConfigurationError

MAX_LISTED = 6  # maximum number of flags listed in an error message


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option: its names, its type, its default and its declared `OptionSpec`."""

    name: str  # the Python keyword
    group: str  # the field of Args for the option's group
    title: str  # title of the group
    flags: tuple[str, ...]  # "--page-size" first, then its aliases
    spec: OptionSpec
    type: Any  # bool, int, float, str or Json; the element's type if `many`
    many: bool  # whether the value is a tuple
    optional: bool  # whether None is allowed
    default: Any

    @property
    def flag(self) -> str:
        return self.flags[0]

    @property
    def keywords(self) -> tuple[str, ...]:
        """Python names: the option's own first, then its aliases."""
        return tuple(flag.removeprefix("--").replace("-", "_") for flag in self.flags)

    @property
    def negated_flag(self) -> str | None:
        """`--no-x` for an option that is on by default, else None."""
        return f"--no-{self.flag.removeprefix('--')}" if self.type is bool and self.default is True else None


class Options:
    """All options that a class such as `Args` declares, indexed by name, Python keyword and flag."""

    def __init__(self, args_class: type) -> None:
        self._by_name: dict[str, Option] = {}
        self._by_keyword: dict[str, Option] = {}
        self._by_flag: dict[str, tuple[Option, bool]] = {}  # flag -> (option, whether the flag is its `--no-` form)
        for option in _declared(args_class):
            self._add(option)

    def __iter__(self) -> Iterator[Option]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def __getitem__(self, name: str) -> Option:
        return self._by_name[name]

    def by_keyword(self, keyword: str) -> Option:
        """Return the option with this Python name. Raises `ConfigurationError`, which may suggest a similar name."""
        if keyword in self._by_keyword:
            return self._by_keyword[keyword]
        if instead := instead_of("--" + keyword.replace("_", "-")):
            as_keywords = re.sub(r"--([a-z-]+)", lambda flag: flag[1].replace("-", "_"), instead)
            raise ConfigurationError(f"{keyword} is not an option{as_keywords}.")
        raise ConfigurationError(f"{keyword} is not an option{_suggestion(keyword, self._by_keyword)}")

    def by_flag(self, flag: str) -> tuple[Option, bool]:
        """Return the option of a flag, and whether the flag is its `--no-` form. Unique prefixes are accepted.

        Raises `ConfigurationError` for an unknown or ambiguous flag.
        """
        wanted = "--" + flag.lstrip("-").replace("_", "-")
        if wanted in self._by_flag:
            return self._by_flag[wanted]
        if instead := instead_of(wanted):
            raise ConfigurationError(f"{flag} is not an option{instead}.")
        longer = [known for known in self._by_flag if known.startswith(wanted) and wanted != "--"]
        meant = {self._by_flag[known][0].name: self._by_flag[known] for known in longer}
        if len(meant) == 1:
            return next(iter(meant.values()))
        if meant:
            raise ConfigurationError(f"{flag} is the beginning of several options: {_listed(longer)}.")
        raise ConfigurationError(f"{flag} is not an option{_suggestion(wanted, self._by_flag)}")

    def _add(self, option: Option) -> None:
        spellings = [(flag, False) for flag in option.flags]
        if option.negated_flag:
            spellings.append((option.negated_flag, True))
        for flag, negated in spellings:
            if flag in self._by_flag:
                raise TypeError(f"{flag} is declared twice")
            self._by_flag[flag] = (option, negated)
        self._by_name[option.name] = option
        self._by_keyword |= dict.fromkeys(option.keywords, option)


def _declared(args_class: type) -> Iterator[Option]:
    for group, group_class in get_type_hints(args_class).items():
        if not hasattr(group_class, "__dataclass_fields__"):
            continue
        hints = get_type_hints(group_class)
        title = (group_class.__doc__ or group).strip().rstrip(".")
        for declared in fields(group_class):
            yield _option(declared, hints[declared.name], group, title)


def _option(declared: Field, hint: Any, group: str, title: str) -> Option:
    spec: OptionSpec = declared.metadata["spec"]
    optional = get_origin(hint) in (Union, UnionType) and NoneType in get_args(hint)
    plain = next(part for part in get_args(hint) if part is not NoneType) if optional else hint
    many = get_origin(plain) is tuple
    default = declared.default if declared.default_factory is MISSING else declared.default_factory()
    return Option(
        name=declared.name,
        group=group,
        title=title,
        flags=("--" + declared.name.replace("_", "-"), *spec.aliases),
        spec=spec,
        # get_type_hints returns a copy of the alias Json, so `is` would fail
        type=get_args(plain)[0] if many else Json if plain == Json else plain,
        many=many,
        optional=optional,
        default=default,
    )


def _suggestion(wanted: str, known: Iterable[str]) -> str:
    """Return the end of an error message, which suggests the most similar known name if one is similar enough."""
    general = ("--help", "--version") if wanted.startswith("--") else ()
    best = closest(wanted, (*general, *known))
    return f"; did you mean {best}?" if best else "."


def _listed(flags: list[str]) -> str:
    return ", ".join(flags[:MAX_LISTED]) + (", ..." if len(flags) > MAX_LISTED else "")
