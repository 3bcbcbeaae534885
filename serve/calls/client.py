"""Context variables: the client whose HTTP request the task answers, and data from the request's headers."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

from runtime.request import ANONYMOUS, Caller


@dataclass(frozen=True, slots=True)
class Client:
    """The sender of a request. `name` is the name of its API key, or empty without a key."""

    name: str = ""
    is_admin: bool = False


# The client of the running task. Calls from Python have no HTTP client and get `THIS_PROCESS`.
THIS_PROCESS = Client(is_admin=True)
CLIENT: ContextVar[Client] = ContextVar("penstock_client", default=THIS_PROCESS)
# Data about the caller, read from the request's headers.
CALLER: ContextVar[Caller] = ContextVar("penstock_caller", default=ANONYMOUS)
