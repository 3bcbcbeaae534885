"""Errors common to all APIs: aborted requests, and invalid parameters under the API's own names."""

from __future__ import annotations

from typing import TypeVar

from runtime.actors.live_requests import ABORTED, ABORTED_EARLY
from runtime.constraint import NOTHING_ALLOWED
from runtime.errors import EngineFailure, InvalidRequest, RequestError
from runtime.request import Finish

AnyRequestError = TypeVar("AnyRequestError", bound=RequestError)


class Aborted(RequestError):
    """The request was aborted. The protocols of OpenAI, Anthropic and Ollama have no finish reason for this."""

    kind = "RequestAborted"


def ended(finish: Finish | None) -> Finish:
    """Return `finish` if the answer is complete.

    Raises `Aborted` for an aborted request, `InvalidRequest` if the grammar allowed no token, and `EngineFailure` for
    other failures.
    """
    if finish is None or finish in (ABORTED, ABORTED_EARLY):
        raise Aborted("The request was aborted.")
    if finish.message == NOTHING_ALLOWED:
        raise InvalidRequest(NOTHING_ALLOWED)
    if finish.kind == "abort":
        raise EngineFailure(finish.message or "The server could not finish this request.")
    return finish


def renamed(error: AnyRequestError, param: str) -> AnyRequestError:
    """Return a copy of the error that names the parameter `param`, the API's own name, also in its message."""
    message = error.message
    if error.param and message.startswith(error.param):
        message = param + message[len(error.param) :]
    return type(error)(message, param=param)
