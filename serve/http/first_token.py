"""Response headers with the predicted and the measured time to first token, in milliseconds."""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.actors.output_stream import OutputStream

PREDICTED, MEASURED = b"x-predicted-first-token-ms", b"x-first-token-ms"
# Output streams of the HTTP call that the current task answers. `Endpoint` sets a new list for each call.
STREAMS: ContextVar[list[OutputStream] | None] = ContextVar("STREAMS", default=None)


def note_streams(streams: Iterable[OutputStream]) -> None:
    """Add output streams to `STREAMS`, from which the headers of the current call's response are computed."""
    known = STREAMS.get()
    if known is not None:
        known += streams


def first_token_headers(streams: Iterable[OutputStream]) -> list[tuple[bytes, bytes]]:
    """Return the headers with the time to first token in milliseconds, or none if no stream has a prediction.

    For several streams, the headers are those of the stream with the longest predicted time. The measured time is left
    out if the response begins before the first token arrives.
    """
    known = [each.times for each in streams if each.times is not None and each.times.predicted_first_token_s]
    if not known:
        return []
    times = max(known, key=lambda each: each.predicted_first_token_s)
    headers = [(PREDICTED, b"%.1f" % (times.predicted_first_token_s * 1000))]
    if times.first_token:
        headers.append((MEASURED, b"%.1f" % ((times.first_token - times.arrived) * 1000)))
    return headers
