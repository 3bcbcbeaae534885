"""How the server's process logs: lines for people, or JSON objects for collectors of logs."""

from __future__ import annotations

import logging
import logging.config
import sys
from datetime import UTC, datetime
from typing import Any

import orjson

from runtime.config import Args
from serve.calm_log import CalmLog

TRACE = 5  # uvicorn's name for all that it can say


class JsonFormatter(logging.Formatter):
    """One object a line: `time` in UTC, `level`, `logger`, `message` and, of an error, `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(said, default=str).decode()


def configure_logging(args: Args) -> None:
    """Only for the server's process: an `Engine` leaves the configuration of logging to its user."""
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
            "filters": {"calm": {"()": CalmLog}},
            "formatters": {"line": formatter},
            "handlers": {"stderr": stderr},
            "loggers": {
                "penstock": {"level": level, **handlers},
                "uvicorn": {"level": level_http, **handlers},
            },
        }
    )
