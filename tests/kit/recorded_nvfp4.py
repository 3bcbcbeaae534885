"""Fakes of FlashInfer's NVFP4 functions (flashinfer-python 0.6.13), with the same signatures.

Scales are read in tiles of 128 rows and 4 columns, as `swizzled` in FlashInfer's `fp4_quantization.py` documents.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ops.matmul.grouped import E2M1
from ops.matmul.nvfp4 import Rounded, round_rows


def fp4_quantize(
    input: Tensor, global_scale: Any = None, sf_vec_size=16, sf_use_ue8m0=False, is_sf_swizzled_layout=True,
    is_sf_8x4_layout=False, is_global_scale_inversed=False, enable_pdl=None, backend="cuda",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return codes [T, I / 2] and scales (uint8), in tiles or, without `is_sf_swizzled_layout`, [T, I / 16]."""
    assert type(input) is Tensor
    assert input.is_contiguous()
    assert (global_scale.dtype, global_scale.shape) == (torch.float32, (1,))
    rounded = round_rows(input, 1 / global_scale)
    scales = rounded.scales.view(torch.uint8)
    return rounded.codes, in_tiles(scales) if is_sf_swizzled_layout else scales


def mm_fp4(
    a: Tensor, b: Tensor, a_descale: Tensor, b_descale: Tensor, alpha: Any = None, out_dtype: Any = torch.bfloat16,
    out=None, block_size=16, use_8x4_sf_layout=False, backend="auto", use_nvfp4=True, enable_pdl=True,
) -> Tensor:  # fmt: skip
    assert (a.dtype, b.dtype, alpha.dtype, alpha.numel()) == (torch.uint8, torch.uint8, torch.float32, 1)
    assert a_descale.dtype == b_descale.dtype == torch.uint8
    (num_rows, half), out_size = a.shape, b.shape[1]
    assert half % 16 == out_size % 32 == 0
    assert b.t().is_contiguous()
    assert b_descale.t().is_contiguous()
    assert backend == "cutlass"
    rows = unrounded(a, from_tiles(a_descale, num_rows, half // 8))
    weight = unrounded(b.t(), from_tiles(b_descale.t(), out_size, half // 8))
    return (rows @ weight.T * alpha).to(out_dtype)


def in_tiles(scales: Tensor) -> Tensor:
    """Return scales [R, G] in tiles, padded to [ceil(R / 128) * 128, ceil(G / 4) * 4]."""
    num_rows, columns = scales.shape
    wide = torch.zeros(-(-num_rows // 128) * 128, -(-columns // 4) * 4, dtype=torch.uint8)
    wide[:num_rows, :columns] = scales
    found = torch.empty_like(wide).flatten()
    rows, places = torch.meshgrid(torch.arange(len(wide)), torch.arange(wide.shape[1]), indexing="ij")
    found[_offsets(rows, places, wide.shape[1])] = wide
    return found.view(wide.shape)


def from_tiles(tiles: Tensor, num_rows: int, columns: int) -> Tensor:
    """Undo `in_tiles`: return the scales [num_rows, columns]."""
    assert tiles.shape == (-(-num_rows // 128) * 128, -(-columns // 4) * 4)
    rows, places = torch.meshgrid(torch.arange(num_rows), torch.arange(columns), indexing="ij")
    return tiles.flatten()[_offsets(rows, places, tiles.shape[1])]


def _offsets(rows: Tensor, columns: Tensor, width: int) -> Tensor:
    """Return the offset of each scale: that of `get_sf_out_offset_128x4` in FlashInfer's quantization_utils.cuh."""
    tile = rows // 128 * (width // 4) + columns // 4
    return tile * 512 + rows % 32 * 16 + rows % 128 // 32 * 4 + columns % 4


def unrounded(codes: Tensor, scales: Tensor) -> Tensor:
    """Return codes [..., I / 2] times scales [..., I / 16] (uint8), in float32."""
    numbers = torch.tensor(E2M1)[torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).int()]
    return numbers * scales.view(torch.float8_e4m3fn).float().repeat_interleave(16, -1)


def rounded(x: Tensor, divisor: Tensor) -> Tensor:
    """Return rows that are rounded with the factor 1 / divisor, and multiplied by `divisor`, in float32."""
    found: Rounded = round_rows(x, 1 / divisor)
    return found.dequantised()
