"""`--torchao-config`: round the weights of linear layers as torchao does, without that library.

    int8wo    8 bits, one scale per output (Int8WeightOnlyConfig)
    int4wo-G  4 bits, a scale and a zero per group of G inputs (Int4WeightOnlyConfig, rounded as for tinygemm)
    fp8wo     e4m3, one scale per output (Float8WeightOnlyConfig)

LM heads, routers and experts stay unquantised, as in torchao. Only 4-bit weights with the C++ kernels stay packed in
memory. Other weights are dequantised after rounding: the results are the same, but no memory is saved.
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
    """Round a weight [O, I] to 8 bits and dequantise it to float32."""
    wide = weight.float()
    scale = (wide.abs().amax(1, keepdim=True) / 127.5).clamp_min(torch.finfo(torch.float32).eps)
    # A product with 1 / scale, because a division would round some halves differently.
    return (wide * (1 / scale)).round().clamp(-128, 127) * scale


def float8(weight: Tensor) -> Tensor:
    """Round a weight [O, I] to e4m3 and dequantise it to float32."""
    wide = weight.float()
    scale = (wide.abs().amax(1, keepdim=True) / E4M3_MOST).clamp_min(torch.finfo(torch.float32).tiny)
    return (wide / scale).clamp(-E4M3_MOST, E4M3_MOST).to(torch.float8_e4m3fn).float() * scale


def int4(weight: Tensor, group: int) -> GroupedWeight:
    """Quantise a weight [O, I] to 4-bit codes between the minimum and the maximum of each group."""
    wide = weight.float().unflatten(1, (-1, group))
    least, most = wide.amin(-1), wide.amax(-1)
    scales = ((most - least) / 15).clamp_min(1e-6)
    codes = ((wide - least.unsqueeze(-1)) / scales.unsqueeze(-1)).round().clamp(0, 15)
    return GroupedWeight(codes.flatten(1).to(torch.uint8), scales, least + 8 * scales)


class TorchaoWeights(Unquantized):
    """Rounds the weights of linear layers as `config` says."""

    def __init__(self, config: str) -> None:
        self._kind, _, group = config.partition("-")
        self._group = int(group or 0)

    def prepare(self, layer: nn.Module, kernels: Kernels) -> None:
        weight = layer.get_parameter("weight").detach()
        layer.weight = frozen(self._rounded(weight, kernels))

    def _rounded(self, weight: Tensor, kernels: Kernels) -> Tensor:
        if self._kind != "int4wo":
            rounded = int8(weight) if self._kind == "int8wo" else float8(weight)
            return kernels.prepare(rounded.to(weight.dtype))
        if weight.shape[1] % self._group:  # torchao leaves such weights unquantised too
            return kernels.prepare(weight)
        return kernels.prepare_grouped(int4(weight, self._group), weight.dtype)
