"""Verbs (rank commands, see `runtime.worker.verbs`) that record the use of experts and change their placement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import torch

from runtime.worker.expert_moves import any_rank, move_experts
from runtime.worker.expert_recorder import ExpertRecorder
from runtime.worker.rank_state import RankState


def start_expert_record(rank: RankState, payload: Mapping[str, Any]) -> None:
    """Discard the recorded steps, and start to record."""
    if (recorder := _recorder(rank)) is not None:
        recorder.start()


def stop_expert_record(rank: RankState, payload: Mapping[str, Any]) -> None:
    """Stop recording."""
    if (recorder := _recorder(rank)) is not None:
        recorder.stop()


def dump_expert_record(rank: RankState, payload: Mapping[str, Any]) -> Future[dict[str, Any]] | None:
    """Write the record to a file and discard it (see `ExpertRecorder.dump`).

    Returns None on ranks without a record.
    """
    recorder = _recorder(rank)
    return None if recorder is None else recorder.dump()


def await_expert_loads(rank: RankState, payload: Mapping[str, Any]) -> Future[Any] | None:
    """Return a future of the tokens of each expert in the next "num_steps" steps (see `ExpertRecorder.when_due`).

    "max_kept" is optional. Returns None on ranks without a recorder.
    """
    recorder = _recorder(rank)
    return None if recorder is None else recorder.when_due(payload["num_steps"], payload.get("max_kept", 0))


def place_experts(rank: RankState, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Move the experts of "layers". "slots" has the new expert of each slot of each layer, int32 [layers * slots].

    Returns {"moved": the number of experts that this rank received}. During a weight update, nothing is moved and
    "moved" is None, because the update prepares tensors for the current placement.
    """
    experts, device = rank.experts, rank.device.torch_device
    if experts is None:
        return {"moved": 0}
    with torch.inference_mode(), rank.device.forward():
        if any_rank(experts.stage, rank.weights is not None and rank.weights.is_changing, device):
            return {"moved": None}
        count, lines = 0, payload["slots"].reshape(len(payload["layers"]), -1).tolist()
        for layer, line in zip(payload["layers"], lines, strict=True):
            if layer in experts.mixtures:  # other pipeline stages have the other layers
                count += move_experts(experts.mixtures[layer], layer, experts.sharing, tuple(line))
        if rank.weights is not None:
            rank.weights.experts_moved()
        rank.device.record().wait()
    return {"moved": count}


def expert_places(rank: RankState, payload: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the expert in each slot, by layer of this rank."""
    experts = rank.experts
    if experts is None:
        return {}
    return {
        str(layer): list(experts.sharing.placement(layer, mixture.num_experts).experts)
        for layer, mixture in experts.mixtures.items()
    }


def _recorder(rank: RankState) -> ExpertRecorder | None:
    return None if rank.experts is None else rank.experts.recorder


EXPERT_VERBS: Mapping[str, Callable[[RankState, Mapping[str, Any]], Any]] = {
    "start_expert_record": start_expert_record,
    "stop_expert_record": stop_expert_record,
    "dump_expert_record": dump_expert_record,
    "await_expert_loads": await_expert_loads,
    "place_experts": place_experts,
    "expert_places": expert_places,
}
