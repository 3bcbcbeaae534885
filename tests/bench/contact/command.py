"""`gpu-contact`: run every stage in its own process, with a limit per stage and a budget for all stages."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import orjson

from bench import PROGRAM
from bench.contact import outcomes
from bench.contact.report import Report, markdown, read
from bench.contact.stages import Stage, stages
from runtime.errors import ConfigurationError
from serve.bench import report as output
from serve.bench.options import new_parser

ROOT = Path(__file__).parents[3]
PYTHONPATH = os.pathsep.join(str(ROOT / folder) for folder in ("", "tests", "tests/kit", "notebooks"))
REFUSED = 2  # exit status of a command that refuses to run
LEAST_S = 5.0  # minimum remaining time for which a stage is started
OUTPUT_CHARS = 4000
RESTARTS = 20  # maximum restarts of one stage's tests after crashes


def parser() -> argparse.ArgumentParser:
    options = new_parser(
        "gpu-contact",
        "Prove or refute everything that concerns a GPU, most telling first, within a budget of time. Writes "
        "contact.json, contact.md and contact.log after every stage.",
        program=PROGRAM,
    )
    options.add_argument("--device", default="cuda", help="cuda, or cpu to rehearse")
    options.add_argument("--budget", type=float, default=1500, help="seconds for all stages together")
    options.add_argument("--output", default="gpu-contact", help="folder of the report")
    options.add_argument("--resume", help="contact.json of an earlier run: stages that ended well are not repeated")
    options.add_argument("--stages", nargs="+", metavar="TEXT", help="only stages whose name contains one of these")
    options.add_argument("--every", action="store_true", help="rehearse every case and family, not one of each kind")
    options.add_argument("--report", help="print the report of this contact.json as Markdown, and do nothing else")
    return options


def main(argv: Sequence[str]) -> int:
    """Run the stages. Return 1 if a stage failed or was not reached."""
    options = parser().parse_args(argv)
    if options.report:
        output.say(markdown(read(Path(options.report))))
        return 0
    if options.device not in ("cpu", "cuda"):
        raise ConfigurationError(f"--device {options.device} is neither cuda nor cpu.")
    chosen = [stage for stage in stages(options.device) if _wanted(stage, options.stages)]
    if not chosen:
        raise ConfigurationError(f"No stage's name contains any of {', '.join(options.stages)}.")
    before = read(Path(options.resume)) if options.resume else None
    found = Report(Path(options.output), options.device, options.budget, before)
    deadline_s = monotonic() + options.budget
    contact = _Contact(options.device, Path(options.output), deadline_s, every=options.every)
    waiting = [stage for stage in chosen if not found.done(stage.name)]
    for place, stage in enumerate(waiting, 1):
        result = contact.run(stage, kept_s=sum(later.kept_s for later in waiting[place:]))
        found.add(result)
        output.say(f"{stage.name}: {result['status']} in {result['seconds']:.0f} s {result['note']}".rstrip())
    output.say(markdown(found.content))
    return 0 if all(found.done(stage.name) for stage in chosen) else 1


def _wanted(stage: Stage, texts: Sequence[str] | None) -> bool:
    return texts is None or any(text in stage.name for text in texts)


class _Contact:
    """Runs stages until the deadline. All output goes to one log."""

    def __init__(self, device: str, folder: Path, deadline_s: float, *, every: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._device = device
        self._folder = folder.resolve()
        self._log = folder / "contact.log"
        self._deadline_s = deadline_s
        self._tests_environment = {
            "PENSTOCK_TEST_DEVICE": device,
            "PENSTOCK_TEST_EVERY": "1" if every else "",
        }

    def run(self, stage: Stage, kept_s: float = 0) -> dict[str, Any]:
        """Run one stage and return its entry of the report. `kept_s` seconds are reserved for later stages."""
        began_s = monotonic()
        left_s = self._deadline_s - began_s
        limit_s = min(stage.limit_s, left_s, max(stage.kept_s, left_s - kept_s))
        if limit_s < LEAST_S:
            found: dict[str, Any] = {"status": "not reached", "note": "the budget was spent", "output": ""}
        else:
            with TemporaryDirectory() as scratch:
                file = Path(scratch) / "result"
                found = self._tests(stage, file, limit_s) if stage.kind == "tests" else self._once(stage, file, limit_s)
        return {"name": stage.name, "seconds": monotonic() - began_s, "note": "", **found}

    def _once(self, stage: Stage, file: Path, limit_s: float) -> dict[str, Any]:
        status, text = self._process(stage, stage.command(self._device, str(file), str(self._folder)), limit_s)
        found: dict[str, Any] = {"output": text[-OUTPUT_CHARS:]}
        if status is None:
            found |= {"status": "timed out", "note": f"after {limit_s:.0f} s"}
        elif status == REFUSED:
            found |= {"status": "refused", "note": " ".join(text.split())[-300:]}
        elif status:
            found |= {"status": "failed", "note": f"exit status {status}"}
        else:
            found["status"] = "measured" if stage.kind == "figures" else "passed"
        if stage.kind == "figures" and file.exists():
            found["rows"] = orjson.loads(file.read_bytes())["results"]["rows"]
        return found

    def _tests(self, stage: Stage, file: Path, limit_s: float) -> dict[str, Any]:
        """Run tests one after the other. If the process crashes, start another process for the remaining tests."""
        deadline_s = monotonic() + limit_s
        words = [
            "-m",
            "pytest",
            "-p",
            "bench.contact.outcomes",
            "--outcomes",
            str(file),
            "-p",
            "no:cacheprovider",
        ]
        limits = ["--timeout", str(stage.test_limit_s), "--timeout-method", "thread", "-m", "gpu"]
        text, finished = "", False
        for _ in range(RESTARTS):
            left_s = deadline_s - monotonic()
            if finished or left_s < LEAST_S:
                break
            known = len(outcomes.read(file))
            command = [sys.executable, *words, *limits, *stage.words]
            _, text = self._process(stage, command, left_s)
            finished = any(line["outcome"] == "finished" for line in outcomes.read(file))
            if not finished and len(outcomes.read(file)) == known:
                break  # the process does not start at all
        return _summary(file, finished, text)

    def _process(self, stage: Stage, command: Sequence[str], limit_s: float) -> tuple[int | None, str]:
        """Run a process and return its exit status (None after the limit) and its output. Its child processes end with
        it.
        """
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [PYTHONPATH, os.environ.get("PYTHONPATH", "")])),
            **self._tests_environment,
            "PYTHONUNBUFFERED": "1",
        }
        with TemporaryDirectory() as folder:
            printed = Path(folder) / "output"
            with printed.open("wb") as file:
                process = subprocess.Popen(
                    command,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    cwd=ROOT,
                    start_new_session=True,
                )
                try:
                    status = process.wait(limit_s)
                except subprocess.TimeoutExpired:
                    status = None
                finally:
                    _kill_group(process)
            text = printed.read_text(encoding="utf-8", errors="replace")
        with self._log.open("a", encoding="utf-8") as log:
            log.write(f"\n=== {stage.name}: {' '.join(command)}\n{text}\n=== exit status {status}\n")
        return status, text


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _summary(file: Path, finished: bool, text: str) -> dict[str, Any]:
    last: dict[str, dict[str, Any]] = {line["test"]: line for line in outcomes.read(file) if "test" in line}  # pyright: ignore
    for line in last.values():
        if line["outcome"] == "started":
            line |= {"outcome": "crashed", "why": text[-1500:]}
    counts = Counter(str(line["outcome"]) for line in last.values())
    failures = [line for line in last.values() if line["outcome"] in ("failed", "crashed")]
    if failures:
        status = "failed"
    else:
        status = "passed" if finished else "not finished"
    if finished and not counts["passed"]:
        status = "nothing ran"
    return {"status": status, "tests": dict(counts), "failures": failures, "output": text[-OUTPUT_CHARS:]}
