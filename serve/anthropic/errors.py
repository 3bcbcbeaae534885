"""Errors in Anthropic's format, as a body or as the last event of a stream.

The format is `{"type": "error", "error": {"type", "message"}}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from serve.calls.sampling import sampling_names
from serve.http.errors import ErrorFormat, Failure

_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def messages_error_body(failure: Failure) -> dict[str, Any]:
    """Return the failure as an error body of this API."""
    kind = _TYPES.get(failure.status, "invalid_request_error" if failure.status < 500 else "api_error")
    error: dict[str, Any] = {"type": kind, "message": failure.message}
    if failure.param == "thread":
        error["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": error, "request_id": None}


def error_event(failure: Failure) -> bytes:
    """Return the event that ends a started stream with an error."""
    return event("error", messages_error_body(failure))


def event(name: str, data: Mapping[str, Any]) -> bytes:
    """Return one server-sent event."""
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n"


ERROR_FORMAT = ErrorFormat(
    messages_error_body,
    {
        **sampling_names("chat"),
        "text": "messages",
        "max_new_tokens": "max_tokens",
        "stop": "stop_sequences",
        "response_format": "output_config.format",
        "response_format.json_schema": "output_config.format.schema",
        "max_thinking_tokens": "thinking.budget_tokens",
    },
    error_event,
)
