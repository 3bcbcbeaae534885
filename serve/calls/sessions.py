"""The bodies of `/open_session` and `/close_session`, and the field `session_params` of a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from runtime.request import SessionParams
from serve.calls.decode import Length, Range

Name = Annotated[str, Length(1, 256)]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSessionBody:
    """The body of `/open_session`."""

    capacity_of_str_len: Annotated[int, Range(1, 2**31 - 1)]  # maximum number of tokens that the session keeps
    session_id: Name | None = None  # None: the server chooses a name


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseSessionBody:
    """The body of `/close_session`."""

    session_id: Name


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionBody:
    """The session of a request, and the earlier request whose tokens it continues."""

    id: Name
    rid: str | None = None  # the request to continue; None: start with no tokens
    # number of leading tokens of that request to keep; None or 0: all; negative: number to drop at the end
    offset: Annotated[int, Range(-(2**31), 2**31 - 1)] | None = None
    replace: bool = False  # whether to remove the requests after `rid` from the session, or all if `rid` is None
    drop_previous_output: bool = False  # whether to continue only that request's prompt, without its output

    def params(self) -> SessionParams:
        """Return these fields as the engine's `SessionParams`."""
        return SessionParams(self.id, self.rid, self.offset or 0, self.replace, self.drop_previous_output)
