"""`/update_weights_from_disk`: load other weights of the same model while requests run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from runtime.errors import CheckpointError, InvalidRequest
from serve.calls.body import parse_object
from serve.calls.decode import decode
from serve.calls.weights import WeightsFromDiskBody, update_weights_from_disk
from serve.http.endpoint import decodes, json_response, read_body
from serve.http.errors import ErrorFormat, Failure, native_body

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore


@decodes(WeightsFromDiskBody)
async def update_from_disk(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Replace the weights by those of a checkpoint in a folder on the server's machine.

    Answers when all ranks have the new weights. Answers 400, with the reason as `message`, if the weights could not be
    replaced; the old ones then stay.
    """
    body = await read_body(http, lambda raw: decode(WeightsFromDiskBody, parse_object(raw)))
    try:
        return json_response(await update_weights_from_disk(core, body))
    except CheckpointError as error:
        raise InvalidRequest(str(error), param="model_path") from error


def _error_body(failure: Failure) -> dict[str, Any]:
    """Return the native error format with the fields that SGLang's clients read."""
    return {
        **native_body(failure),
        "success": False,
        "message": failure.message,
        "num_paused_requests": 0,
    }


ERROR_FORMAT = ErrorFormat(_error_body)
