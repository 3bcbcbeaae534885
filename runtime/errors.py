"""The exceptions of Penstock.

    PenstockError
    ├── ConfigurationError        the options cannot be followed; the message says what to use instead
    │   └── CheckpointError       the checkpoint's files are missing or invalid
    ├── RequestError              the request is invalid; has an HTTP status and the parameter's path
    │   ├── InvalidRequest        400
    │   │   ├── ContextOverflow   400, the prompt does not fit
    │   │   └── TakesLong         internal: the caller must prepare the chat on a thread
    │   ├── Unauthorized          401
    │   ├── Forbidden             403
    │   ├── DeadlinePassed        408, the request's own time limit
    │   ├── NotFound              404
    │   ├── PayloadTooLarge       413
    │   └── NotSupported          501, the feature is not supported yet
    ├── Overloaded                503, try again later (Retry-After)
    │   └── TooManyRequests       429, this client has too many open requests
    ├── WrongEventLoop            an engine was called from another event loop than its own
    └── EngineFailure             500, Penstock failed
        ├── StepFailed            the forward pass fails for this request, which ends; the engine continues
        │   ├── NotFinite         the model computed non-finite values for this request, which ends
        │   └── OutOfMemory       too little memory: one request ends, the others are recomputed
        ├── WorkerFailed          a worker process is gone, and so is its replica
        └── EngineClosed          503, the engine is shut down or shutting down

Messages of other libraries never reach a client: handlers send only the text of these exceptions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

NO_MEMORY_TO_START = (
    "There is too little memory for the model and its KV cache. Lower --mem-fraction-static or --max-total-tokens, or "
    "end other programs."
)


class PenstockError(Exception):
    """Base class of all exceptions of Penstock."""


class _BriefError(PenstockError):
    """An error whose message says everything. IPython shows only the message; `sys.last_value` has the traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class ConfigurationError(_BriefError):
    """The options ask for something that this machine or model cannot do.

    All problems are collected before weights are loaded. `refusals` has one sentence for each problem.
    """

    def __init__(self, *refusals: str) -> None:
        self.refusals: Sequence[str] = refusals
        super().__init__("\n".join(refusals))


class CheckpointError(ConfigurationError):
    """A checkpoint is missing or unreadable, or its tensors do not fit the model. The message lists all problems."""


class MissingTensor(CheckpointError):
    """A quantised checkpoint lacks the tensor `name`, for example the scale of a weight that it contains."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"The quantized checkpoint lacks {name}.")


class RequestError(_BriefError):
    """A request is invalid; others are not affected. `param` is the dotted path of the invalid parameter."""

    status = 400
    kind = "BadRequestError"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        self.message = message
        self.param = param
        super().__init__(message)


class InvalidRequest(RequestError):
    """A value has the wrong type or is out of range, or values contradict each other."""


class TakesLong(InvalidRequest):
    """Preparing a chat on the event loop would block it for too long. The caller must prepare the chat on a thread."""


class ContextOverflow(InvalidRequest):
    """The prompt and its output are longer than the model's context or the KV pool."""

    @classmethod
    def of_input(cls, num_tokens: int, context_length: int, param: str) -> ContextOverflow:
        """Return the error for a prompt that does not fit or leaves no room for output."""
        trouble = "is longer than" if num_tokens > context_length else "leaves no room for output in"
        return cls(
            f"The input ({num_tokens} tokens) {trouble} the model's context length ({context_length} tokens).",
            param=param,
        )


class Unauthorized(RequestError):
    """The route requires an API key, and the request has none or an unknown one."""

    status = 401
    kind = "AuthenticationError"


class Forbidden(RequestError):
    """The sender's key does not allow this route, or the sender is a web page of another origin."""

    status = 403
    kind = "PermissionDeniedError"


class NotFound(RequestError):
    """The named model, file, response, batch or metric does not exist."""

    status = 404
    kind = "NotFoundError"


class DeadlinePassed(RequestError):
    """The time limit of the request has passed, or will pass before its first token."""

    status = 408
    kind = "RequestTimeoutError"


class PayloadTooLarge(RequestError):
    """The body has more bytes or values than its route accepts."""

    status = 413
    kind = "PayloadTooLargeError"


class NotSupported(RequestError):
    """The feature of a route or field is not supported yet."""

    status = 501
    kind = "NotImplementedError"


class Overloaded(_BriefError):
    """The queue is full. The client should retry after `retry_after_s` seconds."""

    status = 503
    kind = "ServiceUnavailableError"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        self.message = message
        self.retry_after_s = retry_after_s
        super().__init__(message)


class TooManyRequests(Overloaded):
    """This client has too many open requests."""

    status = 429
    kind = "TooManyRequestsError"


class WrongEventLoop(_BriefError):
    """An `Engine` was called from another event loop than its own, where the call would never return."""


class EngineFailure(PenstockError):
    """An error in Penstock. The chained cause is logged, but never sent to the client."""

    status = 500
    kind = "InternalServerError"

    def __init__(self, message: str = "The engine failed.") -> None:
        self.message = message
        super().__init__(message)


class StepFailed(EngineFailure):
    """The forward pass fails for this request, even when the request is computed alone."""


class NotFinite(StepFailed):
    """The model computed values for this request that are not finite (NaN or infinite)."""


class OutOfMemory(StepFailed):
    """The device had too little memory for a step. The newest request was ended."""


class WorkerFailed(EngineFailure):
    """A worker process has ended. `message` names its rank, and the chained cause has the traceback."""


class EngineClosed(EngineFailure, _BriefError):
    """The engine is shut down or shutting down."""

    status = 503
    kind = "ServiceUnavailableError"


@overload
def first_error(error: Exception) -> Exception: ...
@overload
def first_error(error: BaseException) -> BaseException: ...
def first_error(error: BaseException) -> BaseException:
    """Return the first exception in nested exception groups, or the error itself if it is not a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
