"""Verbs (rank commands, see `runtime.worker.verbs`) that replace, read, check, send or release a rank's weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.errors import CheckpointError, InvalidRequest
from runtime.loading.checkpoint import WeightFiles
from runtime.loading.tensors import TensorFiles
from runtime.loading.weight_memory import combined, release, reserve
from runtime.worker.rank_state import RankState
from runtime.worker.remote_instance import SENDER, send_parameters
from runtime.worker.weight_transfer import BACKENDS, Received, TransferGroup, announced, on_thread

logger = logging.getLogger("penstock.core")
MAX_GROUPS = 16


# --- weights of a checkpoint ---


def check_weights(rank: RankState, payload: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` if the weights of a checkpoint do not fit this rank's model."""
    rank.loaded.check(payload["path"], payload["load_format"])


def load_weights(rank: RankState, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Load the weights of a checkpoint. Return {"error": None or the reason}.

    After an error, `restore_weights` must be called.
    """
    with _on_device(rank):
        return rank.loaded.load(payload["path"], payload["load_format"])


def accept_weights(rank: RankState, payload: Mapping[str, Any]) -> None:
    """Keep the weights of `load_weights`. Called when all ranks have loaded theirs."""
    rank.loaded.loaded()


def restore_weights(rank: RankState, payload: Mapping[str, Any]) -> None:
    """Go back to the weights before `load_weights`. If this fails, the rank is unusable."""
    with _on_device(rank):
        rank.loaded.restore()


# --- weights of a trainer ---


def open_transfer(rank: RankState, payload: Mapping[str, Any]) -> Future[dict[str, Any]]:
    """Join a process group with a trainer. Return {"error": None or the reason}.

    This rank's number in the group is `first_rank` plus its own rank.
    """
    name, kind = payload["name"], BACKENDS.get(payload["backend"])
    if kind is None:
        raise InvalidRequest(f"backend must be one of {', '.join(BACKENDS)}.", param="backend")
    if kind == "cuda" and rank.device.is_host:
        raise InvalidRequest("This server computes on a CPU, so the backend must be gloo.", param="backend")
    if name in rank.groups:
        raise InvalidRequest(f"There is a group {name[:80]} already; destroy it first.", param="group_name")
    if len(rank.groups) >= MAX_GROUPS:
        raise InvalidRequest(f"There are {MAX_GROUPS} groups already; destroy one first.", param="group_name")

    def join() -> None:
        group = TransferGroup(payload, payload["first_rank"] + rank.rank, rank.device.torch_device)
        rank.groups[name] = group

    return on_thread(f"Joining the group {name}", join)


def open_sending(rank: RankState, payload: Mapping[str, Any]) -> Future[dict[str, Any]]:
    """Open this rank's port, and wait for the same rank of a new server. Return {"error": None or the reason}."""
    name = payload["name"]
    if name in rank.groups:
        raise InvalidRequest(f"There is a group {name[:80]} already; destroy it first.", param="group_name")
    if len(rank.groups) >= MAX_GROUPS:
        raise InvalidRequest(f"There are {MAX_GROUPS} groups already; destroy one first.", param="group_name")
    info = {**payload, "port": payload["ports"][rank.rank], "world_size": 2, "name": "weights", "backend": "gloo"}

    def join() -> None:
        rank.groups[name] = TransferGroup(info, SENDER, torch.device("cpu"))

    return on_thread(f"Joining the group {name}", join)


def send_weights(rank: RankState, payload: Mapping[str, Any]) -> Future[dict[str, Any]]:
    """Send this rank's weights to the new server of `open_sending`, then leave the group. Steps continue meanwhile."""
    name = payload["name"]
    group = rank.groups.pop(name, None)
    if group is None:
        raise InvalidRequest(f"There is no group {name[:80]} for a new server.", param="group_name")

    def send() -> None:
        try:
            rank.loaded.send(lambda model: send_parameters(model, group))
        finally:
            group.close()

    return on_thread(f"Sending weights over the group {name}", send)


def close_transfer(rank: RankState, payload: Mapping[str, Any]) -> bool:
    """Leave a process group. Return whether a group of this name existed."""
    group = rank.groups.pop(payload["name"], None)
    if group is not None:
        group.close()
        if not rank.groups and rank.weights is not None:
            rank.weights.free_update_memory()
    return group is not None


def receive_weights(rank: RankState, payload: Mapping[str, Any]) -> Future[dict[str, Any]]:
    """Receive the next part of the tensors that a trainer sends, while steps continue. Return {"error", "left"}.

    "left" is the number of parts that follow. `first` announces the tensors of a new transfer. `discard` drops received
    parts that are not staged. After an error, the group is closed.
    """
    name = payload["name"]
    group = rank.groups.get(name)
    if group is None:
        raise InvalidRequest(f"There is no group {name[:80]}; call init_weights_update_group.", param="group_name")
    if payload["first"] or payload["discard"]:
        rank.received.clear()

    def receive() -> dict[str, int]:
        try:
            staged = rank.loaded.staged
            if payload["first"]:
                specs = announced(payload, rank.loaded.max_bytes * payload["share"])
                group.announce(specs, payload["packing"], payload["packed_bytes"])
            rank.received.append(group.receive(payload["packing"], payload["source"], lend=not staged.keeps_tensors))
            return {"left": len(group.parts)}
        except BaseException:
            rank.groups.pop(name, None)
            group.close()
            raise

    return on_thread(f"The transfer over the group {name}", receive)


def stage_weights(rank: RankState, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Stage tensors: "tensors" of this process, the tensors of a safetensors "file", or the oldest received part.

    Returns {"error", "unknown", "waiting"}. After an error, `drop_weights` must be called.
    """
    try:
        with _on_device(rank):
            part = _part(rank, payload)
            result = rank.loaded.stage(
                part.tensors, merge=payload["merge"], final=payload["final"], lent=part.lent, later=part.later
            )
    except Exception as error:  # allocations and kernels raise errors of many types
        logger.warning("The tensors of an update were not prepared.", exc_info=error)
        return {"error": reason(error), "unknown": [], "waiting": []}
    return {"error": None, "unknown": result.unknown, "waiting": result.waiting}


def missing_weights(rank: RankState, payload: Mapping[str, Any]) -> list[str]:
    """Return the names of this rank's tensors that have not been staged."""
    return rank.loaded.staged.missing()


def commit_weights(rank: RankState, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the weights by the staged ones. No step may be in flight. Return {"restored"} like `resume_memory`."""
    with _on_device(rank):
        rank.loaded.commit(keep_memory=bool(rank.groups))
    return {"restored": not rank.loaded.unset}


def drop_weights(rank: RankState, payload: Mapping[str, Any]) -> None:
    """Drop all staged layers and received tensors."""
    rank.received.clear()
    rank.loaded.drop_staged()


# --- reading and checking ---


def read_weight(rank: RankState, payload: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return this rank's shard of a tensor (see `StagedWeights.read`)."""
    with _on_device(rank):
        return rank.loaded.staged.read(payload["name"], payload["num_rows"])


def check_sums(rank: RankState, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Run an action of the weight checker: snapshot, reset_tensors, compare or checksum."""
    weights, action = rank.loaded, payload["action"]
    with _on_device(rank):
        if action == "snapshot":
            weights.take_snapshot()
        elif action == "reset_tensors":
            weights.fill_random()
        elif action == "compare":
            return {"different": weights.compare()}
        else:
            sums = weights.checksums()
            return {"checksums": sums, "per_gpu_checksum": combined(sums), "rank": rank.rank}
    return {}


# --- memory ---


def release_memory(rank: RankState, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Release the memory of "weights" and of "kv_cache". Return {"bytes"}.

    With `keep`, weights that are not in unchanged checkpoint files are first written to a temporary file.
    """
    released = 0
    with _on_device(rank):
        if "weights" in payload["tags"]:
            try:
                released += rank.loaded.release(keep=payload["keep"])
            except OSError as error:
                raise InvalidRequest(f"The weights cannot be kept in a temporary file: {error.strerror}.") from error
        if "kv_cache" in payload["tags"]:
            released += release(_cache_tensors(rank))
        rank.device.release_unused()
    return {"bytes": released}


def resume_memory(rank: RankState, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Allocate released memory again. Return {"restored": whether the weights are the same as before}."""
    restored = True
    with _on_device(rank):
        if "weights" in payload["tags"]:
            restored = rank.loaded.resume()
        if "kv_cache" in payload["tags"]:
            reserve(_cache_tensors(rank))
    return {"restored": restored}


def _cache_tensors(rank: RankState) -> Iterator[Tensor]:
    for caches in (rank.pool or {}, rank.pool.host if rank.pool is not None else {}):
        for cache in caches.values():
            yield from (tensor for tensor in cache if isinstance(tensor, Tensor))


def _part(rank: RankState, payload: Mapping[str, Any]) -> Received:
    if "tensors" in payload:
        return Received(payload["tensors"], lent=False, later=frozenset())
    if "file" not in payload:
        return rank.received.popleft()
    files = TensorFiles(WeightFiles("safetensors", (Path(payload["file"]),)), mmap=False)
    return Received({name: files.read(name) for name in files.shapes}, lent=False, later=frozenset())


@contextmanager
def _on_device(rank: RankState) -> Iterator[None]:
    with torch.inference_mode(), rank.device.forward():
        yield
        rank.device.record().wait()


def reason(error: Exception) -> str:
    """Return the error text for the client."""
    if isinstance(error, CheckpointError | InvalidRequest):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "There is not enough memory to prepare the tensors beside the current weights."
    return "The tensors cannot be prepared."


WEIGHT_VERBS: Mapping[str, Callable[[RankState, Mapping[str, Any]], Any]] = {
    "check_weights": check_weights,
    "load_weights": load_weights,
    "accept_weights": accept_weights,
    "restore_weights": restore_weights,
    "open_transfer": open_transfer,
    "open_sending": open_sending,
    "send_weights": send_weights,
    "close_transfer": close_transfer,
    "receive_weights": receive_weights,
    "stage_weights": stage_weights,
    "missing_weights": missing_weights,
    "commit_weights": commit_weights,
    "drop_weights": drop_weights,
    "read_weight": read_weight,
    "check_sums": check_sums,
    "release_memory": release_memory,
    "resume_memory": resume_memory,
}
