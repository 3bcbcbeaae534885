"""A pytest plugin that writes each test's outcome immediately, so that a crash loses only one test.

The file has lines of JSON: {"test", "outcome", "seconds", "why"}. "outcome" is "started" before the test, and "passed",
"failed" or "skipped" after it. A last line {"outcome": "finished"} means that no test is left. Tests with an outcome in
the file are not run again.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

LOST = ("CUDA error", "device-side assert", "AcceleratorError")  # errors after which the process cannot use its GPU
WHY_CHARS = 1500


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", required=True, help="the file of outcomes")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Outcomes(Path(str(config.getoption("--outcomes")))), "outcomes-file")


def read(file: Path) -> list[dict[str, str | float]]:
    """Return all lines of the file. A crash may have truncated the last line."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


class Outcomes:
    """Writes the file, skips tests that are in it, and ends a session that has lost its GPU."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._done = {line["test"] for line in read(file) if "test" in line}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid not in self._done]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(test=nodeid, outcome="started")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            why = str(report.longrepr)[-WHY_CHARS:] if report.longrepr else ""
            self._write(test=report.nodeid, outcome=report.outcome, seconds=round(report.duration, 2), why=why)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        result = yield
        last = read(self._file)[-1]
        if last["outcome"] == "failed" and any(words in str(last["why"]) for words in LOST):
            item.session.shouldstop = "the GPU is lost to this process"
        return result

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not session.shouldstop:
            self._write(outcome="finished")

    def _write(self, **line: str | float) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
