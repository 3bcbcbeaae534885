"""`python -m serve.bench COMMAND ...`, also as `penstock bench COMMAND ...`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from runtime.errors import ConfigurationError

# Imported when asked for: the in-process commands bring torch with them.
COMMANDS = {
    "serving": ("serve.bench.serving", "a running server over HTTP: latencies, throughput, goodput"),
    "offline": ("serve.bench.offline", "throughput of the engine in this process"),
    "latency": ("serve.bench.latency", "one batch in this process: prefill, and decode per token"),
    "overhead": ("serve.bench.overhead", "scheduling and streaming without a model"),
    "parallel": ("serve.bench.parallel", "a step of two processes against one, in its parts"),
    "step": ("serve.bench.step", "single steps in this process: chosen kernels against plain torch"),
    "kernels": ("serve.bench.kernels", "where the time of a step goes on a CPU, kernel by kernel"),
    "accuracy": ("serve.bench.accuracy", "bfloat16 and 8 bits against transformers in float32"),
    "gpu": ("serve.bench.gpu.command", "a GPU with random weights of real shapes, beside its limits"),
    "cpu": ("serve.bench.cpu.command", "ours and its peers on this machine's CPU, in turns"),
    "cpu-peers": ("serve.bench.cpu.environments", "install the peers that `cpu` compares with"),
    "checkpoint": ("serve.bench.checkpoints", "write a random checkpoint of a known shape"),
}


def usage() -> str:
    lines = [f"  {name:<12}{what}" for name, (_, what) in COMMANDS.items()]
    return "usage: python -m serve.bench COMMAND [options]\n\ncommands:\n" + "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark command and return the process's exit status; 2 for a refused command line."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if name in ("-h", "--help"):
        sys.stdout.write(usage() + "\n")
        return 0
    if name not in COMMANDS:
        sys.stderr.write(usage() + "\n")
        return 2
    module, _ = COMMANDS[name]
    try:
        return import_module(module).main(rest)
    except ConfigurationError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
