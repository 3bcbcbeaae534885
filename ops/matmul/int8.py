"""Matrix products with weights of 8 bits, in plain torch: for processors without the kernels in C++.

A weight is scale[o] * q with whole numbers q from -127 to 127, and every product makes it wide again: it saves memory,
not time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.matmul.grouped import GroupedWeight


class Int8(Tensor):
    """A weight [O, I] of 8 bits; behind it in the same memory stand the outputs' scales, float32."""


def prepare(weight: Tensor, *, bits: int | None = None) -> Tensor:
    """The weight rounded to 8 bits if asked, each output with a scale of its own (see `ops.matmul`)."""
    if bits is None:
        return weight
    if bits != 8:
        raise ValueError(f"Weights are rounded to 8 bits, not {bits}.")
    out_size, in_size = weight.shape
    room = -(-out_size * in_size // 4) * 4  # scales stand at a multiple of their size
    memory = torch.empty(room + 4 * out_size, dtype=torch.int8, device=weight.device)
    scales = weight.detach().float().abs().amax(dim=1) / 127
    memory[room:].view(torch.float32).copy_(scales)
    whole = (weight.detach() / scales.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1)).round_()
    rounded = memory.as_strided((out_size, in_size), (in_size, 1))
    rounded.copy_(whole)
    return rounded.as_subclass(Int8)


def prepare_grouped(weight: GroupedWeight, dtype: torch.dtype) -> Tensor:
    """The weight as a plain one (see `ops.matmul`)."""
    return weight.dequantised().to(dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias (see `ops.matmul`)."""
    if not isinstance(weight, Int8):
        return F.linear(x, weight, bias)
    result = logits(x, weight)
    return (result if bias is None else result + bias).to(x.dtype)


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in float32 (see `ops.matmul`)."""
    if not isinstance(weight, Int8):
        return F.linear(x, weight).float()
    plain = weight.as_subclass(Tensor)
    room = -(-plain.numel() // 4) * 4
    scales = plain.as_strided((4 * len(plain),), (1,), room).view(torch.float32)
    if x.dtype == torch.float16:
        x = x.float()  # sums of whole numbers go beyond what it holds
    return F.linear(x, plain.to(x.dtype)).float() * scales
