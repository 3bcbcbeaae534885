"""Products with block-scaled float8 weights by DeepGEMM's kernels for Hopper, through FlashInfer.

Written for flashinfer-python 0.6.13. The kernels round the rows of x to float8 with one scale per 128 inputs. They are
compiled on first use, for each weight shape and each range of numbers of rows. Triton computes products with other
weights.
"""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from ops.matmul import with_triton
from ops.matmul.block_scaled import has_blocks, pack_blocks
from ops.matmul.grouped import GroupedWeight
from ops.matmul.with_triton import prepare

__all__ = ["linear", "logits", "prepare", "prepare_grouped", "row_group"]

OUTPUTS = 64  # a weight's number of outputs must be a multiple of this


def prepare_grouped(weight: GroupedWeight, dtype: torch.dtype) -> Tensor:
    """Return the packed weight (see `ops.matmul`)."""
    packed = pack_blocks(weight, dtype, multiple=OUTPUTS)
    return with_triton.prepare_grouped(weight, dtype) if packed is None else packed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias (see `ops.matmul`)."""
    if not has_blocks(weight):
        return with_triton.linear(x, weight, bias)
    out = _product(x, weight)
    return out if bias is None else out.add_(bias)


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T (see `ops.matmul`)."""
    return _product(x, weight) if has_blocks(weight) else with_triton.logits(x, weight)


def row_group(weight: Tensor) -> int | None:
    """Return None for block-scaled weights, whose kernels round the rows of x themselves (see `ops.matmul`)."""
    return None if has_blocks(weight) else with_triton.row_group(weight)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    codes, scales, _ = weight.parts  # type: ignore[attr-defined]
    rows = x.as_subclass(Tensor).reshape(-1, codes.shape[1]).contiguous()
    run = import_module("flashinfer.gemm").fp8_blockscale_gemm_sm90
    out = run(rows, codes, weight_scale=scales, out_dtype=x.dtype)
    return out.view(*x.shape[:-1], len(codes))
