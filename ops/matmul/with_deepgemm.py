"""Products with block-scaled float8 weights by DeepGEMM's kernels for Hopper, through FlashInfer.

Written for flashinfer-python 0.6.13. The kernels round the rows of x to float8 with one scale per 128 inputs. They are
compiled on first use, for each weight shape and each range of numbers of rows. Triton computes products with other
weights.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module

from torch import Tensor

from ops.matmul import block_scaled, with_triton
from ops.matmul.block_scaled import has_blocks
from ops.matmul.with_triton import prepare

__all__ = ["linear", "logits", "prepare", "prepare_grouped", "row_group"]

OUTPUTS = 64  # a weight's number of outputs must be a multiple of this


def row_group(weight: Tensor) -> int | None:
    """Return None for block-scaled weights, whose kernels round the rows of x themselves (see `ops.matmul`)."""
    return None if has_blocks(weight) else with_triton.row_group(weight)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    codes, scales, *_ = weight.parts  # type: ignore[attr-defined]
    rows = x.as_subclass(Tensor).reshape(-1, codes.shape[1]).contiguous()
    run = import_module("flashinfer.gemm").fp8_blockscale_gemm_sm90
    out = run(rows, codes, weight_scale=scales, out_dtype=x.dtype)
    return out.view(*x.shape[:-1], len(codes))


prepare_grouped = partial(block_scaled.prepare_grouped, OUTPUTS)
linear, logits = partial(block_scaled.linear, _product), partial(block_scaled.logits, _product)
