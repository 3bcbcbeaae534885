"""SGLang's routes to pause generation, release memory, and delay steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from runtime.actors.generation_pause import mode_of
from runtime.errors import CheckpointError, InvalidRequest
from serve.calls.occupation import ContinueBody, MemoryBody, PauseBody, SlowDownBody, pause, resume, tags_of
from serve.http.endpoint import decodes, json_response, read_as

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

Body = TypeVar("Body")


@decodes(MemoryBody)
async def release_memory(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Release the memory of weights and KV cache. Requests wait until all released memory is allocated again."""
    body = await read_optional(http, MemoryBody)
    await core.weights.release(tags_of(body.tags))
    return json_response(None)


@decodes(MemoryBody)
async def resume_memory(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Allocate released memory again, and restore the weights."""
    body = await read_optional(http, MemoryBody)
    await core.weights.resume(tags_of(body.tags))
    return json_response(None)


@decodes(PauseBody)
async def pause_generation(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Pause generation after the current step. All requests are aborted, retracted, or kept in place (`mode`).

    Retracting a request frees its KV cache pages.
    """
    body = await read_optional(http, PauseBody)
    await pause(core, mode_of(body.mode))
    return json_response({"message": "Generation paused successfully.", "status": "ok"})


@decodes(ContinueBody)
async def continue_generation(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Resume generation. Answers 400, but resumes, if a weight update did not send all tensors of a layer."""
    await read_optional(http, ContinueBody)
    try:
        await resume(core)
    except CheckpointError as error:
        raise InvalidRequest(str(error)) from error
    return json_response({"message": "Generation continued successfully.", "status": "ok"})


@decodes(SlowDownBody)
async def slow_down(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Wait `forward_sleep_time` seconds before each step, to test how clients behave. Null ends the delay."""
    body = await read_optional(http, SlowDownBody)
    for scheduler in core.schedulers:
        scheduler.delay_s = body.forward_sleep_time or 0.0
    return json_response(None)


async def read_optional(http: HttpRequest, cls: type[Body]) -> Body:
    """Return the decoded body, or the defaults if the request has no body."""
    if http.headers.get("content-length", "0") == "0" and "transfer-encoding" not in http.headers:
        return cls()
    return await read_as(http, cls)
