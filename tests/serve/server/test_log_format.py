"""The server's log: level names in any case, optional JSON, and no floods."""

from __future__ import annotations

import json
import logging
import sys

import httpx
import pytest

from runtime.config import Args
from runtime.errors import ConfigurationError
from serve.server.log_format import MAX_ALIKE, WINDOW_S, CalmLog, JsonFormatter
from server_process import serving


def test_levels_may_be_written_in_capitals() -> None:
    args = Args.parse(["--log-level", "WARNING", "--log-level-http", "Trace"])
    assert (args.observe.log_level, args.observe.log_level_http) == ("warning", "trace")
    assert Args.of(log_level="ERROR").observe.log_level == "error"
    with pytest.raises(ConfigurationError, match="must be one of"):
        Args.of(log_level="LOUD")


def test_message_as_json() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        record = logging.LogRecord("penstock.x", logging.ERROR, "f", 1, "a %s\nb", ("c",), sys.exc_info())
    said = json.loads(JsonFormatter().format(record))
    assert (said["level"], said["logger"], said["message"]) == ("error", "penstock.x", "a c\nb")
    assert said["exception"].endswith("ValueError: broken")
    assert said["time"].endswith("+00:00")


@pytest.mark.slow
def test_server_starts_with_trace_and_logs_json() -> None:
    options = ("--log-json", "--log-level-http", "TRACE", "--log-requests")
    with serving(*options) as server:
        lines = [json.loads(line) for line in server.log]
    assert any(line["message"].startswith("Receive: obj=") for line in lines)
    [done] = [line["message"] for line in lines if line["message"].startswith("Finish: obj=")]
    [choice] = json.loads(done.partition(", out=")[2])["choices"]
    assert (choice["output"], choice["text"] != "") == (8, True)  # the warm-up request
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)


def record(text: str, *values: object, level: int = logging.ERROR) -> logging.LogRecord:
    return logging.LogRecord("penstock.http", level, __file__, 1, text, values, None)


def test_a_flood_is_a_few_lines_and_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("serve.server.log_format.time.monotonic", lambda: now_s)
    calm = CalmLog()
    passed = [calm.filter(record("failed: %s", number)) for number in range(1000)]
    assert passed == [True] * MAX_ALIKE + [False] * (1000 - MAX_ALIKE)
    assert calm.filter(record("something else"))
    now_s += WINDOW_S
    late = record("failed: %s", 7)
    assert calm.filter(late)
    assert late.getMessage() == f"failed: 7 ({1000 - MAX_ALIKE} similar messages were dropped)"


def test_what_is_no_warning_always_passes() -> None:
    calm = CalmLog()
    assert all(calm.filter(record("POST", level=logging.INFO)) for _ in range(100))


def test_a_query_is_not_logged() -> None:
    with serving("--log-level-http", "info") as server:
        httpx.get(f"{server.url}/health?key=sk-1")
        assert '"GET /health HTTP/1.1" 200' in server.wait_for("GET /health")
