"""Tests marked `interpreter` run in a child process, in which Triton kernels are interpreted on the CPU.

Triton reads TRITON_INTERPRET when it is imported, so one process either interprets kernels or compiles them. The
tests are collected as usual and run in a child for each file. Its reports arrive one by one through a pipe, and each
test fails, passes and takes its time where it was collected. The child checks every memory access (`kernel_memory`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

import kernel_memory

VARIABLE = "TRITON_INTERPRET"
REPORT_FD = "PENSTOCK_INTERPRETER_REPORT_FD"


class Outcome(NamedTuple):
    """The result of one test."""

    word: str  # "passed", "failed", "skipped"
    text: str  # the traceback or the reason


def is_interpreting() -> bool:
    return os.environ.get(VARIABLE) == "1"


class InterpreterSession:
    """The child process for one file. It starts immediately, and its tests are awaited one by one."""

    def __init__(self, file: Path, root: Path, nodeids: Sequence[str]) -> None:
        self.file = file
        reading, writing = os.pipe()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the session
        self._child = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *nodeids],
            cwd=root,
            env={**os.environ, VARIABLE: "1", REPORT_FD: str(writing)},
            pass_fds=[writing],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        os.close(writing)
        self._reports = os.fdopen(reading)
        self._outcomes: dict[str, Outcome] = {}

    def outcome(self, nodeid: str) -> Outcome:
        """Wait for the report about this test."""
        while nodeid not in self._outcomes:
            line = self._reports.readline()
            if not line:
                self._log.seek(0)
                return Outcome("failed", "the interpreting child ended early:\n" + self._log.read()[-8000:])
            name, word, text = json.loads(line)
            self._outcomes[name] = Outcome(word, text)
        return self._outcomes[nodeid]

    def close(self) -> None:
        self._reports.close()
        if self._child.poll() is None:
            self._child.kill()
        self._child.wait()
        self._log.close()


def send_report(nodeid: str, word: str, text: str) -> None:
    """Send the report of a finished test. Called in the child process."""
    fd = os.environ.get(REPORT_FD)
    if fd is not None:
        os.write(int(fd), (json.dumps([nodeid, word, text[-30_000:]]) + "\n").encode())


def pytest_configure() -> None:
    if is_interpreting() and find_spec("triton") is not None:
        kernel_memory.install()


_CHILD = pytest.StashKey[InterpreterSession]()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if is_interpreting() or pyfuncitem.get_closest_marker("interpreter") is None:
        return None
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    word, text = _child(pyfuncitem).outcome(pyfuncitem.nodeid)
    if word == "failed":
        pytest.fail(text, pytrace=False)
    if word == "skipped":
        pytest.skip(text)
    return True


def _child(item: pytest.Function) -> InterpreterSession:
    """Return the child for the item's file. In several processes, each then runs only the files that it was given."""
    session = item.session
    child = session.stash.get(_CHILD, None)
    if child is None or child.file != item.path:
        if child is not None:
            child.close()
        marked = (each for each in session.items if each.get_closest_marker("interpreter"))
        nodeids = [each.nodeid for each in marked if each.path == item.path]
        child = session.stash[_CHILD] = InterpreterSession(item.path, session.config.rootpath, nodeids)
    return child


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if is_interpreting() and (report.when == "call" or report.outcome != "passed"):
        send_report(report.nodeid, report.outcome, report.longreprtext)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _CHILD in session.stash:
        session.stash[_CHILD].close()
