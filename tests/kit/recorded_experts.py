"""A fake of FlashInfer's fused experts (flashinfer-python 0.6.13), with the same signature.

It computes them in torch, from FlashInfer's documentation: the first half of `fc1_expert_weights` is multiplied with
the activation of the second half.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.matmul.rounded_rows import round_rows
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
    num_experts, hidden_size, inner_size = fc2_expert_weights.shape
    dtypes = {each.dtype for each in (input, fc1_expert_weights, fc2_expert_weights)}
    if use_deepseek_fp8_block_scale:
        assert dtypes == {torch.bfloat16, torch.float8_e4m3fn}
        assert fc1_expert_biases is None
        rounded = round_rows(input, 128)
        input = dequantised(rounded.numbers, rounded.scales)
        fc1_expert_weights, fc2_expert_weights = (
            torch.stack([dequantised_weight(*each).T for each in zip(codes, scales, strict=True)])
            for codes, scales in zip((fc1_expert_weights, fc2_expert_weights), quant_scales, strict=True)
        )
    else:
        assert quant_scales is None
        assert dtypes == {output_dtype}
    assert fc1_expert_weights.shape == (num_experts, 2 * inner_size, hidden_size)
    assert {type(each) for each in (input, fc1_expert_weights, fc2_expert_weights)} == {Tensor}
    assert output_dtype == output.dtype
    assert input.is_contiguous()
    assert (token_selected_experts.dtype, token_final_scales.dtype) == (torch.int32, torch.float32)
    total = torch.zeros(input.shape, dtype=torch.float32)
    for expert in range(num_experts):
        tokens, places = (token_selected_experts == expert).nonzero(as_tuple=True)
        inner = input[tokens] @ fc1_expert_weights[expert].T
        if fc1_expert_biases is not None:
            inner = inner + fc1_expert_biases[expert]
        up, gate = inner.chunk(2, dim=1)
        result = (F.silu(gate) * up) @ fc2_expert_weights[expert].T
        if fc2_expert_biases is not None:
            result = result + fc2_expert_biases[expert]
        total.index_add_(0, tokens, result.float() * token_final_scales[tokens, places].unsqueeze(1))
    return output.copy_(total)
