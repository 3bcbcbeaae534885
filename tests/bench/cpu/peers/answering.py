"""The command line and the protocol of all runner scripts: jobs and answers are lines of JSON.

The first answer says that the model is loaded. A job has prompts as token ids, and the number of tokens to add to each.
Its answer has the duration and the tokens. An engine that fails ends the process, and the last line of its log is the
reason.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

START_LIMIT_S = 600.0
WEIGHTS = ("bf16", "int8", "int4")


class Model(Protocol):
    """A loaded model."""

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """Generate exactly `new_tokens` greedy ids after each prompt, and ignore stop tokens."""
        ...


class Lines:
    """Writes answers to the original stdout. All other output of the engine goes to stderr."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
        os.dup2(2, 1)

    def say(self, answer: Mapping[str, Any]) -> None:
        self._out.write(json.dumps(answer) + "\n")

    def next_job(self) -> dict[str, Any] | None:
        """Return the next job, or None at the end of the input."""
        line = sys.stdin.readline()
        return json.loads(line) if line.strip() else None


def add_run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="what `convert` wrote")
    parser.add_argument("--weights", required=True, choices=WEIGHTS)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--context", type=int, default=4096, help="tokens of a sequence at most")
    parser.add_argument("--batch", type=int, default=64, help="sequences at once")
    parser.add_argument("--serve", action="store_true", help="over HTTP instead")


def main(
    packages: Sequence[str],
    convert: Callable[[argparse.Namespace], None],
    load: Callable[[argparse.Namespace], Model],
    server_command: Callable[[argparse.Namespace, int], list[str]] | None = None,
) -> None:
    """Run the script's command line. `server_command` returns the command that starts a server on a port."""
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    converting = commands.add_parser("convert")
    converting.add_argument("--checkpoint", required=True)
    converting.add_argument("--output", required=True)
    converting.add_argument("--weights", required=True, choices=WEIGHTS)
    converting.add_argument("--form", help="of the weights, where the engine has several")
    add_run_options(commands.add_parser("run"))
    options = parser.parse_args()
    if options.command == "convert":
        convert(options)
        return
    lines = Lines()
    if not options.serve:
        model = load(options)
        lines.say({"ready": True, "versions": versions(packages)})
        answer_all(lines, model)
    elif server_command is not None:
        port = free_port()
        serve(lines, server_command(options, port), port, versions(packages))


def answer_all(lines: Lines, model: Model) -> None:
    while (job := lines.next_job()) is not None:
        began = time.perf_counter()
        outputs = model.generate(job["prompts"], job["new_tokens"])
        lines.say(answer_of(outputs, time.perf_counter() - began))


def answer_of(outputs: Sequence[Sequence[int]], seconds: float) -> dict[str, Any]:
    lengths = [len(ids) for ids in outputs]
    return {"seconds": seconds, "output_lengths": lengths, "ids": [int(id) for id in outputs[0][:32]]}


def serve(lines: Lines, command: Sequence[str], port: int, found: Mapping[str, str]) -> None:
    """Start a server, report its address when it answers, and stop it at the end of the input."""
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        wait_until_up(server, f"{url}/v1/models")
        lines.say({"ready": True, "versions": dict(found), "url": url})
        while lines.next_job() is not None:
            lines.say({})
    finally:
        server.terminate()
        server.wait()


def wait_until_up(server: subprocess.Popen[Any], url: str) -> None:
    limit = time.monotonic() + START_LIMIT_S
    while time.monotonic() < limit:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with status {server.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"the server did not answer within {START_LIMIT_S:g} s")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def versions(packages: Sequence[str]) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
