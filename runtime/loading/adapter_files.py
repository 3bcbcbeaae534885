"""Read the weights of LoRA adapters in `peft`'s format."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runtime.config.model_facts import ModelFacts
from runtime.errors import CheckpointError
from runtime.loading.adapter_config import AdapterConfig
from runtime.loading.checkpoint import find_weights
from runtime.loading.tensors import TensorFiles

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
MAX_NAMED = 5  # maximum number of tensors that an error names
PREFIX = "base_model.model."  # all names in peft's files begin with it
_TENSOR = re.compile(r"(?P<layer>.+)\.lora_(?:embedding_)?(?P<side>[AB])(?:\.default)?(?:\.weight)?")
_MAGNITUDE = re.compile(r"(?P<layer>.+)\.lora_magnitude_vector(?:\.default)?(?:\.weight)?")
_ALL_EXPERTS = re.compile(r".+\.experts(\.base_layer)*")  # peft writes one low-rank pair for all experts of a layer
_COPY = re.compile(r"(?P<layer>.+)\.base_layer\.weight")
_TOKENS = re.compile(r"(?P<layer>.+?)(?:\.token_adapter)?\.trainable_tokens_delta(?:\.default)?")


class LowRankPair(NamedTuple):
    """The change of one layer: its weight W [O, I] becomes W + b @ a. For an embedding, W is [E, V]."""

    a: Tensor  # [r, I]
    b: Tensor  # [O, r]; already multiplied by the adapter's scale
    magnitude: Tensor | None = None  # [O]; the rows of W + b @ a are scaled to these lengths (DoRA)


class TokenVectors(NamedTuple):
    """The tokens whose vectors an adapter replaces, and their new vectors."""

    ids: tuple[int, ...]
    vectors: Tensor  # [n, E]


class AdapterWeights(NamedTuple):
    """The tensors of an adapter, float32. The keys are layer names without peft's prefix."""

    # A pair that holds all experts of a layer is not scaled yet: its scale depends on the rank of a single expert.
    pairs: dict[str, LowRankPair]
    tokens: dict[str, TokenVectors]
    copies: dict[str, Tensor]  # unchanged base weights [V, E], stored if the adapter changes the embedding or LM head
    config: AdapterConfig


def read_weights(folder: Path, config: AdapterConfig) -> AdapterWeights:
    """Read an adapter's weights.

    Raises CheckpointError if there is a tensor of an unknown kind: an adapter is never loaded in part.
    """
    halves: dict[str, dict[str, Tensor]] = {}
    unknown: list[str] = []
    magnitudes: dict[str, Tensor] = {}
    tokens: dict[str, TokenVectors] = {}
    copies: dict[str, Tensor] = {}
    for name, tensor in _tensors(folder).items():
        name = name.removeprefix(PREFIX)
        found = _TENSOR.fullmatch(name)
        if magnitude := _MAGNITUDE.fullmatch(name):
            magnitudes[magnitude["layer"]] = tensor.float()
            continue
        if copy := _COPY.fullmatch(name):
            copies[copy["layer"]] = tensor
            continue
        if replaced := _TOKENS.fullmatch(name):
            tokens[replaced["layer"]] = _token_vectors(folder, replaced["layer"], tensor, config)
            continue
        if found is None or tensor.dim() != 2 or not tensor.is_floating_point():
            unknown.append(name)
        else:
            halves.setdefault(found["layer"], {})[found["side"]] = tensor
    if unknown:
        raise CheckpointError(
            f"{folder}: {listed(unknown)} cannot be used: not a matrix of a low-rank pair. Whole weights "
            "(modules_to_save) belong into the base model."
        )
    if magnitudes.keys() != (halves.keys() if config.has_magnitudes else set()):
        raise CheckpointError(f"{folder}: use_dora and the layers with a lora_magnitude_vector do not agree.")
    pairs = {layer: _pair(folder, layer, sides, magnitudes.get(layer), config) for layer, sides in halves.items()}
    if not copies.keys() <= pairs.keys():
        raise CheckpointError(f"{folder}: {listed([*copies.keys() - pairs.keys()])} has a base_layer, but no change.")
    if not pairs and not tokens:
        raise CheckpointError(f"{folder} changes no layer: its file of weights has no tensors.")
    return AdapterWeights(pairs, tokens, copies, config)


def check_copies(folder: Path, copies: Mapping[str, Tensor], facts: ModelFacts) -> None:
    """Raise CheckpointError unless the base weights saved with an adapter equal the weights of this model.

    If the checkpoint has no unquantised tensor for a weight, only the number of rows is checked.
    """
    if not copies:
        return
    try:
        files = TensorFiles(find_weights(Path(facts.path), "auto"))
    except (CheckpointError, OSError):
        files = None
    for layer, copy in copies.items():
        stored = [] if files is None else [name for name in files.shapes if name.endswith(f"{_last(layer)}.weight")]
        is_other = copy.dim() != 2 or len(copy) != facts.vocab_size
        if files is not None and len(stored) == 1 and not is_other:
            weight = files.read(stored[0])
            is_other = weight.is_floating_point() and not torch.equal(weight.to(copy.dtype), copy)
        if is_other:
            raise CheckpointError(
                f"{folder} was trained on another {layer} than that of the base model, whose vocabulary has "
                f"{facts.vocab_size} tokens. Merge it into the base model, or train single tokens "
                "(trainable_token_indices)."
            )


def _last(layer: str) -> str:
    return layer.rpartition(".")[2]


def _token_vectors(folder: Path, layer: str, vectors: Tensor, config: AdapterConfig) -> TokenVectors:
    name = layer.rpartition(".")[2]
    ids = config.tokens.get(name, config.tokens.get(""))
    if ids is None or vectors.dim() != 2 or len(vectors) != len(ids) or not vectors.isfinite().all():
        raise CheckpointError(f"{folder}: the vectors of {layer} are not those of trainable_token_indices.")
    return TokenVectors(ids, vectors.float())


def _pair(
    folder: Path, layer: str, sides: Mapping[str, Tensor], magnitude: Tensor | None, config: AdapterConfig
) -> LowRankPair:
    missing = {"A", "B"} - sides.keys()
    if missing:
        raise CheckpointError(f"{folder}: {layer} has no lora_{missing.pop()}.")
    a, b = sides["A"].float(), sides["B"].float()
    of_all_experts = _ALL_EXPERTS.fullmatch(layer) is not None
    if a.shape[0] != b.shape[1] or a.shape[0] < 1 or (a.shape[0] > config.rank and not of_all_experts):
        raise CheckpointError(
            f"{folder}: the shapes {[*a.shape]} and {[*b.shape]} of {layer} are no pair of a rank up to {config.rank}."
        )
    if not (a.isfinite().all() and b.isfinite().all()):
        raise CheckpointError(f"{folder}: {layer} has values that are not finite.")
    if magnitude is not None and (magnitude.shape != (len(b),) or not magnitude.isfinite().all()):
        raise CheckpointError(f"{folder}: the lora_magnitude_vector of {layer} must have {len(b)} finite numbers.")
    return LowRankPair(a, b if of_all_experts else b * config.scale(layer, a.shape[0]), magnitude)


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
    """Return text with the first names and the number of remaining names."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(sorted(names)[:MAX_NAMED]) + more
