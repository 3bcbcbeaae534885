from __future__ import annotations

import logging

import pytest

from serve.calm_log import MAX_ALIKE, WINDOW_S, CalmLog


def record(text: str, *values: object, level: int = logging.ERROR) -> logging.LogRecord:
    return logging.LogRecord("penstock.http", level, __file__, 1, text, values, None)


def test_a_flood_is_a_few_lines_and_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("serve.calm_log.time.monotonic", lambda: now_s)
    calm = CalmLog()
    passed = [calm.filter(record("failed: %s", number)) for number in range(1000)]
    assert passed == [True] * MAX_ALIKE + [False] * (1000 - MAX_ALIKE)
    assert calm.filter(record("something else"))
    now_s += WINDOW_S
    late = record("failed: %s", 7)
    assert calm.filter(late)
    assert late.getMessage() == f"failed: 7 ({1000 - MAX_ALIKE} more like this were left out)"


def test_what_is_no_warning_always_passes() -> None:
    calm = CalmLog()
    assert all(calm.filter(record("POST", level=logging.INFO)) for _ in range(100))
