"""Adapter slots in the layers of a native model, and the conversion of an adapter's tensors for these slots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from runtime.config.model_facts import ModelFacts
from runtime.config.plan import LoraPlan
from runtime.errors import CheckpointError
from runtime.layers.embedding import VocabularyChange
from runtime.layers.expert_changes import ExpertChange
from runtime.layers.linear import Linear
from runtime.layers.lm_head import LMHead
from runtime.layers.low_rank import AdapterPart, LowRankSlots
from runtime.layers.moe import BLOCK, MoE
from runtime.loading.adapter_files import AdapterWeights, LowRankPair, TokenVectors, listed
from runtime.loading.loader import tensor_name
from runtime.modeling.decoder import Decoder
from runtime.worker.adapter_experts import fit_experts, is_of_experts


class FittedAdapter(Protocol):
    """An adapter in host memory whose tensors fit the model."""

    # Whether the adapter has changes that captured graphs do not compute, so that steps run eagerly.
    by_operations: bool

    def place(self, slot: int) -> None:
        """Copy the weights into a slot on the device. Slots are numbered from 1."""
        ...

    def measure(self) -> bool:
        """Compute the weight norms of one more layer (DoRA). Return whether layers remain to be measured."""
        ...


class LayerSlots:
    """Adapter slots of a native model: in its linear layers, embedding and LM head."""

    def __init__(
        self, model: Decoder, plan: LoraPlan, facts: ModelFacts, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate slots in the layers that `plan` names. Raises CheckpointError if the model has no such layer."""
        self._facts = facts
        self._dtype = dtype
        self.device = device
        self.layers: list[Linear] = []
        # Name of a linear layer (after the block index) -> (index of this rank's layer, index of its sub-layer), for
        # all blocks.
        self._parts: dict[str, list[tuple[int, int]]] = {}
        for layer in model.modules():
            if isinstance(layer, Linear) and _is_target(layer, plan.targets):
                sizes = [rows.size for rows in layer.layout.rows]
                slots = LowRankSlots(
                    sizes, layer.layout.columns.size, plan.max_slots, plan.max_rank, layer.kernels, dtype, device
                )
                layer.take_adapters(slots)
                for part, sub_layer in enumerate(layer.layout.sub_layers):
                    self._parts.setdefault(_from_block(sub_layer.name), []).append((len(self.layers), part))
                self.layers.append(layer)
        if not self.layers:
            raise CheckpointError("--enable-lora: this model has no linear layer that an adapter could change.")
        # Block index -> MoE layer whose experts adapters can change. Experts whose weights cannot be read one by
        # one (`ops.moe`) are left out.
        self.mixtures: dict[int, MoE] = {}
        for mixture in model.modules():
            if isinstance(mixture, MoE) and (block := BLOCK.search(f".{mixture.name}.")) and mixture.takes_adapters:
                self.mixtures[int(block[1])] = mixture
        # Only the first pipeline stage has the embedding and the LM head.
        ends = {"embed_tokens": model.embedding, "lm_head": model.head}
        self._is_first_stage = model.embedding is not None
        self.vocabulary = {
            each.name: each
            for target, each in ends.items()
            if each is not None and (plan.targets is None or target in plan.targets)
        }

    @property
    def nbytes(self) -> int:
        """Bytes of the slots of linear layers."""
        return sum(layer.adapters.nbytes for layer in self.layers if layer.adapters is not None)

    def fit(self, folder: Path, weights: AdapterWeights) -> LayerAdapter:
        """Return this rank's shard of an adapter. Raises CheckpointError if the model has no layer for a tensor."""
        unknown: list[str] = []
        chosen: dict[int, dict[int, LowRankPair]] = {}
        pairs: dict[str, LowRankPair] = {}
        tokens: dict[str, TokenVectors] = {}
        experts: dict[int, dict[str, LowRankPair]] = {}
        for name, pair in weights.pairs.items():
            our_name, block = self._our_name(name), BLOCK.search(name)
            if is_of_experts(name) and block is not None and int(block[1]) in self.mixtures:
                experts.setdefault(int(block[1]), {})[name] = pair
                continue
            if our_name in self.vocabulary:
                pairs[our_name] = pair
                continue
            places = self._parts.get(our_name, [])
            for index, part in places:
                chosen.setdefault(index, {})[part] = pair
            if not places and not self._is_elsewhere(name):
                unknown.append(name)
        for name, vectors in weights.tokens.items():
            if (our_name := self._our_name(name)) in self.vocabulary:
                tokens[our_name] = vectors
            elif not self._is_elsewhere(name):
                unknown.append(name)
        if unknown:
            raise CheckpointError(
                f"{folder} changes {listed(unknown)}, which adapters cannot change in this model"
                " (--lora-target-modules)."
            )
        has_magnitudes = any(pair.magnitude is not None for pair in weights.pairs.values())
        return LayerAdapter(
            self,
            {index: self._packed(folder, index, parts) for index, parts in chosen.items()},
            self._vocabulary_changes(folder, pairs, tokens),
            {
                block: fit_experts(folder, self.mixtures[block], of_block, weights.config).to(
                    torch.device("cpu"), self._dtype
                )
                for block, of_block in experts.items()
            },
            {index: self._magnitudes(index, parts) for index, parts in chosen.items()} if has_magnitudes else {},
            by_operations=has_magnitudes
            or bool(weights.tokens)
            or any(_is_outside(name) or is_of_experts(name) for name in weights.pairs),
        )

    def kept(self, x: Tensor) -> Tensor:
        """Return `x` in the model's dtype, in memory that can be copied to the device asynchronously (pinned)."""
        x = x.to(self._dtype)
        return x.pin_memory() if self.device.type == "cuda" else x

    def _our_name(self, layer: str) -> str:
        """Return the native model's name of a layer, from its block on, or "" if there is no such layer.

        Names are mapped like the names of the checkpoint's tensors.
        """
        return _from_block((tensor_name(self._facts, f"{layer}.weight") or "").removesuffix(".weight"))

    def _is_elsewhere(self, name: str) -> bool:
        """Return whether another pipeline stage has this layer. The ranks of that stage then check the name."""
        found = BLOCK.search(name)
        if found is None:
            return not self._is_first_stage
        if int(found[1]) >= self._facts.num_layers:
            return False
        own = {BLOCK.search(f".{key}") for key in self._parts}
        return int(found[1]) not in {int(each[1]) for each in own if each is not None}

    def _packed(self, folder: Path, index: int, pairs: Mapping[int, LowRankPair]) -> AdapterPart:
        """Return this rank's shard of the low-rank pairs of one layer. The keys of `pairs` are sub-layer indices."""
        layout = self.layers[index].layout
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
        return AdapterPart(self.kept(a), self.kept(b))

    def _magnitudes(self, index: int, pairs: Mapping[int, LowRankPair]) -> Tensor:
        """Return this rank's magnitudes (DoRA) of one layer, float32 [O].

        Rows of sub-layers that the adapter does not change are NaN.
        """
        layout = self.layers[index].layout
        magnitudes = torch.full((layout.out_size,), torch.nan)
        row = 0
        for part, (sub_layer, rows) in enumerate(zip(layout.sub_layers, layout.rows, strict=True)):
            magnitude = pairs[part].magnitude if part in pairs else None
            if magnitude is not None:
                for first, piece in sub_layer.pieces(rows):
                    magnitudes[row + first : row + first + piece.size] = magnitude[piece.slice]
            row += rows.size
        return magnitudes

    def _vocabulary_changes(
        self, folder: Path, pairs: Mapping[str, LowRankPair], tokens: Mapping[str, TokenVectors]
    ) -> dict[str, VocabularyChange]:
        """Return the changes of the embedding and the LM head. A tied LM head also gets the embedding's new vectors."""
        changes: dict[str, VocabularyChange] = {}
        for name, module in self.vocabulary.items():
            is_head = isinstance(module, LMHead)
            replaced, pair = tokens.get(name), pairs.get(name)
            if is_head and module.tied and replaced is None:
                replaced = next(iter(tokens.values()), None)
            if replaced is None and pair is None:
                continue
            if is_head and module.unit:
                raise CheckpointError(f"{folder} changes {name}, whose {module.unit} are scaled to length one.")
            if pair is not None and pair.magnitude is not None:
                raise CheckpointError(f"{folder} changes {name} with DoRA, which works for linear layers in blocks.")
            changes[name] = self._vocabulary_change(folder, name, pair, replaced)
        return changes

    def _vocabulary_change(
        self, folder: Path, name: str, pair: LowRankPair | None, replaced: TokenVectors | None
    ) -> VocabularyChange:
        module = self.vocabulary[name]
        is_head, own, size = isinstance(module, LMHead), module.ids, module.size
        a, b, ids, rows = torch.zeros(0, size), torch.zeros(own.full, 0), torch.zeros(0).long(), torch.zeros(0, size)
        if pair is not None:
            # The pair of an embedding maps token ids to vectors, so it is transposed.
            a, b = (pair.a, pair.b) if is_head else (pair.b.T, pair.a.T)
        if replaced is not None:
            ids, rows = torch.tensor(replaced.ids), replaced.vectors
        if (len(b), a.shape[1], rows.shape[1]) != (own.full, size, size) or bool((ids >= own.full).any()):
            raise CheckpointError(
                f"{folder} changes {name} to {len(b)} tokens of {a.shape[1]} values; the base model has {own.full} of "
                f"{size}. Tokens that it does not have cannot be added."
            )
        if is_head:
            b, is_own = b[own.slice], (ids >= own.start) & (ids < own.start + own.size)
            ids, rows = ids[is_own] - own.start, rows[is_own]
        return VocabularyChange(self.kept(a), self.kept(b), ids, self.kept(rows))


@dataclass(slots=True)
class LayerAdapter:
    """This rank's shard of an adapter of a native model."""

    _slots: LayerSlots
    _parts: dict[int, AdapterPart]  # by layer index
    _vocabulary: Mapping[str, VocabularyChange]  # by name: "embed_tokens", "lm_head"
    _experts: Mapping[int, ExpertChange]  # by block index
    # Norms of the rows of the changed weight (DoRA), float32 [O], for layers that have not been measured.
    _magnitudes: dict[int, Tensor] = field(default_factory=dict)
    by_operations: bool = False

    def place(self, slot: int) -> None:
        for index, layer in enumerate(self._slots.layers):
            if layer.adapters is not None:
                layer.adapters.place(slot, self._parts.get(index))
        for name, module in self._slots.vocabulary.items():
            change = self._vocabulary.get(name)
            if change is None:
                module.changes.pop(slot, None)
            else:
                module.changes[slot] = change.to(module.device)
        for block, mixture in self._slots.mixtures.items():
            of_experts = self._experts.get(block)
            if of_experts is None:
                mixture.changes.pop(slot, None)
            else:
                mixture.changes[slot] = of_experts.to(self._slots.device)

    def measure(self) -> bool:
        if not self._magnitudes:
            return False
        index, magnitudes = self._magnitudes.popitem()
        a, b, _ = self._parts[index]
        lengths = self._slots.layers[index].squares(a, b, self._slots.device).sqrt().cpu()
        scales = torch.where(magnitudes.isnan(), 1.0, magnitudes / lengths)
        self._parts[index] = AdapterPart(a, self._slots.kept(b.float() * scales), scales)
        return bool(self._magnitudes)


def _is_target(layer: Linear, targets: tuple[str, ...] | None) -> bool:
    names = {each.name.rpartition(".")[2] for each in layer.layout.sub_layers}
    return targets is None or not names.isdisjoint(targets)


def _is_outside(name: str) -> bool:
    """Return whether a layer is in no block, like the embedding and the LM head."""
    return BLOCK.search(name) is None


def _from_block(name: str) -> str:
    """Return a layer's name from its block on. File formats differ in the text before it."""
    found = BLOCK.search(name)
    return name if found is None else name[found.start() :].lstrip(".")
