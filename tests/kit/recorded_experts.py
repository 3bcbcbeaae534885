"""A fake of FlashInfer's fused experts (flashinfer-python 0.6.13), with the same signature.

It computes the experts in float32 in torch, as FlashInfer's documentation says: the result of the first half of
`fc1_expert_weights` is multiplied by the activation of the second half's result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import recorded_nvfp4
from ops.matmul.rounded_rows import round_rows
from recorded_fused import mixed, mixed_gemm_weight
from recorded_nvfp4 import from_tiles, unrounded
from recorded_products import dequantised, dequantised_weight


def cutlass_fused_moe(
    input: Tensor, token_selected_experts: Tensor, token_final_scales: Tensor, fc1_expert_weights: Tensor,
    fc2_expert_weights: Tensor, output_dtype, quant_scales, fc1_expert_biases: Any = None,
    fc2_expert_biases: Any = None, input_sf=None, swiglu_alpha=None, swiglu_beta=None, swiglu_limit=None, tp_size=1,
    tp_rank=0, ep_size=1, ep_rank=0, cluster_size=1, cluster_rank=0, output: Any = None, enable_alltoall=False,
    use_deepseek_fp8_block_scale=False, use_w4_group_scaling=False, use_mxfp8_act_scaling=False,
    min_latency_mode=False, use_packed_weights=False, tune_max_num_tokens=8192, enable_pdl=None, activation_type=3,
    swizzled_input_sf=True,
) -> Tensor:  # fmt: skip
    second_inputs: Any = None
    dtypes = {each.dtype for each in (input, fc1_expert_weights, fc2_expert_weights)}
    assert {type(each) for each in (input, fc1_expert_weights, fc2_expert_weights)} == {Tensor}
    assert input.is_contiguous()
    weights = (fc1_expert_weights, fc2_expert_weights)
    if use_deepseek_fp8_block_scale:
        assert dtypes == {torch.bfloat16, torch.float8_e4m3fn}
        assert fc1_expert_biases is None
        rounded = round_rows(input, 128)
        input = dequantised(rounded.numbers, rounded.scales)
        weights = tuple(
            torch.stack([dequantised_weight(*each).T for each in zip(codes, scales, strict=True)])
            for codes, scales in zip(weights, quant_scales, strict=True)
        )
    elif use_w4_group_scaling:
        assert dtypes == {torch.bfloat16, torch.uint8}
        assert all(each.shape[1] % 128 == 0 for each in weights)
        weights = tuple(map(mixed_gemm_weight, weights, quant_scales))
    elif fc1_expert_weights.dtype == torch.int64:
        assert dtypes == {torch.bfloat16, torch.int64}
        (divisor, scales, factors, second_inputs, second_scales, second_factors) = quant_scales
        assert divisor.dim() == 0
        assert {each.dtype for each in (divisor, factors, second_inputs, second_factors)} == {torch.float32}
        weights = (
            _nvfp4(fc1_expert_weights, scales, factors),
            _nvfp4(fc2_expert_weights, second_scales, second_factors),
        )
        input = recorded_nvfp4.rounded(input, divisor)
    else:
        assert quant_scales is None
        assert dtypes == {output_dtype}
    fc1_expert_weights, fc2_expert_weights = (each.float() for each in weights)
    num_experts, hidden_size, inner_size = fc2_expert_weights.shape
    assert fc1_expert_weights.shape == (num_experts, 2 * inner_size, hidden_size)
    biases = (fc1_expert_biases, fc2_expert_biases)
    assert all(each is None or each.dtype == output_dtype for each in biases)
    assert (biases[0] is None) == (biases[1] is None)
    assert output_dtype == output.dtype
    assert (token_selected_experts.dtype, token_final_scales.dtype) == (torch.int32, torch.float32)
    limits = (swiglu_alpha, swiglu_beta, swiglu_limit)
    mixture = (fc1_expert_weights, fc2_expert_weights, *(None if each is None else each.float() for each in biases))
    more = {"second_inputs": second_inputs}
    return output.copy_(mixed(input.float(), mixture, token_final_scales, token_selected_experts, limits, **more))


def _nvfp4(words: Tensor, scales: Tensor, factors: Tensor) -> Tensor:
    """Return weights [X, O, I] from codes, 16 per number, and scales in tiles, 4 per number."""
    codes, (num_experts, rows, columns) = words.view(torch.uint8), words.shape
    assert (scales.dtype, scales.shape) == (torch.int32, (num_experts, rows, columns // 4))
    assert rows % 128 == columns % 8 == 0
    tiles = scales.view(torch.uint8)
    each = [unrounded(codes[x], from_tiles(tiles[x], rows, columns)) * factors[x] for x in range(num_experts)]
    return torch.stack(each)
