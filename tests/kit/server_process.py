"""The server as a process of its own.

with serving("--model-path", path) as server:
    httpx.get(f"{server.url}/health")
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from threading import Thread

ROOT = Path(__file__).parents[2]


class Server:
    """A process `python -m serve` on a free port. `log` grows while it runs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.log: list[str] = []
        self.url = ""
        self._lines: Queue[str | None] = Queue()
        Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stderr or ():
            self._lines.put(line)
        self._lines.put(None)

    def wait_for(self, text: str) -> str:
        """Return the next log line that contains `text`. Fails if the process ends first."""
        while (line := self._lines.get(timeout=60)) is not None:
            self.log.append(line)
            if text in line:
                return line
        raise AssertionError("the server ended:\n" + "".join(self.log))

    def rest(self) -> str:
        while (line := self._lines.get(timeout=60)) is not None:
            self.log.append(line)
        return "".join(self.log)


@contextmanager
def serving(*options: str, program: Sequence[str] = ("-m", "serve"), **environment: str) -> Iterator[Server]:
    command = [sys.executable, *program, "--port", "0", *options]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})
    server = Server(process)
    try:
        line = server.wait_for("Listening on")
        server.url = re.search(r"https?://\S+", line)[0]  # pyright: ignore[reportOptionalSubscript]
        server.wait_for("ready to roll")
        yield server
    finally:
        process.kill()
        process.wait()
