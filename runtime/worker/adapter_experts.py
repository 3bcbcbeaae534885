"""Converts an adapter's tensors for routed experts into changes of a native model's MoE layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from runtime.errors import CheckpointError
from runtime.layers.expert_changes import ExpertChange, ExpertPair
from runtime.layers.moe import MoE
from runtime.loading.adapter_config import AdapterConfig
from runtime.loading.adapter_files import LowRankPair

# Names of adapted layers. `_ONE` matches a weight of one expert, in the names of several model families. `_ALL` matches
# the weight of all experts of a layer: peft stores a single low-rank pair for it.
_ONE = re.compile(r".+\.experts\.(?P<expert>\d+)\.(?P<part>gate_proj|up_proj|down_proj|w1|w2|w3)")
_ALL = re.compile(r".+\.experts(\.base_layer)*")
_PARTS: Mapping[str, str] = {
    **{name: name.removesuffix("_proj") for name in ("gate_proj", "up_proj", "down_proj")},
    "w1": "gate",
    "w2": "down",
    "w3": "up",
}


def is_of_experts(name: str) -> bool:
    """Return whether a layer's name denotes routed experts."""
    return bool(_ONE.fullmatch(name) or _ALL.fullmatch(name))


def fit_experts(folder: Path, moe: MoE, pairs: Mapping[str, LowRankPair], config: AdapterConfig) -> ExpertChange:
    """Return this rank's shard of the changes of one MoE layer. Raises CheckpointError for a wrong name or shape."""
    sizes = {"gate": (moe.inner.full, moe.size), "up": (moe.inner.full, moe.size), "down": (moe.size, moe.inner.full)}
    found: dict[str, dict[int, LowRankPair]] = {part: {} for part in sizes}
    for name, pair in pairs.items():
        for part, expert, of_expert in _by_expert(folder, name, moe, pair, config):
            if expert >= moe.num_experts or (len(of_expert.b), of_expert.a.shape[1]) != sizes[part]:
                raise CheckpointError(f"{folder}: {name} does not fit the {moe.num_experts} experts of the model.")
            if of_expert.magnitude is not None:
                raise CheckpointError(f"{folder} changes {name} with DoRA, which works for linear layers.")
            found[part][expert] = of_expert
    changes = {part: _stacked(moe.num_experts, of_part, *sizes[part]) for part, of_part in found.items()}
    inner = moe.inner.slice
    gate, up, down = changes["gate"], changes["up"], changes["down"]
    return ExpertChange(
        gate and gate._replace(b=gate.b[:, inner]),
        up and up._replace(b=up.b[:, inner]),
        down and down._replace(a=down.a[:, :, inner]),
    )


def _by_expert(
    folder: Path, name: str, moe: MoE, pair: LowRankPair, config: AdapterConfig
) -> list[tuple[str, int, LowRankPair]]:
    """Return (weight name, expert, scaled low-rank pair) for each expert that the adapter changes."""
    one = _ONE.fullmatch(name)
    if one is not None:
        return [(_PARTS[one["part"]], int(one["expert"]), pair)]
    rank, rest = divmod(len(pair.a), moe.num_experts)
    if rest or not 1 <= rank <= config.rank:
        raise CheckpointError(
            f"{folder}: {name} has {len(pair.a)} rows for the {moe.num_experts} experts of the model."
        )
    a = pair.a.unflatten(0, (moe.num_experts, rank))  # [X, r, I]
    b = pair.b.unflatten(1, (rank, moe.num_experts)) * config.scale(name, rank)  # [O, r, X]
    if (len(pair.b), pair.a.shape[1]) == (moe.size, moe.inner.full):
        return [("down", expert, LowRankPair(a[expert], b[:, :, expert])) for expert in range(moe.num_experts)]
    if len(pair.b) != 2 * moe.inner.full:
        raise CheckpointError(f"{folder}: {name} maps {pair.a.shape[1]} to {len(pair.b)} values, unlike the experts.")
    gate, up = (b[::2], b[1::2]) if moe.alternates else b.chunk(2)
    return [
        (part, expert, LowRankPair(a[expert], half[:, :, expert]))
        for part, half in (("gate", gate), ("up", up))
        for expert in range(moe.num_experts)
    ]


def _stacked(num_experts: int, pairs: Mapping[int, LowRankPair], out_size: int, in_size: int) -> ExpertPair | None:
    if not pairs:
        return None
    rank = max(len(pair.a) for pair in pairs.values())
    a: Tensor = torch.zeros(num_experts, rank, in_size)
    b: Tensor = torch.zeros(num_experts, out_size, rank)
    for expert, pair in pairs.items():
        a[expert, : len(pair.a)], b[expert, :, : len(pair.a)] = pair.a, pair.b
    return ExpertPair(a, b)
