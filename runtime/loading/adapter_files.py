"""Reads the weights of LoRA adapters as `peft` saves them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runtime.errors import CheckpointError
from runtime.loading.adapter_config import AdapterConfig

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
MAX_NAMED = 5  # maximum number of tensors that an error names
PREFIX = "base_model.model."  # of all names in peft's files
_TENSOR = re.compile(r"(?P<layer>.+)\.lora_(?P<side>[AB])(?:\.default)?(?:\.weight)?")


class LowRankPair(NamedTuple):
    """The change of one linear layer: its weight becomes W + b a."""

    a: Tensor  # [r, I]
    b: Tensor  # [O, r], scaled


def read_pairs(folder: Path, config: AdapterConfig) -> dict[str, LowRankPair]:
    """Read an adapter's weights by the layer's name, float32, without peft's prefix.

    Raises CheckpointError, which names every tensor that is not half of a low-rank pair: an adapter is never used in
    part.
    """
    halves: dict[str, dict[str, Tensor]] = {}
    unknown: list[str] = []
    for name, tensor in _tensors(folder).items():
        found = _TENSOR.fullmatch(name.removeprefix(PREFIX))
        if ".experts" in name and ".shared_experts" not in name:
            raise CheckpointError(f"{folder}: {name} changes routed experts, which adapters cannot change yet.")
        if found is None or tensor.dim() != 2 or not tensor.is_floating_point():
            unknown.append(name)
        else:
            halves.setdefault(found["layer"], {})[found["side"]] = tensor
    if unknown:
        raise CheckpointError(f"{folder}: {listed(unknown)} cannot be used: not a matrix of a low-rank pair.")
    return {layer: _pair(folder, layer, sides, config) for layer, sides in halves.items()}


def _pair(folder: Path, layer: str, sides: Mapping[str, Tensor], config: AdapterConfig) -> LowRankPair:
    missing = {"A", "B"} - sides.keys()
    if missing:
        raise CheckpointError(f"{folder}: {layer} has no lora_{missing.pop()}.")
    a, b = sides["A"].float(), sides["B"].float()
    if a.shape[0] != b.shape[1] or not 1 <= a.shape[0] <= config.rank:
        raise CheckpointError(
            f"{folder}: the shapes {[*a.shape]} and {[*b.shape]} of {layer} are no pair of a rank up to {config.rank}."
        )
    if not (a.isfinite().all() and b.isfinite().all()):
        raise CheckpointError(f"{folder}: {layer} has values that are not finite.")
    return LowRankPair(a, b * config.scale(layer, a.shape[0]))


def _tensors(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of an adapter. Never unpickles objects."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if path is None:
        raise CheckpointError(f"{folder} has no {' and no '.join(WEIGHTS)}.")
    load: Callable[..., Any] = load_file
    if path.suffix == ".bin":
        load = partial(torch.load, map_location="cpu", weights_only=True)
    try:
        tensors = load(path)
    except (OSError, RuntimeError, ValueError, EOFError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read.") from error
    except Exception as error:  # torch raises `UnpicklingError` for objects
        raise CheckpointError(f"{path} holds more than tensors.") from error
    if not isinstance(tensors, dict) or not all(isinstance(each, Tensor) for each in tensors.values()):
        raise CheckpointError(f"{path} holds more than tensors.")
    return tensors


def listed(names: list[str]) -> str:
    """Return the first names as a text, and how many more there are."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(sorted(names)[:MAX_NAMED]) + more
