"""SGLang's `ServerArgs`: the options of an engine, from Python keywords or from a command line."""

from __future__ import annotations

import argparse
from dataclasses import make_dataclass
from typing import Any

from runtime.config import Args
from runtime.errors import ConfigurationError
from serve.python.options import add_arguments, word_types


class ServerArgs:
    """The options of an engine: `ServerArgs(model_path="...", tp_size=2)`.

    Each option is an attribute; an option that was not given has its default. `dataclasses.asdict` returns only the
    given options, as keywords for `Engine`. Raises `ConfigurationError` for unknown names and wrong values.
    """

    def __new__(cls, **keywords: Any) -> ServerArgs:
        if cls is not ServerArgs:
            return super().__new__(cls)
        given = Args.of(**keywords).keywords()
        made: Any = make_dataclass("ServerArgs", [(name, Any) for name in given], bases=(ServerArgs,), frozen=True)
        return made(**given)

    def __getattr__(self, name: str) -> Any:
        try:
            return Args.of().get(name)
        except (KeyError, ConfigurationError):
            raise AttributeError(f"ServerArgs has no {name}.") from None

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add an argument for each option, and return the parser."""
        return add_arguments(parser, word_types())

    @staticmethod
    def from_cli_args(args: argparse.Namespace) -> ServerArgs:
        """Create `ServerArgs` from the parsed arguments that belong to the engine."""
        return ServerArgs(**{name: value for name in word_types() if (value := getattr(args, name, None)) is not None})
