"""Reads options from a YAML file (`--config`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from runtime.config.option_table import Option, Options
from runtime.config.values import from_words
from runtime.errors import ConfigurationError


def read(options: Options, path: str, refusals: list[str]) -> dict[str, Any]:
    """Return the values of the file's options by name.

    Keys may use `-` or `_`, with or without leading dashes. Entries that are `null` are ignored. If an entry cannot be
    read, it is left out of the result, and an error message is appended to `refusals`.
    """
    try:
        entries = _root(path)
    except ConfigurationError as refusal:
        refusals.extend(refusal.refusals)
        return {}
    values: dict[str, Any] = {}
    for key, entry in entries:
        if entry is None:
            continue
        try:
            option, negated = options.by_flag(key)
            if option.name == "config":
                raise ConfigurationError("--config cannot stand inside a configuration file.")
            if option.name in values:
                raise ConfigurationError(f"{option.flag} is set twice.")
            value = from_words(option, _words(option, entry))
            values[option.name] = not value if negated else value
        except ConfigurationError as refusal:
            refusals.extend(f"{path}: {sentence}" for sentence in refusal.refusals)
    return values


def _root(path: str) -> list[tuple[str, Any]]:
    import yaml  # imported here, because only --config needs it

    if Path(path).suffix not in (".yaml", ".yml"):
        raise ConfigurationError(f"--config takes a .yaml or .yml file, not {path!r}.")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigurationError(f"--config {path} cannot be read: {reason}.") from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            return []
        if not isinstance(root, yaml.MappingNode):
            raise ConfigurationError(f"--config {path} must be a mapping of options to values.")
        loader = yaml.SafeLoader("")
        return [(str(key.value), loader.construct_object(value, deep=True)) for key, value in root.value]
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark else ""
        raise ConfigurationError(f"--config {path} is not valid YAML{where}.") from error


def _words(option: Option, entry: Any) -> list[str]:
    """Return the entry as the words that would follow the flag."""
    if isinstance(entry, bool):
        if option.type is not bool:
            text = "true" if entry else "false"
            raise ConfigurationError(
                f"{option.flag} is not a yes-or-no option; put {text!r} in quotes if you mean text."
            )
        return ["true" if entry else "false"]
    if isinstance(entry, list):
        return [_word(item) for item in entry]
    return [_word(entry)]


def _word(entry: Any) -> str:
    return json.dumps(entry, default=str) if isinstance(entry, dict) else str(entry)
