"""`python -m serve.bench COMMAND ...`, also as `penstock bench COMMAND ...`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module

from runtime.errors import ConfigurationError
from serve.bench import PROGRAM

# Name -> (module, description). A module is imported when its command runs, because some import torch.
COMMANDS = {
    "serving": ("serve.bench.serving", "a running server over HTTP: latencies, throughput, goodput"),
    "offline": ("serve.bench.offline", "throughput of the engine in this process"),
    "latency": ("serve.bench.latency", "one batch in this process: prefill time, and decode time per token"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark command, and return the exit status (2 for an invalid command line)."""
    return run_command(PROGRAM, COMMANDS, sys.argv[1:] if argv is None else argv)


def run_command(program: str, commands: Mapping[str, tuple[str, str]], argv: Sequence[str]) -> int:
    """Run the command that the first argument names, and return its exit status.

    `commands` maps a command's name to (module, description). The module's `main` is called with the other arguments.
    """
    name, rest = (argv[0], argv[1:]) if argv else ("", [])
    if name in ("-h", "--help"):
        sys.stdout.write(_usage(program, commands))
        return 0
    if name not in commands:
        sys.stderr.write(_usage(program, commands))
        return 2
    module, _ = commands[name]
    try:
        return import_module(module).main(rest)
    except ConfigurationError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


def _usage(program: str, commands: Mapping[str, tuple[str, str]]) -> str:
    width = max(map(len, commands)) + 2
    lines = [f"  {name:<{width}}{what}\n" for name, (_, what) in commands.items()]
    return f"usage: {program} COMMAND [options]\n\ncommands:\n{''.join(lines)}"


if __name__ == "__main__":
    sys.exit(main())
