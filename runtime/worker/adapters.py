"""The adapters of one rank: its shards in host memory, and the slots of the device that layers read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from runtime.batch import AdapterPlacement
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import LoraPlan
from runtime.errors import CheckpointError, InvalidRequest
from runtime.layers.linear import Linear
from runtime.layers.low_rank import AdapterPart, LowRankSlots
from runtime.loading.adapter_config import read_config
from runtime.loading.adapter_files import LowRankPair, listed, read_pairs
from runtime.loading.loader import tensor_name
from runtime.modeling.decoder import Decoder

_BLOCK = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")


class Adapters:
    """Gives the linear layers of a model slots for adapters, and loads and places adapters.

    `load` reads on a thread of its own; all other methods must be called by the thread that enqueues steps.
    """

    def __init__(
        self, model: Decoder, plan: LoraPlan, facts: ModelFacts, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate the slots of the layers that `plan` names. Raises CheckpointError if the model has none of them."""
        self._max_rank = plan.max_rank
        self._facts = facts
        self._dtype = dtype
        self._on_gpu = device.type == "cuda"
        self._layers: list[Linear] = []
        # Name of a linear layer, from its block on -> this rank's layers and the sub-layers in them that it names.
        self._parts: dict[str, list[tuple[int, int]]] = {}
        self._loaded: dict[int, Mapping[int, AdapterPart]] = {}  # adapter's id -> index in `_layers` -> weights
        self._reader = ThreadPoolExecutor(1, "penstock-adapters")
        for layer in model.modules():
            if isinstance(layer, Linear) and _is_target(layer, plan.targets):
                sizes = [rows.size for rows in layer.layout.rows]
                slots = LowRankSlots(
                    sizes, layer.layout.columns.size, plan.max_slots, plan.max_rank, layer.kernels, dtype, device
                )
                layer.take_adapters(slots)
                for part, sub_layer in enumerate(layer.layout.sub_layers):
                    self._parts.setdefault(_from_block(sub_layer.name), []).append((len(self._layers), part))
                self._layers.append(layer)
        if not self._layers:
            raise CheckpointError("--enable-lora: this model has no linear layer that an adapter could change.")

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(layer.adapters.nbytes for layer in self._layers if layer.adapters is not None)

    def load(self, adapter_id: int, path: str) -> Future[None]:
        """Read an adapter into host memory. The future raises CheckpointError if it does not fit this model."""
        return self._reader.submit(self._load, adapter_id, Path(path))

    def drop(self, adapter_id: int) -> None:
        """Free an adapter's host memory. Unknown ids are ignored."""
        self._loaded.pop(adapter_id, None)

    def place(self, placement: AdapterPlacement) -> None:
        """Copy a loaded adapter into a slot. Raises `InvalidRequest` if it is not loaded."""
        parts = self._loaded.get(placement.adapter_id)
        if parts is None:
            raise InvalidRequest("The adapter is not loaded.")
        for index, layer in enumerate(self._layers):
            if layer.adapters is not None:
                layer.adapters.place(placement.slot, parts.get(index))

    def close(self) -> None:
        """End the thread that reads."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _load(self, adapter_id: int, folder: Path) -> None:
        config = read_config(folder)
        if config.rank > self._max_rank:
            raise CheckpointError(f"{folder} has rank {config.rank}; the limit is {self._max_rank} (--max-lora-rank).")
        pairs = read_pairs(folder, config)
        unknown: list[str] = []
        chosen: dict[int, dict[int, LowRankPair]] = {}
        for name, pair in pairs.items():
            places = self._parts.get(self._our_name(name), [])
            for index, part in places:
                chosen.setdefault(index, {})[part] = pair
            if not places and not self._is_elsewhere(name):
                unknown.append(name)
        if unknown:
            raise CheckpointError(
                f"{folder} changes {listed(unknown)}, which adapters cannot change in this model"
                " (--lora-target-modules)."
            )
        self._loaded[adapter_id] = {index: self._packed(folder, index, parts) for index, parts in chosen.items()}

    def _our_name(self, layer: str) -> str:
        """Return our name of a layer, from its block on, as for the checkpoint's tensors; "" if no layer has it."""
        return _from_block((tensor_name(self._facts, f"{layer}.weight") or "").removesuffix(".weight"))

    def _is_elsewhere(self, name: str) -> bool:
        """Whether another stage of the pipeline computes the block of this layer, so that its ranks check the name."""
        found = _BLOCK.search(name)
        if found is None or int(found[1]) >= self._facts.num_layers:
            return False
        own = {_BLOCK.search(f".{key}") for key in self._parts}
        return int(found[1]) not in {int(each[1]) for each in own if each is not None}

    def _packed(self, folder: Path, index: int, pairs: Mapping[int, LowRankPair]) -> AdapterPart:
        """Return this rank's shard of the pairs of one layer, by sub-layer."""
        layout = self._layers[index].layout
        rank = max(pair.a.shape[0] for pair in pairs.values())
        a = torch.zeros(len(layout.sub_layers), rank, layout.columns.size)
        b = torch.zeros(rank, sum(rows.size for rows in layout.rows))
        row = 0
        for part, (sub_layer, rows) in enumerate(zip(layout.sub_layers, layout.rows, strict=True)):
            if part in pairs:
                pair, shape = pairs[part], (sub_layer.in_tensor(rows).full, layout.columns.full)
                if (pair.b.shape[0], pair.a.shape[1]) != shape:
                    raise CheckpointError(
                        f"{folder}: {sub_layer.name} maps {pair.a.shape[1]} to {pair.b.shape[0]} values, and the "
                        f"model's layer {shape[1]} to {shape[0]}."
                    )
                a[part, : len(pair.a)] = pair.a[:, layout.columns.slice]
                for first, piece in sub_layer.pieces(rows):
                    b[: len(pair.a), row + first : row + first + piece.size] = pair.b[piece.slice].T
            row += rows.size
        return AdapterPart(self._kept(a), self._kept(b))

    def _kept(self, x: Tensor) -> Tensor:
        x = x.to(self._dtype)
        return x.pin_memory() if self._on_gpu else x


def _is_target(layer: Linear, targets: tuple[str, ...] | None) -> bool:
    names = {each.name.rpartition(".")[2] for each in layer.layout.sub_layers}
    return targets is None or not names.isdisjoint(targets)


def _from_block(name: str) -> str:
    """Return a layer's name without what is before its block: names outside of it differ between file formats."""
    found = _BLOCK.search(name)
    return name if found is None else name[found.start() :].lstrip(".")
