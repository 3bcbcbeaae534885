"""Choice of the layers whose weights stay in host memory, and a check that the host has enough memory."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import nn

from ops.machine import GIB
from runtime.config.plan import ModelPlan
from runtime.config.resolve.offload import in_groups
from runtime.errors import CheckpointError, ConfigurationError
from runtime.modeling.decoder import Decoder


class LayersInHost(NamedTuple):
    """The layers whose weights are kept in host memory, in order."""

    layers: tuple[nn.Module, ...] = ()
    num_bytes: int = 0  # size of the layers' weights
    slot_bytes: int = 0  # size of the device memory into which the layers are copied in turn during a forward pass


def layers_in_host(model: Decoder, plan: ModelPlan, dtype: torch.dtype) -> LayersInHost:
    """Choose the layers whose weights stay in host memory. `model` is on the meta device.

    Raises `ConfigurationError` if this would save no device memory, and CheckpointError if the host has too little
    memory.
    """
    if not (plan.offload_gib or plan.offload_group) or not model.layers:
        return LayersInHost()
    sizes, slots = [prepared_bytes(layer, dtype) for layer in model.layers], plan.offload_ahead + 1
    if plan.offload_group:
        chosen = in_groups(len(sizes), plan.offload_group, plan.offload_in_group)
    else:
        chosen = _evenly(len(sizes), min(len(sizes), plan.offload_gib * GIB // max(*sizes, 1)))
    if len(chosen) <= slots:
        asked = f"--cpu-offload-gb {plan.offload_gib}" if plan.offload_gib else "--offload-group-size"
        raise ConfigurationError(
            f"{asked} would keep {len(chosen)} of {len(sizes)} layers of up to {max(sizes) / GIB:.2f} GiB in host "
            f"memory, but the GPU has memory for {slots} of them (--offload-prefetch-step + 1), which saves none. "
            "Keep more layers in host memory, or none."
        )
    num_bytes, largest = sum(sizes[index] for index in chosen), max(sizes[index] for index in chosen)
    # PyTorch rounds each layer's pinned memory up to a power of two.
    pinned, available = sum(1 << (sizes[index] - 1).bit_length() for index in chosen), plan.offload_host_bytes
    if available and pinned > available:
        raise CheckpointError(
            f"The layers in host memory need {pinned / GIB:.1f} GiB, but only {available / GIB:.1f} GiB are free for "
            "each rank on this host. Keep fewer layers in host memory."
        )
    return LayersInHost(tuple(model.layers[index] for index in chosen), num_bytes, slots * largest)


def prepared_bytes(module: nn.Module, dtype: torch.dtype) -> int:
    """Return the size of a module's prepared weights. Parameters that loading does not convert have an `own_dtype`."""
    return sum(
        each.numel() * getattr(each, "prepared_bits", 8 * getattr(each, "own_dtype", dtype).itemsize) // 8
        for each in module.parameters()
    )


def _evenly(num_layers: int, count: int) -> Collection[int]:
    """Return the indices of `count` layers at equal distances, the last layer among them."""
    return [-(-(number + 1) * num_layers // count) - 1 for number in range(count)]
