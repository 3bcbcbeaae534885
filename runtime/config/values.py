"""Reads and checks option values, from words of a command line or from Python objects."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from runtime.config.option_spec import Json
from runtime.config.option_table import Option
from runtime.errors import ConfigurationError

_TRUTHS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Json: "a JSON object"}


def from_words(option: Option, words: Sequence[str]) -> Any:
    """Convert the words after a flag, for example ["16"], to the option's value.

    Raises `ConfigurationError` if the words are not a valid value.
    """
    if option.many:
        return _many_from_words(option, words)
    if len(words) > 1:
        raise ConfigurationError(f"{option.flag} takes one value, not {len(words)}.")
    if not words:
        if option.type is bool:
            return True
        if option.spec.const is None:
            raise ConfigurationError(f"{option.flag} needs a value: {kind(option)}.")
        return option.spec.const
    if option.spec.none_text and words[0] in ("", "None"):
        return None
    return _checked(option, _scalar_from_word(option, words[0]))


def from_object(option: Option, value: Any) -> Any:
    """Check a value from Python and return it. Raises `ConfigurationError` if it is not a valid value of the option."""
    if value is None:
        if not option.optional:
            raise ConfigurationError(f"{option.flag} must be {kind(option)}, not None.")
        return None
    if not option.many:
        return _checked(option, _scalar_from_object(option, value))
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        raise _wrong(option, value)
    _check_length(option, value)
    return tuple(_checked(option, _scalar_from_object(option, item)) for item in value)


def kind(option: Option) -> str:
    """Describe a valid value: "a whole number", "one of a, b", ..."""
    if option.spec.choices:
        one = "one of " + ", ".join(str(choice) for choice in option.spec.choices)
    else:
        one = _KINDS[option.type]
    return f"a list, each {one}" if option.many else one


def in_its_words(option: Option, planned: Any) -> Any:
    """Convert `planned`, the value of the option's field in the plan, back to a value of the option.

    Raises `LookupError` if no value of the option is equivalent. For example, the plan may list several graph sizes,
    but `--cuda-graph-max-bs` is one number.
    """
    spec = option.spec
    if spec.if_false_true is not None:
        return spec.if_false_true[bool(planned)]
    if option.type is bool:
        is_on = bool(planned) if spec.zero_is_off else planned is not None and planned is not False
        return is_on != spec.invert
    if planned is None:
        return None
    kinds = {float: (int, float), int: (int, float), Json: Mapping}
    kind = (list, tuple) if option.many else kinds.get(option.type, option.type)
    if not isinstance(planned, kind) or isinstance(planned, bool) or spec.other_unit:
        raise LookupError(option.flag)
    return planned


def shown(option: Option, value: Any, most: int = 60) -> str:
    """Return the value as a user would type it, cut to `most` characters. Secrets are hidden."""
    if option.spec.secret and value is not None:
        return "(hidden)"
    if option.many and value is not None:
        text = " ".join(str(item) for item in value)
    elif isinstance(value, Mapping):
        text = json.dumps(value, default=str)
    elif isinstance(value, bool):
        text = "true" if value else "false"
    elif value == ():  # an empty tuple in the plan, for an option that takes a single value
        text = "none"
    else:
        text = repr(value) if value == "" else str(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def _many_from_words(option: Option, words: Sequence[str]) -> Any:
    if len(words) == 1 and words[0].lstrip().startswith("["):
        return from_object(option, _json(option, words[0], list))
    _check_length(option, words)
    return tuple(_checked(option, _scalar_from_word(option, word)) for word in words)


def _check_length(option: Option, values: Sequence[Any]) -> None:
    if not values and not option.spec.empty:
        raise ConfigurationError(f"{option.flag} needs at least one value.")


def _scalar_from_word(option: Option, word: str) -> Any:
    if option.type is str:
        return word
    if option.type is bool:
        if word.lower() in _TRUTHS:
            return _TRUTHS[word.lower()]
        raise _wrong(option, word)
    if option.type is Json:
        return _json(option, word, dict)
    try:
        return option.type(word)
    except ValueError:
        raise _wrong(option, word) from None


def _scalar_from_object(option: Option, value: Any) -> Any:
    if option.type is str:
        if isinstance(value, str | os.PathLike):
            return os.fspath(value)
        if option.many and isinstance(value, Mapping):
            return json.dumps(value)
    elif option.type is Json:
        if isinstance(value, str):
            return _json(option, value, dict)
        if isinstance(value, Mapping):
            return dict(value)
    elif option.type is bool or isinstance(value, bool):
        if option.type is bool and isinstance(value, bool):
            return value
    elif isinstance(value, int | option.type):
        return option.type(value)
    raise _wrong(option, value)


def _json(option: Option, text: str, wanted: type) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        raise ConfigurationError(f"{option.flag} is not valid JSON: {shown(option, text)}") from None
    if not isinstance(value, wanted):
        raise _wrong(option, text)
    return value


def _checked(option: Option, value: Any) -> Any:
    spec = option.spec
    if spec.any_case and isinstance(value, str):
        value = value.lower()
    if spec.choices and value not in spec.choices:
        raise _wrong(option, value)
    if option.type in (int, float):
        if not math.isfinite(value):
            raise ConfigurationError(f"{option.flag} must be a finite number, not {value}.")
        if spec.low is not None and value < spec.low:
            raise ConfigurationError(f"{option.flag} must be at least {spec.low:g}, not {value}.")
        if spec.above is not None and value <= spec.above:
            raise ConfigurationError(f"{option.flag} must be more than {spec.above:g}, not {value}.")
        if spec.high is not None and value > spec.high:
            raise ConfigurationError(f"{option.flag} must be at most {spec.high}, not {value}.")
    return value


def _wrong(option: Option, value: Any) -> ConfigurationError:
    given = "that" if option.spec.secret else repr(value) if isinstance(value, str) else shown(option, value)
    if option.many and not isinstance(value, Sequence):
        given = str(value)
    alike = {str(choice).replace("_", "-").lower(): choice for choice in option.spec.choices}
    close = get_close_matches(str(value).replace("_", "-").lower(), alike, n=1, cutoff=0.75)
    hint = f"; did you mean {alike[close[0]]}?" if close else "."
    return ConfigurationError(f"{option.flag} must be {kind(option)}, not {given}{hint}")
