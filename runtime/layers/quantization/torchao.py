"""What `--torchao-config` asks for: weights of linear layers rounded as torchao rounds them, without that library.

    int8wo    8 bits, a scale for each output (Int8WeightOnlyConfig)
    int4wo-G  4 bits, groups of G inputs with a scale and a zero (Int4WeightOnlyConfig, tinygemm's numbers)
    fp8wo     e4m3, a scale for each output (Float8WeightOnlyConfig)

Heads, routers and experts stay as they are, as they do there. Those of 4 bits stay so in memory where the kernels in
C++ run; the others are dequantised: the same numbers, without the gain.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ops.matmul.grouped import GroupedWeight
from ops.select import Kernels
from runtime.layers.quantization.method import Unquantized
from runtime.layers.weight import frozen

E4M3_MOST = torch.finfo(torch.float8_e4m3fn).max


def int8(weight: Tensor) -> Tensor:
    """A weight [O, I] rounded to 8 bits and dequantised, float32."""
    wide = weight.float()
    scale = (wide.abs().amax(1, keepdim=True) / 127.5).clamp_min(torch.finfo(torch.float32).eps)
    return (wide * (1 / scale)).round().clamp(
        -128, 127
    ) * scale  # a division would round half a step the other way


def float8(weight: Tensor) -> Tensor:
    """A weight [O, I] rounded to e4m3 and dequantised, float32."""
    wide = weight.float()
    scale = (wide.abs().amax(1, keepdim=True) / E4M3_MOST).clamp_min(torch.finfo(torch.float32).tiny)
    return (wide / scale).clamp(-E4M3_MOST, E4M3_MOST).to(torch.float8_e4m3fn).float() * scale


def int4(weight: Tensor, group: int) -> GroupedWeight:
    """A weight [O, I] in whole numbers from the least to the greatest of each group."""
    wide = weight.float().unflatten(1, (-1, group))
    least, most = wide.amin(-1), wide.amax(-1)
    scales = ((most - least) / 15).clamp_min(1e-6)
    codes = ((wide - least.unsqueeze(-1)) / scales.unsqueeze(-1)).round().clamp(0, 15)
    return GroupedWeight(codes.flatten(1).to(torch.uint8), scales, least + 8 * scales)


class TorchaoWeights(Unquantized):
    """Weights of linear layers rounded as `config` says."""

    def __init__(self, config: str) -> None:
        self._kind, _, group = config.partition("-")
        self._group = int(group or 0)

    def prepare(self, layer: nn.Module, kernels: Kernels) -> None:
        weight = layer.get_parameter("weight").detach()
        layer.weight = frozen(self._rounded(weight, kernels))

    def _rounded(self, weight: Tensor, kernels: Kernels) -> Tensor:
        if self._kind != "int4wo":
            made = int8(weight) if self._kind == "int8wo" else float8(weight)
            return kernels.prepare(made.to(weight.dtype))
        if weight.shape[1] % self._group:  # left alone there too
            return kernels.prepare(weight)
        return kernels.prepare_grouped(int4(weight, self._group), weight.dtype)
