"""Everything that Penstock raises on purpose.

    PenstockError
    ├── ConfigurationError        refused before start; says what to use instead
    │   └── CheckpointError       the files are not the model they claim to be
    ├── RequestError              the sender's mistake; carries an HTTP status and the parameter's path
    │   ├── InvalidRequest        400
    │   │   └── ContextOverflow   400, the prompt does not fit
    │   ├── Unauthorized          401
    │   ├── Forbidden             403
    │   ├── NotFound              404
    │   ├── PayloadTooLarge       413
    │   └── NotSupported          501, there is nothing here yet that does it
    ├── Overloaded                503, try again later (Retry-After)
    ├── WrongEventLoop            an engine was called from another event loop than its own
    └── EngineFailure             500, our mistake
        ├── StepFailed            a forward fails for this request, which is lost; the engine goes on
        │   ├── NotFinite         the model computed no numbers for a request; it alone is lost
        │   └── OutOfMemory       for want of memory: one request is lost, the others are computed again
        ├── WorkerFailed          a process that computes with this one is gone; so is the whole replica
        └── EngineClosed          503, the engine is gone or going

Messages of foreign libraries never reach a client: handlers send the text of these and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload


class PenstockError(Exception):
    """The root of the tree."""


class ConfigurationError(PenstockError):
    """What the user asked for cannot be done here.

    All refusals are collected before anything heavy is touched; `refusals` holds one sentence each.
    """

    def __init__(self, *refusals: str) -> None:
        self.refusals: Sequence[str] = refusals
        super().__init__("\n".join(refusals))


class CheckpointError(ConfigurationError):
    """A checkpoint is missing, unreadable, or its tensors do not fit the model (each is named)."""


class RequestError(PenstockError):
    """One request is wrong; nobody else is affected. `param` is the dotted path of the culprit."""

    status = 400
    kind = "BadRequestError"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        self.message = message
        self.param = param
        super().__init__(message)


class InvalidRequest(RequestError):
    """A value of the wrong type or outside its range, or a combination that makes no sense."""


class TakesLong(InvalidRequest):
    """A chat would hold the event loop for too long: prepare it again in a thread."""


class ContextOverflow(InvalidRequest):
    """The prompt (with what is to be generated) is longer than the model or the pool can hold."""

    @classmethod
    def of_input(cls, num_tokens: int, context_length: int, param: str) -> ContextOverflow:
        """For a prompt that does not fit, or leaves no room for output."""
        trouble = "is longer than" if num_tokens > context_length else "leaves no room for output in"
        return cls(
            f"The input ({num_tokens} tokens) {trouble} the model's context length ({context_length} tokens).",
            param=param,
        )


class Unauthorized(RequestError):
    """The route asks for a key, and the request has none that is known."""

    status = 401
    kind = "AuthenticationError"


class Forbidden(RequestError):
    """The sender is known, or a page of another origin, and may not do this."""

    status = 403
    kind = "PermissionDeniedError"


class NotFound(RequestError):
    """What was named is not there: a model, a file, a response, a batch, metrics."""

    status = 404
    kind = "NotFoundError"


class PayloadTooLarge(RequestError):
    """The body has more bytes, or holds more values, than its route takes."""

    status = 413
    kind = "PayloadTooLargeError"


class NotSupported(RequestError):
    """A route or a field that means something for which there is nothing here yet."""

    status = 501
    kind = "NotImplementedError"


class Overloaded(PenstockError):
    """Too much is waiting. `retry_after_s` is a hint for the sender."""

    status = 503
    kind = "ServiceUnavailableError"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        self.message = message
        self.retry_after_s = retry_after_s
        super().__init__(message)


class TooManyRequests(Overloaded):
    """This client has too many requests open, whatever the others do."""

    status = 429
    kind = "TooManyRequestsError"


class WrongEventLoop(PenstockError):
    """An `Engine` lives on the loop that started it; calls from another one would wait for ever."""


class EngineFailure(PenstockError):
    """Something of ours broke. The cause is chained for the log, never for the client."""

    status = 500
    kind = "InternalServerError"

    def __init__(self, message: str = "The engine failed.") -> None:
        self.message = message
        super().__init__(message)


class StepFailed(EngineFailure):
    """The forward pass fails for this request, alone too."""


class NotFinite(StepFailed):
    """The model computed values for this request that are not finite numbers."""


class OutOfMemory(StepFailed):
    """The device had too little memory for a step; the request that came last was given up for the others."""


class WorkerFailed(EngineFailure):
    """A rank can compute no more; `message` names it. What it raised, with its traceback, is the cause."""


class EngineClosed(EngineFailure):
    """The engine is shut down or shutting down."""

    status = 503
    kind = "ServiceUnavailableError"


@overload
def first_error(error: Exception) -> Exception: ...
@overload
def first_error(error: BaseException) -> BaseException: ...
def first_error(error: BaseException) -> BaseException:
    """The first leaf of nested exception groups, or the error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
