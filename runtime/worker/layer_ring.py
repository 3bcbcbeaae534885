"""Copies the weights of layers in host memory to the device during each step, ahead of their use.

The device has n slots. The k-th layer in host memory always reads slot k % n, so its weights have fixed addresses, as
CUDA graphs need. A step begins with copies into all slots. After a layer has been computed, its slot is free, so the
weights of the next layer that reads this slot are copied into it. Copies run on the copy stream, concurrently with the
forward pass, and each layer waits only for its own copy. All copies have ended at the end of a step, so a graph can
contain a whole step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from runtime.modeling.decoder import Decoder
from runtime.modeling.host_layers import HostLayer
from runtime.worker.device import Device, Mark


class LayerRing:
    """The device slots for a model's layers in host memory. Hooks on the layers start the copies.

    The layers must run in order, each once per forward pass. One thread runs all forward passes of a model.
    """

    def __init__(self, model: Decoder, layers: Sequence[HostLayer], num_slots: int) -> None:
        """Allocate the slots on the model's device, and make the layers read them. Call `use` before the first step."""
        device = next(model.parameters()).device
        size = max(layer.num_bytes for layer in layers)
        self.slots = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(num_slots)]  # [size] each
        self._layers = layers
        self._copied: list[Mark] = []  # slot -> mark at the end of its last copy
        self._next = 0  # number of layers in host memory that this forward pass has computed
        self._device: Device | None = None
        for number, layer in enumerate(layers):
            layer.bind(self._slot(number))
            layer.layer.register_forward_pre_hook(partial(self._before, number))
            layer.layer.register_forward_hook(partial(self._after, number))
        # Registered last, so that `prepend` makes this hook run first.
        model.layers[0].register_forward_pre_hook(self._begin, prepend=True)

    @property
    def num_bytes(self) -> int:
        """Size of all slots."""
        return sum(slot.nbytes for slot in self.slots)

    def use(self, device: Device) -> None:
        """Copy on the streams of this device from now on. Must be called before the first step."""
        self._device = device

    def _begin(self, layer: nn.Module, inputs: Any) -> None:
        device = self._opened
        self._next, self._copied = 0, []
        device.order("forward", "copy")  # the previous step may still read the slots
        for number in range(min(len(self.slots), len(self._layers))):
            self._copied.append(self._copy(device, number))

    def _before(self, number: int, layer: nn.Module, inputs: Any) -> None:
        if number != self._next:
            raise RuntimeError(f"Layer {number} in host memory runs in place of layer {self._next}.")
        self._wait(self._opened, self._copied[number % len(self.slots)])

    def _after(self, number: int, layer: nn.Module, inputs: Any, output: Any) -> None:
        device, following = self._opened, number + len(self.slots)
        self._next += 1
        if following < len(self._layers):
            device.wait_for(device.mark("forward"), "copy")  # the layer that was just computed may still read its slot
            self._copied[following % len(self.slots)] = self._copy(device, following)

    def _wait(self, device: Device, copied: Mark) -> None:
        device.wait_for(copied, "forward")

    def _copy(self, device: Device, number: int) -> Mark:
        """Enqueue the copy of a layer's weights to its slot. Return a mark at the end of the copy."""
        memory = self._layers[number].memory
        with device.copies():
            self._slot(number)[: len(memory)].copy_(memory, non_blocking=True)
        return device.mark("copy")

    def _slot(self, number: int) -> Tensor:
        return self.slots[number % len(self.slots)]

    @property
    def _opened(self) -> Device:
        if self._device is None:
            raise RuntimeError("The layers in host memory have no device yet.")
        return self._device
