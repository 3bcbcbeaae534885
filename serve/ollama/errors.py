"""Errors in Ollama's format, `{"error": message}`, as a body or as the last line of a stream."""

from __future__ import annotations

from typing import Any

import orjson

from serve.calls.sampling import sampling_names
from serve.http.errors import ErrorFormat, Failure


def ollama_error_body(failure: Failure) -> dict[str, Any]:
    """Return the failure as an error body of this API."""
    return {"error": failure.message}


def _line(failure: Failure) -> bytes:
    return orjson.dumps(ollama_error_body(failure)) + b"\n"


_OPTIONS = {
    "max_new_tokens": "num_predict",
    "max_tokens": "num_predict",
    "repetition_penalty": "repeat_penalty",
}
ERROR_FORMAT = ErrorFormat(
    ollama_error_body,
    {
        **{name: f"options.{_OPTIONS.get(name, name)}" for name in (*sampling_names("chat").values(), *_OPTIONS)},
        "text": "messages",
        "response_format": "format",
        "response_format.json_schema": "format",
    },
    _line,
)
