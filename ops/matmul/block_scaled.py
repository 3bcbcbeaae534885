"""Float8 weights with one scale per block of 128 x 128 numbers, for FlashInfer's products (DeepSeek's format)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ops.matmul import with_triton
from ops.matmul.grouped import GroupedWeight
from ops.matmul.with_triton import Packed, Parts, pack

BLOCK = 128
Product = Callable[[Tensor, Tensor], Tensor]  # x @ weight.T with a weight that `pack_blocks` packed


def block_scales(weight: GroupedWeight) -> Tensor | None:
    """Return the scales of a float8 weight [..., O, I], float32 [..., ceil(O / 128), I / 128].

    Returns None if the weight is not in float8, or if the numbers of a block do not share one scale.
    """
    if not weight.floating or weight.group != BLOCK:
        return None
    scales = weight.scales.float()
    blocks = scales[..., ::BLOCK, :].contiguous()
    repeated = blocks.repeat_interleave(BLOCK, dim=-2)[..., : scales.shape[-2], :]
    return blocks if torch.equal(repeated, scales) else None


def pack_blocks(weight: GroupedWeight, dtype: torch.dtype, *, multiple: int) -> Tensor | None:
    """Return the weight [O, I], packed with one scale per block, for products in bfloat16.

    Returns None for weights that have no such scales (see `block_scales`), for other dtypes than bfloat16, and if O is
    not a multiple of `multiple`.
    """
    if dtype != torch.bfloat16 or weight.codes.shape[-2] % multiple:
        return None
    scales = block_scales(weight)
    return None if scales is None else pack(Parts(weight.codes.view(torch.float8_e4m3fn), scales))


def has_blocks(weight: Tensor) -> bool:
    """Return whether `pack_blocks` packed the weight: it has one scale per block of outputs, not one per output."""
    return isinstance(weight, Packed) and weight.parts.scales.shape[-2] != weight.parts.codes.shape[-2]


def prepare_grouped(multiple: int, weight: GroupedWeight, dtype: torch.dtype) -> Tensor:
    """Return the packed weight (see `ops.matmul`). Triton takes the weights that `pack_blocks` does not pack."""
    packed = pack_blocks(weight, dtype, multiple=multiple)
    return with_triton.prepare_grouped(weight, dtype) if packed is None else packed


def linear(product: Product, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias (see `ops.matmul`)."""
    if not has_blocks(weight):
        return with_triton.linear(x, weight, bias)
    out = product(x, weight)
    return out if bias is None else out.add_(bias)


def logits(product: Product, x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T (see `ops.matmul`)."""
    return product(x, weight) if has_blocks(weight) else with_triton.logits(x, weight)
