"""Bodies of the calls that replace, read and check weights, and functions that carry out these calls."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import anyio.to_thread

from runtime.errors import InvalidRequest
from serve.calls.decode import Length, NotBuilt, Range

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

Name = Annotated[str, Length(1, 1024)]
Names = Annotated[list[Name], Length(1, 100_000)]
Port = Annotated[int, Range(1, 65535)]
MAX_READ_ROWS = 100_000
Answer = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class WeightsFromDiskBody:
    """The body of `/update_weights_from_disk`."""

    closed: ClassVar[bool] = True

    model_path: Annotated[str, Length(1, 4096)]  # a folder on the server's machine
    load_format: Annotated[str, Length(1, 100)] | None = None  # None: the server's load format
    flush_cache: bool = True  # whether to recompute running requests and empty the prefix cache
    abort_all_requests: bool = False
    weight_version: Name | None = None  # None: the version stays unchanged
    is_async: NotBuilt = None
    torch_empty_cache: NotBuilt = None
    keep_pause: NotBuilt = None


@dataclass(slots=True, kw_only=True)
class UpdateGroupBody:
    """The body of `/init_weights_update_group`."""

    master_address: Annotated[str, Length(1, 255)]  # address of the trainer, which is rank 0 of the group
    master_port: Port
    rank_offset: Annotated[int, Range(0, 2**20)]  # rank in the group of this server's first worker
    world_size: Annotated[int, Range(1, 2**20)]
    group_name: Name = "weight_update_group"
    backend: Annotated[str, Length(1, 32)] = "nccl"  # "gloo" or "nccl"


@dataclass(slots=True, kw_only=True)
class DestroyGroupBody:
    """The body of `/destroy_weights_update_group`."""

    group_name: Name = "weight_update_group"


@dataclass(slots=True, kw_only=True)
class SendGroupBody:
    """The body of `/init_weights_send_group_for_remote_instance`: the address and ports where a new server connects."""

    master_address: Annotated[str, Length(1, 255)]  # address of this server
    ports: Annotated[str, Length(1, 10_000)]  # one per rank, separated by commas
    group_name: Name = "weight_send_group"
    group_rank: Literal[0] = 0  # this server is rank 0 of each group of two
    world_size: Literal[2] = 2
    backend: Literal["gloo"] = "gloo"


@dataclass(slots=True, kw_only=True)
class SendWeightsBody:
    """The body of `/send_weights_to_remote_instance`."""

    group_name: Name = "weight_send_group"
    master_address: Annotated[str, Length(1, 255)] | None = None  # as in `SendGroupBody`
    ports: Annotated[str, Length(1, 10_000)] | None = None
    group_rank: Literal[0] = 0
    world_size: Literal[2] = 2


@dataclass(slots=True, kw_only=True)
class WeightsFromGroupBody:
    """The body of `/update_weights_from_distributed`: the tensors in the order in which rank 0 broadcasts them."""

    names: Names
    dtypes: Annotated[list[Annotated[str, Length(1, 64)]], Length(1, 100_000)]
    shapes: Annotated[list[list[int]], Length(1, 100_000)]
    group_name: Name = "weight_update_group"
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: Name | None = None
    load_format: Literal["flattened_bucket"] | None = None  # if set, one broadcast has the bytes of all tensors


@dataclass(slots=True, kw_only=True)
class WeightsFromTensorBody:
    """The body of `/update_weights_from_tensor`. Each item holds all tensors, unsharded, as safetensors in base64."""

    serialized_named_tensors: Annotated[list[str], Length(1, 1024)]
    load_format: Annotated[str, Length(1, 200)] | None = None  # None, "direct" or "flattened_bucket"
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: Name | None = None


@dataclass(slots=True, kw_only=True)
class WeightVersionBody:
    """The body of `/update_weight_version`."""

    new_version: Name
    abort_all_requests: bool = True


@dataclass(slots=True, kw_only=True)
class ReadWeightBody:
    """The body of `/get_weights_by_name`."""

    name: Name
    truncate_size: Annotated[int, Range(1, MAX_READ_ROWS)] = 100  # maximum number of rows to return


@dataclass(slots=True, kw_only=True)
class WeightsCheckerBody:
    """The body of `/weights_checker`."""

    action: Literal["snapshot", "reset_tensors", "compare", "checksum"]
    allow_quant_error: NotBuilt = None
    skip_tensor_list: NotBuilt = None


async def update_weights_from_disk(core: EngineCore, body: WeightsFromDiskBody) -> Answer:
    """Replace the weights with those of a folder. Raises the same errors as `EngineCore.update_weights`."""
    num_requests = await core.update_weights(
        body.model_path,
        body.load_format,
        flush_cache=body.flush_cache,
        abort_all=body.abort_all_requests,
        version=body.weight_version,
    )
    message = "The weights were replaced."
    if body.weight_version is not None:
        message += f" Weight version updated to {body.weight_version}."
    return {"success": True, "message": message, "num_paused_requests": num_requests}


async def open_group(core: EngineCore, body: UpdateGroupBody) -> Answer:
    """Join a process group with a trainer. Raises `InvalidRequest` with the reason if a rank cannot join."""
    await core.weights.open_group(
        address=body.master_address,
        port=body.master_port,
        rank_offset=body.rank_offset,
        world_size=body.world_size,
        name=body.group_name,
        backend=body.backend,
    )
    return {"success": True, "message": f"Joined the group {body.group_name}."}


async def open_sending(core: EngineCore, body: SendGroupBody) -> Answer:
    """Wait until a new server, which copies the weights, connects. Raises `InvalidRequest` if no server connects."""
    try:
        ports = [int(port) for port in body.ports.split(",")]
    except ValueError:
        ports = []
    if not ports or not all(1 <= port <= 65535 for port in ports):
        raise InvalidRequest("ports must be port numbers, separated by commas.", param="ports")
    await core.weights.open_sending(address=body.master_address, ports=ports, name=body.group_name)
    return {"success": True, "message": f"Joined the group {body.group_name}."}


async def send_weights(core: EngineCore, body: SendWeightsBody) -> Answer:
    """Send the weights to the new server. Raises `InvalidRequest` with the reason if the transfer fails."""
    await core.weights.send(body.group_name)
    return {"success": True, "message": "The weights were sent."}


async def close_group(core: EngineCore, body: DestroyGroupBody) -> Answer:
    """Leave a process group. Raises `InvalidRequest` if no group has this name."""
    if not await core.weights.close_group(body.group_name):
        raise InvalidRequest(f"There is no group {body.group_name[:80]}.", param="group_name")
    return {"success": True, "message": f"Left the group {body.group_name}."}


async def update_weights_from_group(core: EngineCore, body: WeightsFromGroupBody) -> Answer:
    """Replace weights with tensors from a process group. If it raises `CheckpointError`, the old weights stay."""
    if body.abort_all_requests:
        core.abort_all()
    packing = "none" if body.load_format is None else "bucket"
    await core.weights.update_from_group(
        transfer(body.group_name, body.names, body.dtypes, body.shapes, packing),
        flush=body.flush_cache,
        version=body.weight_version,
    )
    return updated(core)


def transfer(
    group: str, names: list[str], dtypes: list[str], shapes: list[list[int]], packing: str, packed_bytes: int = 2**30
) -> Answer:
    """Return the description of a transfer of tensors, as `WeightControl.update_from_group` expects it."""
    parts = {"names": names, "dtypes": dtypes, "shapes": shapes}
    return {"name": group, **parts, "packing": packing, "packed_bytes": packed_bytes, "source": 0}


async def update_weights_from_bytes(core: EngineCore, body: WeightsFromTensorBody) -> Answer:
    """Replace weights with the tensors in the body. If it raises `CheckpointError`, the old weights stay."""
    if len(set(body.serialized_named_tensors)) > 1:
        raise InvalidRequest(
            "All items of serialized_named_tensors must be equal: send all tensors whole, each rank takes its part.",
            param="serialized_named_tensors",
        )
    format_ = body.load_format
    if format_ not in (None, "direct", "flattened_bucket"):
        raise InvalidRequest("load_format must be direct or flattened_bucket.", param="load_format")
    content = body.serialized_named_tensors[0]
    tensors = await anyio.to_thread.run_sync(_parse, content, format_ == "flattened_bucket")
    if body.abort_all_requests:
        core.abort_all()
    return await update_weights_from_tensors(core, tensors, body.flush_cache, body.weight_version)


def _parse(content: str, flattened: bool) -> Mapping[str, Any]:
    from runtime.loading.memory_tensors import parse_safetensors  # imports torch

    try:
        return parse_safetensors(base64.b64decode(content, validate=True), flattened=flattened)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest("serialized_named_tensors must be base64.", param="serialized_named_tensors") from error


async def update_weights_from_tensors(
    core: EngineCore, tensors: Iterable[tuple[str, Any]] | Mapping[str, Any], flush: bool, version: str | None
) -> Answer:
    """Replace weights with tensors of this process. If it raises `CheckpointError`, the old weights stay."""
    await core.weights.update_from_tensors(dict(tensors), flush=flush, version=version)
    return updated(core)


def updated(core: EngineCore) -> Answer:
    """Return the answer to an update. `waiting_for` lists tensors without which some layers keep their old weights."""
    waiting = core.weights.waiting
    message = "The weights were replaced."
    if waiting:
        message = f"Some layers keep their old weights until these tensors arrive: {', '.join(waiting[:20])}."
    return {"success": True, "message": message, "waiting_for": waiting[:20]}


async def update_weight_version(core: EngineCore, body: WeightVersionBody) -> Answer:
    """Set the version label of the weights."""
    if body.abort_all_requests:
        core.abort_all()
    core.set_weight_version(body.new_version)
    message = f"Weight version updated to {body.new_version}"
    return {"success": True, "message": message, "new_version": body.new_version}


async def read_weight(core: EngineCore, body: ReadWeightBody) -> list[Any]:
    """Return the first rows of a tensor as nested lists. Raises `InvalidRequest` for an unknown name."""
    parts = await core.weights.read(body.name, body.truncate_size)
    if not parts:
        raise InvalidRequest(f"The model has no tensor {body.name[:200]}.", param="name")
    return await anyio.to_thread.run_sync(_joined, parts, body.truncate_size)


def _joined(parts: list[dict[str, Any]], num_rows: int) -> list[Any]:
    import numpy as np

    whole = np.full([min(parts[0]["shape"][0], num_rows), *parts[0]["shape"][1:]], np.nan)
    for part in parts:
        values = np.array(part["values"])
        if values.size:
            whole[tuple(slice(low, low + size) for low, size in zip(part["first"], values.shape, strict=True))] = values
    return whole.tolist()


async def check_weights(core: EngineCore, body: WeightsCheckerBody) -> Answer:
    """Run an action of the weights checker. `success` is False if `compare` finds different tensors."""
    answers = await core.weights.check(body.action)
    if body.action == "compare":
        names = sorted({name for rank in answers for name in rank["different"]})
        message = f"{len(names)} tensors differ from the snapshot: {', '.join(names[:20])}." if names else "Equal."
        return {"success": not names, "message": message}
    ranks = {"ranks": answers} if body.action == "checksum" else {}
    return {"success": True, "message": "Done.", **ranks}
