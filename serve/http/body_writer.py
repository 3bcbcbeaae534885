"""Write streamed bodies directly to the connection. The server puts the writer into the request's ASGI scope."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Not imported at run time, because only a server needs uvicorn.
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


BODY_WRITER = "penstock.body_writer"  # key in the scope of every request


class BodyWriter:
    """Writes parts of a streamed body directly to the connection, which costs less than ASGI's `send` coroutine.

    The reference to uvicorn's request-response cycle is weak, because the cycle has the scope, and the scope has this
    object.
    """

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = weakref.ref(cycle)

    @property
    def ready(self) -> bool:
        """Whether `write` may be called now: a body is being streamed, and the client reads fast enough."""
        cycle = self._cycle()
        if cycle is None or cycle.disconnected or cycle.response_complete:
            return False
        return cycle.chunked_encoding is True and not cycle.flow.write_paused

    def write(self, part: bytes) -> None:
        """Write `part`, which must not be empty. Call only while `ready`."""
        cycle = self._cycle()
        if cycle is not None:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))
