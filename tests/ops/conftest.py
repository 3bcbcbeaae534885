"""Tests marked `interpreter` run in a child process; see `interpreter_session`."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from interpreter_session import InterpreterSession, is_interpreting, send_report

_CHILD = pytest.StashKey[InterpreterSession]()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if is_interpreting() or pyfuncitem.get_closest_marker("interpreter") is None:
        return None
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    word, text = _child(pyfuncitem.session).outcome(pyfuncitem.nodeid)
    if word == "failed":
        pytest.fail(text, pytrace=False)
    if word == "skipped":
        pytest.skip(text)
    return True


def _child(session: pytest.Session) -> InterpreterSession:
    if _CHILD not in session.stash:
        nodeids = [item.nodeid for item in session.items if item.get_closest_marker("interpreter")]
        session.stash[_CHILD] = InterpreterSession(session.config.rootpath, nodeids)
    return session.stash[_CHILD]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if is_interpreting() and (report.when == "call" or report.outcome != "passed"):
        send_report(report.nodeid, report.outcome, report.longreprtext)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _CHILD in session.stash:
        session.stash[_CHILD].close()
