"""Products with block-scaled float8 weights by CUTLASS's kernels for Blackwell, through FlashInfer.

Written for flashinfer-python 0.6.13. The rows of x are rounded to float8 with one scale per 128 inputs. Triton computes
products with other weights.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.matmul import block_scaled, with_triton
from ops.matmul.block_scaled import BLOCK, has_blocks
from ops.matmul.triton_float8 import round_rows
from ops.matmul.with_triton import prepare

__all__ = ["linear", "logits", "prepare", "prepare_grouped", "row_group"]

ROWS = 4  # the number of rows is padded to a multiple of this


def row_group(weight: Tensor) -> int | None:
    """Return the number of inputs per scale if the operation before a product can round its rows (see `ops.matmul`)."""
    return BLOCK if has_blocks(weight) else with_triton.row_group(weight)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    codes, scales, *_ = weight.parts  # type: ignore[attr-defined]
    rows = x if x.dim() == 2 else x.reshape(-1, codes.shape[1])  # a reshape would drop the rounding of `RoundedRows`
    num_rows = len(rows)
    numbers, row_scales = round_rows(rows if rows.stride(1) == 1 else rows.contiguous(), BLOCK)
    if missing := -num_rows % ROWS:
        numbers = F.pad(numbers.view(torch.uint8), (0, 0, 0, missing)).view(numbers.dtype)
        row_scales = F.pad(row_scales, (0, 0, 0, missing))
    run = import_module("flashinfer.gemm").gemm_fp8_nt_groupwise
    out = run(numbers, codes, row_scales, scales, scale_major_mode="K", out_dtype=x.dtype)
    return out[:num_rows].view(*x.shape[:-1], len(codes))


prepare_grouped = partial(block_scaled.prepare_grouped, BLOCK)
linear, logits = partial(block_scaled.linear, _product), partial(block_scaled.logits, _product)
