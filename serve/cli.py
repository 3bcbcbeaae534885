"""The command line: serve a model, explain what would be done, answer a batch, watch, or measure."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module, metadata

from runtime.config import Args
from runtime.errors import ConfigurationError, EngineFailure
from serve.usage import help_text

# Allocations between collections of garbage, in a server: what is imported stays, and requests make few cycles.
GC_THRESHOLDS = 20_000, 20, 50
REFUSED = 2  # exit status of a command line that cannot be followed
FAILED = 1  # of an engine that could not start
COMMANDS: Mapping[str, str] = {  # beside serve: the module and function of each, imported when asked for
    "explain": "serve.explain:main",
    "bench": "serve.bench.__main__:main",
    "batch": "serve.batch:main",
    "quantize": "serve.checkpoints:quantize",
    "shard": "serve.checkpoints:shard",
    "models": "serve.models_table:main",
    "top": "serve.top:main",
}


def run(words: Sequence[str]) -> int:
    """Follow a command line (without the program's name); returns the exit status."""
    try:
        return _follow(words)
    except ConfigurationError as error:
        sys.stderr.write(refused(error))
        return REFUSED
    except EngineFailure as error:
        sys.stderr.write(failed(error))
        return FAILED


def _follow(words: Sequence[str]) -> int:
    name, rest = (words[0], words[1:]) if words else ("serve", words)
    if name in COMMANDS:
        module, _, function = COMMANDS[name].partition(":")
        return getattr(import_module(module), function)(rest)
    return _serve(rest if name == "serve" else words)


def failed(error: EngineFailure) -> str:
    """Why the engine could not start, with what the system said, for people."""
    cause = error.__cause__
    if cause is None:
        return f"penstock: {error.message}\n"
    first = next(iter(str(cause).strip().splitlines()), "no message")
    return f"penstock: {error.message} ({type(cause).__name__}: {first})\n"


def refused(error: ConfigurationError) -> str:
    """The refusals as a short list for people."""
    lines = [f"  - {sentence}" for refusal in error.refusals for sentence in refusal.splitlines()]
    return "\n".join(["penstock: error:", *lines, "penstock --help lists the options.", ""])


def version() -> str:
    try:
        return metadata.version("penstock")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _serve(words: Sequence[str]) -> int:
    if "-h" in words or "--help" in words:
        sys.stdout.write(help_text())
        return 0
    if "--version" in words:
        sys.stdout.write(f"penstock {version()}\n")
        return 0
    args = Args.parse(words)
    gc.set_threshold(*GC_THRESHOLDS)  # before torch: a tenth of the time in which it is imported
    return import_module("serve.server").run(args) or 0
