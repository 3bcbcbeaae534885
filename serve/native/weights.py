"""SGLang's routes for weights: update them from disk, from a trainer or from the body; label, read and check them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio.to_thread
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from runtime.errors import CheckpointError, InvalidRequest
from serve.calls import weights as calls
from serve.http.endpoint import decodes, json_response, read_as
from serve.http.errors import ErrorFormat, Failure, native_body

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore


@decodes(calls.WeightsFromDiskBody)
async def update_from_disk(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Replace the weights with those of a checkpoint in a folder on the server's machine.

    Answers when all ranks have the new weights. If the weights cannot be replaced, keeps the old weights, and answers
    400 with the reason as `message`.
    """
    body = await read_as(http, calls.WeightsFromDiskBody)
    try:
        return json_response(await calls.update_weights_from_disk(core, body))
    except CheckpointError as error:
        raise InvalidRequest(str(error), param="model_path") from error


@decodes(calls.UpdateGroupBody)
async def init_group(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Join a trainer's process group, to receive weights. Answers when all members have joined."""
    body = await read_as(http, calls.UpdateGroupBody)
    return json_response(await calls.open_group(core, body))


@decodes(calls.DestroyGroupBody)
async def destroy_group(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Leave a process group."""
    body = await read_as(http, calls.DestroyGroupBody)
    return json_response(await calls.close_group(core, body))


@decodes(calls.SendGroupBody)
async def init_send_group(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Wait for a new server that copies this server's weights. Answers when all ranks of the new server have joined."""
    body = await read_as(http, calls.SendGroupBody)
    return json_response(await calls.open_sending(core, body))


@decodes(calls.SendWeightsBody)
async def send(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Send all weights to the new server, while requests continue."""
    body = await read_as(http, calls.SendWeightsBody)
    return json_response(await calls.send_weights(core, body))


@decodes(calls.WeightsFromGroupBody)
async def update_from_group(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Replace weights with tensors that rank 0 of a group broadcasts, or answer 400 and keep the old weights."""
    body = await read_as(http, calls.WeightsFromGroupBody)
    try:
        return json_response(await calls.update_weights_from_group(core, body))
    except CheckpointError as error:
        raise InvalidRequest(str(error), param="names") from error


@decodes(calls.WeightsFromTensorBody)
async def update_from_tensor(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Replace weights with tensors in the body, or answer 400 and keep the old weights. Pickles are refused."""
    body = await read_as(http, calls.WeightsFromTensorBody)
    try:
        return json_response(await calls.update_weights_from_bytes(core, body))
    except CheckpointError as error:
        raise InvalidRequest(str(error), param="serialized_named_tensors") from error


@decodes(calls.WeightVersionBody)
async def update_version(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Set the version label of the weights.

    Native answers contain this label, and answers to chats and completions without `stream`.
    """
    body = await read_as(http, calls.WeightVersionBody)
    return json_response(await calls.update_weight_version(core, body))


@decodes(calls.ReadWeightBody)
async def read(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return the first rows of a tensor, by its name in the checkpoint, as nested lists."""
    body = await read_as(http, calls.ReadWeightBody)
    try:
        return await anyio.to_thread.run_sync(json_response, await calls.read_weight(core, body))
    except CheckpointError as error:
        raise InvalidRequest(str(error), param="name") from error


@decodes(calls.WeightsCheckerBody)
async def check(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Take checksums of all weights (snapshot, checksum), compare them with a snapshot, or overwrite the weights."""
    body = await read_as(http, calls.WeightsCheckerBody)
    answer = await calls.check_weights(core, body)
    return json_response(answer, 200 if answer["success"] else 400)


def _error_body(failure: Failure) -> dict[str, Any]:
    """Return the native error format with the fields that SGLang's clients read."""
    return {
        **native_body(failure),
        "success": False,
        "message": failure.message,
        "num_paused_requests": 0,
    }


ERROR_FORMAT = ErrorFormat(_error_body)
