"""Matrix products in C++ with packed weights (`ops/cpp/source/product.h`).

Every output is one sum over the whole depth in a fixed order, in float32, so a row's result does not depend on what
is computed beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.cpp.kernel_launcher import KernelLauncher
from ops.cpp.library import TYPES, Pack, Pack8, Product, Product8, address

SCALE_BYTES = 4


class PackedWeight(Tensor):
    """A weight [O, I] packed in panels of its own dtype: a view of their memory, filled up to whole panels."""


class PackedWeight8(Tensor):
    """A weight [O, I] packed in panels of 8 bits; before them in the same memory stand the outputs' scales, float32."""

    @property
    def scales_address(self) -> int:
        return self.untyped_storage().data_ptr()


def scratch8(launcher: KernelLauncher, rows: int, in_size: int) -> Tensor:
    """Memory for so many rows in 8 bits: each has its depth in whole steps, and one more for its scale and sum."""
    step = launcher.library.byte_step
    return launcher.empty((rows, (-(-in_size // step) + 1) * step), torch.uint8)


def make(launcher: KernelLauncher) -> Mapping[str, Callable[..., Any]]:
    """`prepare`, `linear` and `logits` (see `ops.matmul`)."""
    width, step = launcher.library.panel_width, launcher.library.byte_step

    def prepare(weight: Tensor, *, bits: int | None = None) -> Tensor:
        """The weight in packed, of 8 bits if asked; as it is where the kernels do not take it."""
        if bits not in (None, 8):
            raise ValueError(f"Weights are rounded to 8 bits, not {bits}.")
        dtype, (out_size, in_size) = weight.dtype, weight.shape
        if weight.device.type != "cpu" or dtype not in TYPES:
            return weight
        padded = -(-out_size // width) * width
        plain = weight.detach().contiguous()
        if bits == 8 and in_size <= launcher.library.max_byte_depth:
            scales, depth = padded * SCALE_BYTES, -(-in_size // step) * step
            memory = torch.empty(scales + padded * depth, dtype=torch.uint8)
            first = memory.data_ptr()
            launcher.launch("pack8", dtype, Pack8(address(plain), first + scales, first, in_size, out_size))
            return memory.as_strided((out_size, in_size), (in_size, 1), scales).as_subclass(PackedWeight8)
        if in_size * dtype.itemsize % 4:
            return weight
        memory = torch.empty(padded * in_size, dtype=dtype)
        launcher.launch("pack", dtype, Pack(address(plain), address(memory), in_size, out_size))
        return memory.as_strided((out_size, in_size), (in_size, 1)).as_subclass(PackedWeight)

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x @ weight.T + bias."""
        if not isinstance(weight, (PackedWeight, PackedWeight8)):
            return F.linear(x, weight, bias)
        return product(x, weight, bias, x.dtype)

    def logits(x: Tensor, weight: Tensor) -> Tensor:
        """x @ weight.T, not rounded to x's dtype."""
        if not isinstance(weight, (PackedWeight, PackedWeight8)):
            return F.linear(x, weight).float()
        return product(x, weight, None, torch.float32)

    def product(
        x: Tensor, weight: PackedWeight | PackedWeight8, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        out_size, in_size = weight.shape
        shape = (*x.shape[:-1], out_size)
        x = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        x = x if x.stride(1) == 1 else x.contiguous()
        if x.shape[1] != in_size:
            raise ValueError(f"A weight of {in_size} inputs cannot be multiplied with rows of {x.shape[1]}.")
        wide = "_wide" if out_dtype != x.dtype else ""
        out = launcher.empty((len(x), out_size), out_dtype)
        plain = Product(
            x=address(x),
            x_stride=x.stride(0),
            rows=launcher.tokens(x),
            weight=address(weight),
            bias=address(bias),
            out=address(out),
            in_size=in_size,
            out_size=out_size,
        )
        if isinstance(weight, PackedWeight):
            if x.dtype != weight.dtype:
                raise ValueError(f"A weight in {weight.dtype} cannot be multiplied with rows in {x.dtype}.")
            launcher.launch(f"product{wide}", x.dtype, plain)
            return out.view(shape)
        rounded = scratch8(launcher, len(x), in_size)
        launcher.launch(f"product8{wide}", x.dtype, Product8(plain, weight.scales_address, address(rounded)))
        return out.view(shape)

    return {"prepare": prepare, "linear": linear, "logits": logits}
