"""One engine in a separate process: jobs and answers are lines of JSON."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

from bench.cpu.engines import last_line
from bench.cpu.work import Ids, WorkError

ANSWER_LIMIT_S = 900.0
END_LIMIT_S = 20.0


class Runner:
    """A running engine. Its output goes to `log`. Every failure is a `WorkError` with its last lines.

    The process leads a process group, so that it can be stopped and continued as a whole. The kernel kills it when this
    process dies, even if it is stopped.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self._command = list(command)
        self._environment = dict(environment)
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""
        self.url: str | None = None
        self.versions: Mapping[str, str] = {}

    def start(self) -> None:
        """Return when the model is loaded and the engine accepts jobs."""
        self._rest = b""
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment,
                bufsize=0,
                process_group=0,
            )
        ready = self._answer()
        self.url, self.versions = ready.get("url"), ready.get("versions", {})

    def generate(self, prompts: Sequence[Ids], new_tokens: int) -> float:
        """Run a job and return its duration in seconds."""
        answer = self.ask({"prompts": list(prompts), "new_tokens": new_tokens})
        if answer["output_lengths"] != [new_tokens] * len(prompts):
            raise WorkError(f"{self.name} did not give {new_tokens} tokens to each of {len(prompts)} prompts")
        return answer["seconds"]

    def ask(self, job: Mapping[str, Any]) -> dict[str, Any]:
        process = self._running()
        try:
            _write(process, json.dumps(job).encode() + b"\n")
        except BrokenPipeError:
            raise self._ended() from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        process, limit = self._running(), perf_counter() + ANSWER_LIMIT_S
        pipe = process.stdout
        if pipe is None:
            raise WorkError(f"{self.name} has no output")
        while b"\n" not in self._rest:
            left = limit - perf_counter()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                self.kill()
                raise WorkError(f"{self.name} gave no answer within {ANSWER_LIMIT_S:g} s")
            piece = os.read(pipe.fileno(), 1 << 16)
            if not piece:
                raise self._ended()
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def pause(self) -> None:
        """Stop all processes of the engine, so that waiting threads use no CPU time."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def cpu_s(self) -> float:
        """Return the CPU time of all its processes so far, including ended child processes."""
        return 0.0 if self._process is None else sum(map(_cpu_s, _with_children(self._process.pid)))

    def peak_bytes(self) -> int:
        """Return the sum of the peak memory of all its processes."""
        return sum(_peak_bytes(pid) for pid in _with_children(self._running().pid))

    def stop(self) -> None:
        """Ask the engine to end, and kill it if it does not."""
        process = self._process
        if process is None:
            return
        self.resume()
        if process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_LIMIT_S)
        self.kill()

    def kill(self) -> None:
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _signal(self, number: int) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise WorkError(f"{self.name} is not running")
        return self._process

    def _ended(self) -> WorkError:
        status = self._running().wait()
        self.kill()
        words = last_line(self._log.read_text(encoding="utf-8", errors="replace"))
        return WorkError(words or f"{self.name} ended with status {status}")


def _write(process: subprocess.Popen[bytes], data: bytes) -> None:
    if process.stdin is not None:
        view = memoryview(data)
        while view:
            view = view[os.write(process.stdin.fileno(), view) :]


def _with_children(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        with suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def _cpu_s(pid: int) -> float:
    with suppress(OSError):
        _, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        return sum(map(int, rest.split()[11:15])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _peak_bytes(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
