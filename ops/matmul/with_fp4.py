"""Products in NVFP4 by CUTLASS's kernels for Blackwell, through FlashInfer.

Written for flashinfer-python 0.6.13 and 0.7.2. The rows of x are rounded to NVFP4 with the checkpoint's factor for
inputs, as `ops/matmul/nvfp4.py` describes. Triton computes products with other weights.
"""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from ops.matmul import with_triton
from ops.matmul.fused_weight import FusedWeight, fuse
from ops.matmul.grouped import GroupedWeight
from ops.matmul.nvfp4 import factored, input_factor, is_nvfp4, tiled
from ops.matmul.with_triton import prepare

__all__ = ["linear", "logits", "prepare", "prepare_grouped", "row_group"]

MULTIPLE = 32  # a weight's numbers of outputs and inputs must be multiples of this
DTYPES = (torch.float16, torch.bfloat16)


def prepare_grouped(weight: GroupedWeight, dtype: torch.dtype) -> Tensor:
    """Return a weight in NVFP4 in the layout of the kernels, or another weight as Triton's kernels read it.

    Triton also gets weights that join tensors of a checkpoint with different factors.
    """
    out_size, in_size = weight.codes.shape
    fits = is_nvfp4(weight) and dtype in DTYPES and not out_size % MULTIPLE and not in_size % MULTIPLE
    found = factored(weight) if fits else None
    if found is None:
        return with_triton.prepare_grouped(weight, dtype)
    (codes, scales), factor = found
    inputs = input_factor(weight)
    return fuse(
        (out_size, in_size), (codes, tiled(scales).view(torch.uint8), (1 / inputs)[None], (factor * inputs)[None])
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias (see `ops.matmul`)."""
    if not isinstance(weight, FusedWeight):
        return with_triton.linear(x, weight, bias)
    out = _product(x, weight)
    return out if bias is None else out.add_(bias)


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T (see `ops.matmul`)."""
    return _product(x, weight) if isinstance(weight, FusedWeight) else with_triton.logits(x, weight)


def row_group(weight: Tensor) -> int | None:
    """Return None for weights in NVFP4: rows are rounded to float8 only for Triton's products (see `ops.matmul`)."""
    return None if isinstance(weight, FusedWeight) else with_triton.row_group(weight)


def _product(x: Tensor, weight: FusedWeight) -> Tensor:
    codes, scales, divisor, factor = weight.parts
    rows = x.as_subclass(Tensor).reshape(-1, weight.shape[1]).contiguous()
    numbers, row_scales = import_module("flashinfer").fp4_quantize(rows, divisor)
    run = import_module("flashinfer.gemm").mm_fp4
    out = run(numbers, codes.t(), row_scales, scales.t(), factor, rows.dtype, backend="cutlass")
    return out.view(*x.shape[:-1], len(codes))
