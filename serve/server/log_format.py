"""Logs of the server's process: plain lines or JSON objects, with a limit on repeated records."""

from __future__ import annotations

import logging
import logging.config
import sys
import time
from datetime import UTC, datetime
from typing import Any, cast

import orjson

from runtime.config import Args

TRACE = 5  # uvicorn's most verbose level
WINDOW_S = 10.0
MAX_ALIKE = 5  # maximum number of records with the same text per window


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object per line.

    Keys: `time` in UTC, `level`, `logger`, `message`, and `exception` for errors.
    """

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(entry, default=str).decode()


def configure_logging(args: Args) -> None:
    """Configure the logging of the server's process. An `Engine` used from Python does not configure logging."""
    logging.addLevelName(TRACE, "TRACE")
    level = args.observe.log_level.upper()
    level_http = (args.observe.log_level_http or args.observe.log_level).upper()
    line = {"format": "[%(asctime)s] %(message)s", "datefmt": "%Y-%m-%d %H:%M:%S"}
    formatter = {"()": JsonFormatter} if args.observe.log_json else line
    handlers: dict[str, Any] = {"handlers": ["stderr"], "propagate": False}
    stderr = {
        "class": "logging.StreamHandler",
        "stream": sys.stderr,
        "formatter": "line",
        "filters": ["calm"],
    }
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "filters": {"calm": {"()": CalmLog}, "path": {"()": PathOnly}},
            "formatters": {"line": formatter},
            "handlers": {"stderr": stderr},
            "loggers": {
                "penstock": {"level": level, **handlers},
                "uvicorn": {"level": level_http, **handlers},
                "uvicorn.access": {"filters": ["path"]},
            },
        }
    )


class PathOnly(logging.Filter):
    """A filter that removes the query from uvicorn's access records, because it may contain keys and other secrets."""

    def filter(self, record: logging.LogRecord) -> bool:
        client, method, target, *rest = cast(tuple[str, ...], record.args)
        record.args = (client, method, target.partition("?")[0], *rest)
        return True


class CalmLog(logging.Filter):
    """A filter that limits repeated warnings and errors.

    At most `MAX_ALIKE` records with the same unformatted text pass in `WINDOW_S` seconds. The next record that passes
    says how many were dropped.
    """

    def __init__(self) -> None:
        super().__init__()
        self._windows: dict[str, _Window] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        now_s = time.monotonic()
        window = self._windows.setdefault(str(record.msg)[:200], _Window(now_s))
        if now_s - window.start_s >= WINDOW_S:
            left_out, window.start_s, window.num_records = window.num_records - MAX_ALIKE, now_s, 0
            if left_out > 0:
                record.msg = f"{record.msg} ({left_out} similar messages were dropped)"
        window.num_records += 1
        return window.num_records <= MAX_ALIKE


class _Window:
    __slots__ = ("num_records", "start_s")

    def __init__(self, start_s: float) -> None:
        self.start_s = start_s
        self.num_records = 0
