"""Adapter slots of models that transformers computes: hooks add the adapter's low-rank product to a module's output."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from runtime.errors import CheckpointError
from runtime.loading.adapter_files import AdapterWeights, LowRankPair, TokenVectors, listed
from runtime.modeling.decoder import Decoder
from runtime.models.by_transformers.model import TransformersDecoder

# Modules that get only some tokens of a step, or tokens in another order. Their hooks would not know which adapter each
# input needs.
_EXCLUDED = re.compile(r"(^|\.)(experts|vision\w*|visual|audio\w*|multi_modal\w*)(\.|$)")
_PREFIX = re.compile(r"^(model\.)?(language_model\.)?(model\.|transformer\.)?")


class ModuleChange(NamedTuple):
    """The change of one module by an adapter. W [O, I] becomes W + b a, and `rows` replace the vectors of some tokens.

    For an embedding, W is the transpose of its weight [V, E].
    """

    a: Tensor  # [r, I]
    b: Tensor  # [O, r], already scaled
    magnitude: Tensor | None = None  # norms of the rows of the changed weight (DoRA), float32 [O]
    ids: Tensor | None = None
    rows: Tensor | None = None  # new vectors of the tokens `ids`, [n, E]


class ModuleSlots:
    """Adapter slots of a model that transformers computes: in its linear modules, embedding and LM head."""

    nbytes = 0  # nothing is allocated in advance: an adapter takes only the memory of its tensors

    @staticmethod
    def of(model: Decoder, targets: tuple[str, ...] | None, device: torch.device) -> ModuleSlots:
        """Create the slots of a decoder and add hooks to its modules.

        Raises CheckpointError if the model is not a decoder.
        """
        if not isinstance(model, TransformersDecoder):
            raise CheckpointError("--enable-lora: encoders that transformers computes take no adapters; merge them.")
        return ModuleSlots(model, targets, device)

    def __init__(self, model: TransformersDecoder, targets: tuple[str, ...] | None, device: torch.device) -> None:
        """Add hooks to the modules that `targets` names. Raises CheckpointError if no module can have adapters."""
        self.device, self.dtype = device, model.dtype
        self._model = model
        self.changes: dict[tuple[nn.Module, int], ModuleChange] = {}  # by module and slot number
        self.modules: dict[str, nn.Module] = {}
        head, embedding = model.model.get_output_embeddings(), model.model.get_input_embeddings()
        for name, module in model.model.named_modules():
            target = name.rpartition(".")[2]
            if module is head or module is embedding:
                target = "lm_head" if module is head else "embed_tokens"
            elif not isinstance(module, nn.Linear | Conv1D) or _EXCLUDED.search(name):
                continue
            if targets is None or target in targets:
                self.modules[_PREFIX.sub("", name)] = module
                module.register_forward_hook(self._hook)
        if not any(isinstance(module, nn.Linear | Conv1D) for module in self.modules.values() if module is not head):
            raise CheckpointError("--enable-lora: this model has no linear layer that an adapter could change.")
        self._head = head
        self._tied = head is not None and head.weight is embedding.weight

    def fit(self, folder: Path, weights: AdapterWeights) -> ModuleAdapter:
        """Return an adapter in host memory. Raises CheckpointError if the model lacks the module of a tensor."""
        unknown = [name for name in (*weights.pairs, *weights.tokens) if _PREFIX.sub("", name) not in self.modules]
        if unknown:
            raise CheckpointError(
                f"{folder} changes {listed(unknown)}, which adapters cannot change in this model"
                " (--lora-target-modules)."
            )
        changes = {}
        for name in weights.pairs.keys() | weights.tokens.keys():
            module = self.modules[_PREFIX.sub("", name)]
            changes[module] = self._change(folder, name, module, weights.pairs.get(name), weights.tokens.get(name))
        if self._tied and self._head not in changes and len(weights.tokens) == 1:
            [tokens] = weights.tokens.values()
            changes[self._head] = self._change(folder, "the LM head", self._head, None, tokens)
        return ModuleAdapter(self, changes)

    def _change(
        self, folder: Path, name: str, module: nn.Module, pair: LowRankPair | None, tokens: TokenVectors | None
    ) -> ModuleChange:
        out_size, in_size = _shape(module)
        a, b, magnitude = pair or (torch.zeros(0, in_size), torch.zeros(out_size, 0), None)
        if (len(b), a.shape[1]) != (out_size, in_size):
            raise CheckpointError(
                f"{folder}: {name} maps {a.shape[1]} to {len(b)} values, and the model's layer {in_size} to {out_size}."
            )
        if magnitude is not None and isinstance(module, nn.Embedding):
            raise CheckpointError(f"{folder} changes {name} with DoRA, which works for linear layers.")
        a, b = a.to(self.dtype), b.to(self.dtype)
        if tokens is None:
            return ModuleChange(a, b, magnitude)
        num_tokens, size = (in_size, out_size) if isinstance(module, nn.Embedding) else (out_size, in_size)
        if max(tokens.ids, default=0) >= num_tokens or tokens.vectors.shape[1] != size:
            raise CheckpointError(f"{folder} has vectors of tokens that the base model does not have.")
        return ModuleChange(a, b, magnitude, torch.tensor(tokens.ids), tokens.vectors.to(self.dtype))

    def _hook(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        """Apply the adapters of the step to a module's output. Returns None (no change) in steps without adapters."""
        adapted, num_tokens = self._model.adapted, self._model.num_adapted
        for slot, tokens in adapted.items():
            change = self.changes.get((module, slot))
            if change is None:
                continue
            x, y = inputs[0], output.reshape(-1, output.shape[-1])
            x = x.flatten() if isinstance(module, nn.Embedding) else x.reshape(-1, x.shape[-1])
            if num_tokens not in (None, len(y)):
                raise RuntimeError(
                    f"A {type(module).__name__} sees {len(y)} of {num_tokens} tokens; it takes no adapters."
                )
            y[tokens] = _changed(module, change, x[tokens], y[tokens]).to(y.dtype)
            output = y.view(output.shape)
        return output if adapted else None


@dataclass(slots=True)
class ModuleAdapter:
    """An adapter in host memory, for a model that transformers computes."""

    _slots: ModuleSlots
    _changes: Mapping[nn.Module, ModuleChange]
    by_operations: bool = field(default=True)

    def place(self, slot: int) -> None:
        slots = self._slots
        for module in slots.modules.values():
            change = self._changes.get(module)
            if change is None:
                slots.changes.pop((module, slot), None)
            else:
                moved = (None if each is None else each.to(slots.device, non_blocking=True) for each in change)
                slots.changes[module, slot] = ModuleChange(*moved)  # pyright: ignore[reportArgumentType]

    def measure(self) -> bool:
        return False  # nothing to measure: hooks compute the norms of DoRA in each step


def _shape(module: nn.Module) -> tuple[int, int]:
    """Return the number of outputs and the number of inputs of a module."""
    weight = module.get_parameter("weight")
    is_stored_by_input = isinstance(module, Conv1D | nn.Embedding)
    return (weight.shape[1], weight.shape[0]) if is_stored_by_input else (weight.shape[0], weight.shape[1])


def _changed(module: nn.Module, change: ModuleChange, x: Tensor, y: Tensor) -> Tensor:
    """Return a module's outputs [n, O] with an adapter.

    `x` [n, I] are the module's inputs, and `y` [n, O] its outputs without the adapter.
    """
    if isinstance(module, nn.Embedding):
        scale: Any = getattr(module, "embed_scale", 1.0)
        y = y.float() + scale * (F.embedding(x, change.a.T).float() @ change.b.T.float())
        if change.ids is not None and change.rows is not None:
            is_new = x.unsqueeze(1) == change.ids
            y = torch.where(is_new.any(1, keepdim=True), scale * change.rows[is_new.int().argmax(1)].float(), y)
        return y
    added = (x.float() @ change.a.T.float()) @ change.b.T.float()
    if change.magnitude is not None:
        weight = module.get_parameter("weight").float()
        weight = weight.T if isinstance(module, Conv1D) else weight
        scales = change.magnitude / (weight + change.b.float() @ change.a.float()).norm(dim=1)
        bias: Any = getattr(module, "bias", None)
        shift = 0.0 if bias is None else bias.float()
        return (y.float() - shift + added) * scales + shift
    y = y.float() + added
    if change.ids is not None and change.rows is not None:
        y[:, change.ids] = x.float() @ change.rows.float().T
    return y
