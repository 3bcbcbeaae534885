"""Run a command line: find the command, call its module, and report invalid options and failures."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module, metadata

from runtime.config import Args
from runtime.errors import ConfigurationError, EngineFailure
from serve.cli.usage import help_text

# Garbage collection thresholds of a server: imported modules stay alive, and requests create few reference cycles.
GC_THRESHOLDS = 20_000, 20, 50
REFUSED = 2  # exit status of an invalid command line
FAILED = 1  # exit status of an engine that could not start
COMMANDS: Mapping[str, str] = {  # all commands except serve -> module:function, imported when the command runs
    "explain": "serve.cli.explain:main",
    "bench": "serve.bench.__main__:main",
    "batch": "serve.cli.batch:main",
    "quantize": "serve.cli.checkpoints:quantize",
    "shard": "serve.cli.checkpoints:shard",
    "router": "serve.cli.router:main",
    "ray": "serve.cli.replicas:main",
    "models": "serve.cli.models_table:main",
    "top": "serve.cli.top:main",
    "replay": "serve.cli.replay:main",
    "simulate": "serve.cli.simulate:main",
}


def run(words: Sequence[str]) -> int:
    """Run a command line, and return the exit status. `words` are the arguments after the program's name."""
    try:
        return _execute(words)
    except ConfigurationError as error:
        sys.stderr.write(refused(error))
        return REFUSED
    except EngineFailure as error:
        sys.stderr.write(failed(error))
        return FAILED


def _execute(words: Sequence[str]) -> int:
    name, rest = (words[0], words[1:]) if words else ("serve", words)
    if name in COMMANDS:
        module, _, function = COMMANDS[name].partition(":")
        return getattr(import_module(module), function)(rest)
    if name == "help":
        return _help(rest)
    if name == "serve" and rest and not rest[0].startswith("-"):
        return _serve(["--model-path", *rest])
    return _serve(rest if name == "serve" else words)


def _help(words: Sequence[str]) -> int:
    """Run `penstock help [COMMAND or WORD]`."""
    if words and words[0] in COMMANDS and words[0] != "explain":  # explain has the same options as the server
        return _execute([words[0], "--help"])
    return _serve(["--help", *words])


def failed(error: EngineFailure) -> str:
    """Return the message for an engine that could not start, with the first line of the cause's message."""
    cause = error.__cause__
    if cause is None:
        return f"penstock: {error.message}\n"
    first = next(iter(str(cause).strip().splitlines()), "no message")
    return f"penstock: {error.message} ({type(cause).__name__}: {first})\n"


def refused(error: ConfigurationError) -> str:
    """Return the message for invalid options: a list with one line per problem."""
    lines = [f"  - {sentence}" for refusal in error.refusals for sentence in refusal.splitlines()]
    return "\n".join(["penstock: error:", *lines, "penstock --help lists the options.", ""])


def version() -> str:
    try:
        return metadata.version("penstock")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _serve(words: Sequence[str]) -> int:
    asked = next((at for at, word in enumerate(words) if word in ("-h", "--help")), None)
    if asked is not None:
        sys.stdout.write(help_text(" ".join(words[asked + 1 : asked + 2])))
        return 0
    if "--version" in words:
        sys.stdout.write(f"penstock {version()}\n")
        return 0
    args = Args.parse(words)
    gc.set_threshold(*GC_THRESHOLDS)  # set before importing torch, because the import then takes 10% less time
    return import_module("serve.server.process").run(args) or 0
