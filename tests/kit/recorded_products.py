"""Fakes of FlashInfer's products with block-scaled float8 weights (flashinfer-python 0.6.13), with the same signatures.

They compute in torch, from FlashInfer's documentation: every scale belongs to 128 inputs, and a weight's scale also to
128 outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ops.matmul.rounded_rows import round_rows


def fp8_blockscale_gemm_sm90(
    input: Tensor, weight: Tensor, input_scale=None, weight_scale: Any = None, out=None, out_dtype: Any = None,
) -> Tensor:  # fmt: skip
    (_, in_size), out_size = input.shape, len(weight)
    assert type(input) is Tensor
    assert input.is_contiguous()
    assert (input.dtype, weight.dtype, weight_scale.dtype) == (torch.bfloat16, torch.float8_e4m3fn, torch.float32)
    assert input_scale is None
    assert in_size % 128 == out_size % 64 == 0
    rounded = round_rows(input, 128)
    return (dequantised(rounded.numbers, rounded.scales) @ dequantised_weight(weight, weight_scale)).to(out_dtype)


def gemm_fp8_nt_groupwise(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, scale_major_mode=None, mma_sm=1,
    scale_granularity_mnk=(1, 128, 128), out=None, out_dtype: Any = None, backend="cutlass",
) -> Tensor:  # fmt: skip
    assert (a.dtype, b.dtype) == (torch.float8_e4m3fn, torch.float8_e4m3fn)
    assert (a_scale.dtype, b_scale.dtype, out_dtype) == (torch.float32, torch.float32, torch.bfloat16)
    assert len(a) % 4 == 0
    assert scale_major_mode == "K"
    assert a.is_contiguous()
    assert a_scale.is_contiguous()
    assert len(b) % 128 == 0
    return (dequantised(a, a_scale) @ dequantised_weight(b, b_scale)).to(out_dtype)


def dequantised(numbers: Tensor, scales: Tensor) -> Tensor:
    """Return numbers [T, I] times scales [T, I / 128], in float32."""
    assert scales.shape == (len(numbers), numbers.shape[1] // 128)
    return numbers.float() * scales.repeat_interleave(128, 1)


def dequantised_weight(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the transpose of codes [O, I] times scales [ceil(O / 128), I / 128], in float32."""
    out_size, in_size = codes.shape
    assert scales.shape == (-(-out_size // 128), in_size // 128)
    assert scales.is_contiguous()
    return (codes.float() * scales.repeat_interleave(128, 0)[:out_size].repeat_interleave(128, 1)).T
