"""vLLM's routes for trainers: weight updates in three calls, pause and resume, sleep and wake up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from runtime.actors.generation_pause import mode_of
from runtime.errors import CheckpointError, InvalidRequest
from serve.calls import weights as calls
from serve.calls.decode import Length, NotBuilt, Range
from serve.calls.occupation import pause, resume, tags_of
from serve.http.endpoint import decodes, json_response, read_as
from serve.native.occupation import read_optional

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

GROUP = "weight_transfer"
NCCL = (
    "vLLM's NCCL group exchanges a pickled id, and pickles are never loaded. Join a group of torch.distributed named "
    f'"{GROUP}" on the trainer, and name its backend in init_info: {{"backend": "gloo"}} or {{"backend": "nccl"}}.'
)
MAX_PACKED_BYTES = 2**34


@dataclass(slots=True, kw_only=True)
class InitInfo:
    """Address and rank numbers to join the trainer's process group."""

    master_address: Annotated[str, Length(1, 255)]
    master_port: calls.Port
    rank_offset: Annotated[int, Range(0, 2**20)]
    world_size: Annotated[int, Range(1, 2**20)]
    backend: Literal["gloo", "nccl"] | None = None  # None: gloo on a CPU, refused on a GPU
    group_name: calls.Name = GROUP


@dataclass(slots=True, kw_only=True)
class InitBody:
    """The body of `/init_weight_transfer_engine`."""

    init_info: InitInfo


@dataclass(slots=True, kw_only=True)
class UpdateInfo:
    """Names, dtypes and shapes of the tensors that the trainer broadcasts, in this order."""

    names: calls.Names
    dtype_names: Annotated[list[Annotated[str, Length(1, 64)]], Length(1, 100_000)]
    shapes: Annotated[list[list[int]], Length(1, 100_000)]
    packed: bool = False  # whether the trainer sends several tensors in one byte buffer
    packed_buffer_size_bytes: Annotated[int, Range(1, MAX_PACKED_BYTES)] = 2**30
    packed_num_buffers: int = 2  # used only by the sender
    group_name: calls.Name = GROUP
    is_checkpoint_format: Literal[True] = True
    ipc_handles: NotBuilt = None


@dataclass(slots=True, kw_only=True)
class UpdateBody:
    """The body of `/update_weights`."""

    update_info: UpdateInfo


@dataclass(slots=True, kw_only=True)
class StartBody:
    """The body of `/start_weight_update`."""

    is_checkpoint_format: Literal[True] = True


@dataclass(slots=True, kw_only=True)
class FinishBody:
    """The body of `/finish_weight_update`."""

    weight_version: calls.Name | None = None


@dataclass(slots=True, kw_only=True)
class CheckerBody:
    """The body of `/weight_checker`."""

    action: Literal["checksum", "reset", "compare"]
    baseline: dict[str, Any] = field(default_factory=dict)  # for "compare": the checksums of an earlier answer


async def world_size(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return how many of this server's ranks join a group: tensor x pipeline parallel size x copies of the model."""
    parallel = core.plan.parallel
    copies = parallel.copies if flag(http, "include_dp", default=True) else 1
    return json_response({"world_size": parallel.ranks * copies})


@decodes(InitBody)
async def init_engine(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Join the trainer's process group. The server first leaves an older group of the same name."""
    body = await read_as(http, InitBody)
    info = body.init_info
    backend = info.backend
    if backend is None and core.plan.model.device != "cpu":
        raise InvalidRequest(NCCL, param="init_info.backend")
    await core.weights.close_group(info.group_name)
    await core.weights.open_group(
        address=info.master_address,
        port=info.master_port,
        rank_offset=info.rank_offset,
        world_size=info.world_size,
        name=info.group_name,
        backend=backend or "gloo",
    )
    return json_response({"message": "Weight transfer initialized"})


@decodes(StartBody)
async def start_update(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Begin a weight update. `/finish_weight_update` then applies all tensors received since this call."""
    await read_optional(http, StartBody)
    await core.weights.begin()
    return json_response({"message": "Weight update started"})


@decodes(UpdateBody)
async def update(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Receive tensors over the process group. If no update has begun, they are applied immediately."""
    body = await read_as(http, UpdateBody)
    info = body.update_info
    packing = "packed" if info.packed else "none"
    announced = calls.transfer(
        info.group_name, info.names, info.dtype_names, info.shapes, packing, info.packed_buffer_size_bytes
    )
    try:
        await core.weights.update_from_group(announced, flush=True)
    except CheckpointError as error:
        raise InvalidRequest(str(error), param="update_info") from error
    return json_response({"message": "Weights updated"})


@decodes(FinishBody)
async def finish_update(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Apply all tensors of the update. Answers 400, and keeps the old weights, if a layer lacks tensors."""
    body = await read_optional(http, FinishBody)
    try:
        await core.weights.finish(version=body.weight_version)
    except CheckpointError as error:
        raise InvalidRequest(str(error)) from error
    return json_response({"message": "Weight update finished"})


async def weight_info(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return the version label of the weights."""
    return json_response({"weight_version": core.plan.serve.weight_version})


@decodes(CheckerBody)
async def checker(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return checksums of the weights, compare them with `baseline`, or overwrite the weights with random bytes."""
    body = await read_as(http, CheckerBody)
    if body.action == "reset":
        await core.weights.check("reset_tensors")
        return json_response({"status": "reset"})
    answers = await core.weights.check("checksum")
    sums = {f"rank{rank['rank']}.{name}": value for rank in answers for name, value in rank["checksums"].items()}
    if body.action == "checksum":
        return json_response({"checksums": sums})
    names = sums.keys() | body.baseline.keys()
    different = sorted(name for name in names if sums.get(name) != body.baseline.get(name))
    return json_response({"match": not different, "mismatches": different})


async def reset_prefix_cache(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Empty the prefix cache. Running requests continue after their KV cache is computed again."""
    await core.reset_cache()
    return json_response({"status": "reset", "success": True})


# --- pause, sleep ---


async def pause_requests(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Pause generation: abort requests (`mode=abort`), let them finish first (`wait`), or keep them (`keep`)."""
    mode = http.query_params.get("mode", "wait" if flag(http, "wait_for_inflight_requests", default=False) else "abort")
    await pause(core, _mode(mode))
    if mode != "keep" and flag(http, "clear_cache", default=True):
        core.pause.retract()
    return json_response({"status": "paused"})


async def resume_requests(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Resume requests after a pause."""
    try:
        await resume(core)
    except CheckpointError as error:
        raise InvalidRequest(str(error)) from error
    return json_response({"status": "resumed"})


async def is_paused(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return whether generation is paused."""
    return json_response({"is_paused": core.pause.paused or bool(core.weights.released)})


async def sleep(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Release the memory of weights and KV cache.

    Weights that cannot be read from the checkpoint's files again, such as a trainer's, are written to a temporary file
    by `level=1` and discarded by `level=2`.
    """
    level, mode = http.query_params.get("level", "1"), http.query_params.get("mode", "abort")
    if level not in ("1", "2"):
        raise InvalidRequest("level must be 1 or 2.", param="level")
    was_paused = core.pause.paused
    await pause(core, _mode(mode))
    try:
        await core.weights.release(tags_of(None), keep=level == "1")
    finally:
        if not was_paused:  # requests still wait, because the memory is released
            await core.pause.end()
    return Response(status_code=200)


async def wake_up(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Allocate released memory again: `tags=weights`, `tags=kv_cache`, or both without tags.

    Requests resume when all memory is allocated.
    """
    await core.weights.resume(tags_of(http.query_params.getlist("tags")))
    return Response(status_code=200)


async def is_sleeping(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return whether memory is released."""
    return json_response({"is_sleeping": bool(core.weights.released)})


def flag(http: HttpRequest, name: str, *, default: bool) -> bool:
    """Return a query parameter as a bool. Raises `InvalidRequest` if it is neither true, false, 1 nor 0."""
    value = http.query_params.get(name, "true" if default else "false").lower()
    if value not in ("true", "false", "1", "0"):
        raise InvalidRequest(f"{name} must be true or false.", param=name)
    return value in ("true", "1")


def _mode(name: str) -> Any:
    if name not in ("abort", "wait", "keep"):
        raise InvalidRequest("mode must be abort, wait or keep.", param="mode")
    return mode_of(name)
