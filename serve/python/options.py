"""The engine's options as Python keywords: class signatures, `pathlib.Path` values, and command-line flags."""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Mapping
from os import fspath
from typing import Any, TypeVar

from runtime.config import options
from runtime.errors import ConfigurationError

Class = TypeVar("Class", bound=type)


def plain_options(model_path: Any, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords with `model_path` added, and `pathlib.Path` values converted to strings.

    Raises `ConfigurationError` if `model_path` is given twice.
    """
    plain = dict(keywords)
    if model_path is not None:
        if "model_path" in plain:
            raise ConfigurationError("model_path is given twice.")
        plain["model_path"] = model_path
    for name in ("model_path", "model", "tokenizer_path", "chat_template"):
        if hasattr(plain.get(name), "__fspath__"):
            plain[name] = fspath(plain[name])
    return plain


def with_signature(engine: Class) -> Class:
    """Give the class a signature that lists all options, for `help` and for completion in notebooks."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    first = inspect.Parameter("model_path", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=str)
    mine = [
        inspect.Parameter(option.name, keyword, default=option.default, annotation=_annotation(option))
        for option in options()
        if option.name != "model_path"
    ]
    engine.__signature__ = inspect.Signature([first, *mine])  # pyright: ignore[reportAttributeAccessIssue]
    return engine


def word_types() -> dict[str, tuple[Any, bool]]:
    """Map each option's Python name to (its type on a command line, whether it takes several values).

    The type is bool, int, float, str or, for other types, `json.loads`.
    """
    return {
        name: (option.type if option.type in (bool, int, float, str) else json.loads, option.many)
        for option in options()
        for name in option.keywords
    }


def add_arguments(parser: argparse.ArgumentParser, types: Mapping[str, tuple[Any, bool]]) -> argparse.ArgumentParser:
    """Add a command-line flag for each name, and return the parser. Every default is None."""
    group = parser.add_argument_group("Engine")
    for name, (kind, many) in types.items():
        flag = f"--{name.replace('_', '-')}"
        if kind is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None)
        else:
            group.add_argument(flag, type=kind, default=None, nargs="*" if many else None)
    return parser


def _annotation(option: Any) -> Any:
    plain = option.type if isinstance(option.type, type) else Any
    if option.many:
        plain = tuple[plain, ...]
    return plain | None if option.optional and plain is not Any else plain
