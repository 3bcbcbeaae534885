"""Layers whose weights are in host memory (`--cpu-offload-gb`, `--offload-group-size`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from runtime.errors import ConfigurationError

ALIGNMENT = 256  # bytes; places of weights in a layer's memory are multiples of this


class _Place(NamedTuple):
    """The place of a weight in the model."""

    module: nn.Module
    name: str

    @property
    def weight(self) -> Tensor:
        return self.module.get_parameter(self.name)

    def move(self, memory: Tensor, first: int = 0) -> None:
        """Make the weight use `memory` (uint8, a whole storage) from byte `first` on, instead of its own storage."""
        moved = _moved(self.weight, memory, first)
        setattr(self.module, self.name, nn.Parameter(moved, requires_grad=False))


class HostLayer:
    """A layer whose own weights are in one block of host memory, so that one copy brings them to the device."""

    def __init__(self, layer: nn.Module, shared: Collection[nn.Module]) -> None:
        """Move the weights of a prepared layer to the host. Modules in `shared` belong to several layers and stay.

        Raises `ConfigurationError` if something other than the layer's parameters reads the memory of a weight.
        """
        self.layer = layer
        by_storage = _by_storage(layer, shared)
        self._places = [place for places in by_storage.values() for place in places]
        sizes = [places[0].weight.untyped_storage().nbytes() for places in by_storage.values()]
        self.num_bytes = sum(_aligned(size) for size in sizes)
        pinned = any(place.weight.is_cuda for place in self._places)
        self.memory = torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=pinned)  # [num_bytes]
        first = 0
        for size, places in zip(sizes, by_storage.values(), strict=True):
            self._move(first, size, places)
            first += _aligned(size)

    def bind(self, slot: Tensor) -> None:
        """Make the layer's weights use the device memory `slot`, uint8 [at least num_bytes]."""
        for place in self._places:
            place.move(slot)

    def _move(self, first: int, size: int, places: list[_Place]) -> None:
        storage = places[0].weight.untyped_storage()
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (size,), (1,))
        self.memory[first : first + size].copy_(source)
        left = StorageWeakRef(storage)
        del storage, source
        for place in places:
            place.move(self.memory, first)
        if not left.expired():
            raise ConfigurationError(
                f"The weights of this model cannot be kept in host memory: {places[0].name} of "
                f"{type(places[0].module).__name__} is also read in another place. Leave out --cpu-offload-gb and "
                "--offload-group-size."
            )


def _by_storage(layer: nn.Module, shared: Collection[nn.Module]) -> dict[int, list[_Place]]:
    """Return address of a storage -> the layer's weights in this storage."""
    found: dict[int, list[_Place]] = {}
    for module in layer.modules():
        for name, each in module.named_parameters(recurse=False):
            if each.numel() and module not in shared:
                found.setdefault(each.untyped_storage().data_ptr(), []).append(_Place(module, name))
    return found


def shared_modules(layers: Iterable[nn.Module]) -> frozenset[nn.Module]:
    """Return the modules that belong to several layers."""
    count = Counter(module for layer in layers for module in set(layer.modules()))
    return frozenset(module for module, number in count.items() if number > 1)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _moved(tensor: Tensor, memory: Tensor, first: int) -> Tensor:
    """Return a tensor with the same shape, strides and attributes in the storage of `memory`.

    `first` is added to the tensor's byte offset in its old storage.
    """
    start = first // tensor.element_size() + tensor.storage_offset()
    moved = torch.empty(0, dtype=tensor.dtype, device=memory.device)
    moved.set_(memory.untyped_storage(), start, tensor.shape, tensor.stride())
    if type(tensor) not in (Tensor, nn.Parameter):
        moved = moved.as_subclass(type(tensor))
    address = tensor.untyped_storage().data_ptr()

    def attribute(value: Any) -> Any:
        if isinstance(value, Tensor) and value.untyped_storage().data_ptr() == address:
            return _moved(value, memory, first)
        if isinstance(value, tuple) and hasattr(value, "_fields"):  # the parts of a packed weight
            return type(value)(*map(attribute, value))
        return value

    for name, value in vars(tensor).items():
        setattr(moved, name, attribute(value))
    return moved
