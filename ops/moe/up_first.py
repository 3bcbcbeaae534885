"""Packs weights of experts with the rows of `up` before the rows of the gate, as FlashInfer's kernels read them."""

from __future__ import annotations

import torch
from torch import Tensor

from ops.matmul.block_scaled import BLOCK, block_scales
from ops.matmul.grouped import GroupedWeight
from ops.matmul.with_triton import Parts, pack
from ops.moe import Mixture


def pack_blocks(gate_up: GroupedWeight, down: GroupedWeight) -> Mixture | None:
    """Return float8 weights with one scale per block, `up` first. Return None for weights in other formats.

    Also returns None if a block has rows of both `up` and the gate.
    """
    swapped_rows = gate_up._replace(codes=swapped(gate_up.codes), scales=swapped(gate_up.scales))
    first, second = _pack(swapped_rows), _pack(down)
    is_divided = gate_up.codes.shape[1] // 2 % BLOCK != 0
    return None if first is None or second is None or is_divided else Mixture(first, second)


def _pack(weight: GroupedWeight) -> Tensor | None:
    """Return packed float8 weights with one scale per block, or None for other weights."""
    scales = block_scales(weight)
    if scales is None or weight.codes.shape[1] % BLOCK:
        return None
    return pack(Parts(weight.codes.view(torch.float8_e4m3fn), scales))


def swapped(rows: Tensor) -> Tensor:
    """Return rows [X, 2F, ...] with the second half first."""
    return torch.cat(rows.chunk(2, dim=1)[::-1], dim=1)
