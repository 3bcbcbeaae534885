"""Matrix products with 8-bit weights in torch, for processors without C++ kernels.

A weight is scale[o] * q[o, i] with integers q from -127 to 127. Each product dequantises the weight, so 8 bits save
memory but no time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.matmul.grouped import GroupedWeight
from ops.matmul.native import row_group as row_group


class Int8(Tensor):
    """An 8-bit weight [O, I], followed in memory by one float32 scale per output."""


def prepare(weight: Tensor, *, bits: int | None = None) -> Tensor:
    """Return the weight, quantised with one scale per output if `bits` is 8 (see `ops.matmul`)."""
    if bits is None:
        return weight
    if bits != 8:
        raise ValueError(f"Weights can be rounded to 8 bits, not to {bits}.")
    out_size, in_size = weight.shape
    scales_start = -(-out_size * in_size // 4) * 4  # aligned to a scale's size
    memory = torch.empty(scales_start + 4 * out_size, dtype=torch.int8, device=weight.device)
    scales = weight.detach().float().abs().amax(dim=1) / 127
    memory[scales_start:].view(torch.float32).copy_(scales)
    whole = (weight.detach() / scales.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1)).round_()
    rounded = memory.as_strided((out_size, in_size), (in_size, 1))
    rounded.copy_(whole)
    return rounded.as_subclass(Int8)


def prepare_grouped(weight: GroupedWeight, dtype: torch.dtype) -> Tensor:
    """Return the dequantised weight (see `ops.matmul`)."""
    return weight.dequantised().to(dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias (see `ops.matmul`)."""
    if not isinstance(weight, Int8):
        return F.linear(x, weight, bias)
    result = logits(x, weight)
    return (result if bias is None else result + bias).to(x.dtype)


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T in float32 (see `ops.matmul`)."""
    if not isinstance(weight, Int8):
        return F.linear(x, weight).float()
    codes = weight.as_subclass(Tensor)
    scales_start = -(-codes.numel() // 4) * 4
    scales = codes.as_strided((4 * len(codes),), (1,), scales_start).view(torch.float32)
    if x.dtype == torch.float16:
        x = x.float()  # float16 overflows in sums of integers
    return F.linear(x, codes.to(x.dtype)).float() * scales
