"""Fakes of FlashInfer's layouts of fused experts, and of TensorRT-LLM's fused experts, with the same signatures.

The layouts are derived from the sources of flashinfer-python 0.6.13 (`moe_gemm_mixed_utils.cu`, `utils.py`). The
experts undo these layouts and compute in torch, as FlashInfer's documentation says. In 4-bit weights, rows of `up` and
of the gate alternate, beginning with `up`. In float8 weights, all rows of `up` come first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ops.matmul.grouped import E2M1
from recorded_nvfp4 import rounded, unrounded
from recorded_products import dequantised, dequantised_weight

ROWS_OF_32 = [8 * (row % 4) + row // 4 for row in range(32)]  # a row's place among 32 shuffled rows
LARGEST = 448.0


def interleave_moe_weights_for_sm90_mixed_gemm(weight: Tensor, quant_type: str = "fp4") -> Tensor:
    """Return bytes [X, O, I / 2] in the order in which products on Hopper read them."""
    assert (weight.dtype, quant_type) == (torch.uint8, "fp4")
    assert weight.is_contiguous()
    num_experts, rows, half = weight.shape
    one, other = weight.view(num_experts, rows // 16, 2, 8, half // 32, 2, 2, 2, 4).unbind(2)
    pair = torch.stack((one & 15 | other << 4, other & 240 | one >> 4), dim=-1)  # [X, r, 8, p, 2, mma, 2, 4, 2]
    return pair.permute(0, 1, 5, 2, 3, 4, 7, 6, 8).reshape(weight.shape)


def _bytes_of_mixed_gemm(interleaved: Tensor) -> Tensor:
    """Undo `interleave_moe_weights_for_sm90_mixed_gemm`."""
    num_experts, rows, half = interleaved.shape
    blocks = interleaved.view(num_experts, rows // 16, 2, 8, half // 32, 2, 4, 2, 2)
    first, second = blocks.permute(0, 1, 3, 4, 5, 2, 7, 6, 8).unbind(-1)
    both = torch.stack((first & 15 | second << 4, second & 240 | first >> 4), dim=2)
    return both.reshape(interleaved.shape)


def interleave_moe_scales_for_sm90_mixed_gemm(scales: Tensor, group_size: int = 32) -> Tensor:
    """Return exponents [X, O, G] as [X, G / 4, 4 * O]."""
    assert (scales.dtype, group_size) == (torch.uint8, 32)
    num_experts, rows, groups = scales.shape
    return scales.view(num_experts, rows, groups // 4, 4).transpose(1, 2).reshape(num_experts, groups // 4, rows * 4)


def mixed_gemm_weight(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the weight, float32 [X, O, I], from codes and scales in the two layouts above."""
    num_experts, rows, half = codes.shape
    assert scales.dtype == torch.int32
    exponents = scales.view(torch.uint8).view(num_experts, half // 64, rows, 4).transpose(1, 2).flatten(2)
    return _e2m1(_bytes_of_mixed_gemm(codes), exponents)


def shuffle_matrix_a(input_tensor: Tensor, epilogue_tile_m: int) -> Tensor:
    """Return the rows [M, K], with each group of 32 rows in the order of `ROWS_OF_32`."""
    assert (input_tensor.dim(), epilogue_tile_m, len(input_tensor) % 128) == (2, 128, 0)
    return input_tensor[torch.tensor(ROWS_OF_32).argsort() + torch.arange(0, len(input_tensor), 32)[:, None]].flatten(
        0, 1
    )


def _unshuffled(rows: Tensor) -> Tensor:
    return rows.unflatten(0, (-1, 32))[:, ROWS_OF_32].flatten(0, 1)


def shuffle_matrix_sf_a(input_tensor: Tensor, epilogue_tile_m: int, num_elts_per_sf: int = 16) -> Tensor:
    """Return shuffled scales [M, K] in tiles of 128 rows and 4 columns."""
    num_rows, columns = input_tensor.shape
    assert (num_rows % 128, columns % 4, input_tensor.dtype) == (0, 0, torch.uint8)
    tiles = shuffle_matrix_a(input_tensor, epilogue_tile_m).view(num_rows // 128, 4, 32, columns // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).flatten()


def _unshuffled_scales(scales: Tensor, num_rows: int, columns: int) -> Tensor:
    tiles = scales.reshape(num_rows // 128, columns // 4, 32, 4, 4)
    return _unshuffled(tiles.permute(0, 3, 2, 1, 4).reshape(num_rows, columns))


def mxfp8_quantize(
    input: Tensor, is_sf_swizzled_layout: bool = True, alignment: int = 32, enable_pdl=None, backend: Any = "cuda",
    sf_swizzle_layout: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert not is_sf_swizzled_layout
    assert input.is_contiguous()
    rows = torch.nn.functional.pad(input.float(), (0, -input.shape[1] % alignment)).unflatten(1, (-1, 32))
    exponents = (rows.abs().amax(2) / LARGEST).log2().ceil().clamp(-127, 127).nan_to_num(-127)
    numbers = (rows / exponents.exp2().unsqueeze(2)).to(torch.float8_e4m3fn)
    return numbers.flatten(1), (exponents + 127).to(torch.uint8).flatten()


def trtllm_fp4_block_scale_routed_moe(
    topk_ids: Any, routing_bias: Any, hidden_states: Tensor, hidden_states_scale: Any, gemm1_weights: Tensor,
    gemm1_weights_scale: Tensor, gemm1_bias: Any, gemm1_alpha: Any, gemm1_beta: Any, gemm1_clamp_limit: Any,
    gemm2_weights: Tensor, gemm2_weights_scale: Tensor, gemm2_bias: Any, output1_scale_scalar: Any,
    output1_scale_gate_scalar: Any, output2_scale_scalar: Any, num_experts: int, top_k: int, n_group: Any,
    topk_group: Any, intermediate_size: int, local_expert_offset: int, local_num_experts: int,
    routed_scaling_factor: Any, routing_method_type: int = 0, do_finalize: bool = True, enable_pdl: Any = None,
    activation_type: int = 3, per_token_scale: Any = None, output: Any = None, tune_max_num_tokens: int = 8192,
) -> list[Tensor]:  # fmt: skip
    experts, weights = topk_ids
    assert (experts.dtype, weights.dtype) == (torch.int32, torch.bfloat16)
    assert (gemm1_weights.dtype, gemm1_weights_scale.dtype) == (torch.uint8, torch.float8_e4m3fn)
    assert (local_expert_offset, local_num_experts, len(gemm1_weights)) == (0, num_experts, num_experts)
    assert gemm1_weights.shape[1] == 2 * intermediate_size == 4 * gemm2_weights.shape[2]
    assert gemm2_weights.shape[1] % 256 == intermediate_size % 256 == 0
    factors = (output1_scale_scalar, output1_scale_gate_scalar, output2_scale_scalar)
    x, second_inputs, is_nvfp4 = hidden_states.float(), None, hidden_states.dtype == torch.uint8
    if is_nvfp4:
        assert all((each.dtype, each.shape) == (torch.float32, (num_experts,)) for each in factors)
        assert hidden_states_scale.shape == (len(x), x.shape[1] // 8)
        x, second_inputs = unrounded(hidden_states, hidden_states_scale.view(torch.uint8)), torch.ones(num_experts)
    else:
        assert factors == (None, None, None)
    if hidden_states_scale is not None and not is_nvfp4:
        assert (hidden_states.dtype, hidden_states_scale.dtype) == (torch.float8_e4m3fn, torch.float8_e4m3fn)
        exponents = hidden_states_scale.view(torch.uint8).int() - 127
        x = x * exponents.float().exp2().repeat_interleave(32, 1)
    first, second = (
        _shuffled_weight(*each) for each in ((gemm1_weights, gemm1_weights_scale), (gemm2_weights, gemm2_weights_scale))
    )
    biases = [None if each is None else _shuffled_bias(each) for each in (gemm1_bias, gemm2_bias)]
    limits = (gemm1_alpha, gemm1_beta, gemm1_clamp_limit)
    up, gate = first[:, ::2], first[:, 1::2]
    if is_nvfp4:
        up, gate, second = (weight * factor.view(-1, 1, 1) for weight, factor in zip((up, gate, second), factors))
    bias = None if biases[0] is None else torch.cat((biases[0][:, ::2], biases[0][:, 1::2]), 1)
    mixture, rounds = (torch.cat((up, gate), 1), second, bias, biases[1]), hidden_states_scale is not None
    more = {"second_inputs": second_inputs, "rounds": rounds and not is_nvfp4}
    out = mixed(x, mixture, weights.float(), experts, limits, **more)
    return [out.to(torch.bfloat16)]


def trtllm_fp8_block_scale_routed_moe(
    topk_ids: Tensor, routing_bias: Any, hidden_states: Tensor, hidden_states_scale: Tensor, gemm1_weights: Tensor,
    gemm1_weights_scale: Tensor, gemm2_weights: Tensor, gemm2_weights_scale: Tensor, num_experts: int, top_k: int,
    n_group: Any, topk_group: Any, intermediate_size: int, local_expert_offset: int, local_num_experts: int,
    routed_scaling_factor: Any, routing_method_type: int = 0, use_shuffled_weight: bool = False,
    weight_layout: int = 0, do_finalize: bool = True, enable_pdl: Any = None, gemm1_lora_delta: Any = None,
    output: Any = None, tune_max_num_tokens: int = 8192,
) -> Tensor:  # fmt: skip
    assert topk_ids.dtype == torch.int32
    assert not use_shuffled_weight
    assert hidden_states_scale.is_contiguous()
    assert (gemm1_weights.dtype, gemm2_weights.dtype) == (torch.float8_e4m3fn, torch.float8_e4m3fn)
    assert gemm1_weights.shape[1] == 2 * intermediate_size == 2 * gemm2_weights.shape[2]
    experts, weights = topk_ids >> 16, (topk_ids & 0xFFFF).to(torch.int16).view(torch.bfloat16).float()
    first, second = (
        torch.stack([dequantised_weight(*each).T for each in zip(codes, scales, strict=True)])
        for codes, scales in ((gemm1_weights, gemm1_weights_scale), (gemm2_weights, gemm2_weights_scale))
    )
    x = dequantised(hidden_states, hidden_states_scale.t())
    return mixed(x, (first, second, None, None), weights, experts, (None, None, None)).to(torch.bfloat16)


def mixed(
    x: Tensor, mixture: Any, weights: Tensor, experts: Tensor, limits: Any, *, rounds=False, second_inputs: Any = None,
) -> Tensor:  # fmt: skip
    """Return the mixture's output in float32. The first half of the rows belongs to `up`.

    `limits` are the slope, the addend of `up` and the limit of each expert, or None for silu. With `rounds`, inputs of
    the second product are rounded to MXFP8. `second_inputs` are the divisors with which they are rounded to NVFP4.
    """
    gate_up, down, bias, down_bias = mixture
    slope, addend, limit = limits
    total = torch.zeros(len(x), down.shape[1])
    for expert in range(len(down)):  # every expert computes all tokens, because a graph needs fixed shapes
        inner = x @ gate_up[expert].T
        if bias is not None:
            inner = inner + bias[expert]
        up, gate = inner.chunk(2, dim=1)
        if limit is not None:
            gate, up = gate.clamp(max=limit[expert]), up.clamp(-limit[expert], limit[expert]) + addend[expert]
        inner = gate * torch.sigmoid(gate * (1.0 if slope is None else slope[expert])) * up
        if rounds:
            numbers, exponents = mxfp8_quantize(inner.contiguous(), False)
            inner = numbers.float() * (
                exponents.view(len(inner), inner.shape[1] // 32).float() - 127
            ).exp2().repeat_interleave(32, 1)
        if second_inputs is not None:
            inner = rounded(inner, second_inputs[expert])
        result = inner @ down[expert].T
        if down_bias is not None:
            result = result + down_bias[expert]
        total = total + result * (weights * (experts == expert)).sum(1, keepdim=True)
    return total


def _shuffled_weight(codes: Tensor, scales: Tensor) -> Tensor:
    num_experts, rows, half = codes.shape
    if scales.shape[2] == half // 8:
        numbers = _unshuffled_scales(scales.view(torch.uint8), num_experts * rows, half // 8)
        return unrounded(_unshuffled(codes.flatten(0, 1)), numbers).view(num_experts, rows, 2 * half)
    exponents = _unshuffled_scales(scales.view(torch.uint8), num_experts * rows, half // 16)
    return _e2m1(_unshuffled(codes.flatten(0, 1)), exponents).view(num_experts, rows, 2 * half)


def _shuffled_bias(bias: Tensor) -> Tensor:
    assert bias.dtype == torch.float32
    return _unshuffled(bias.reshape(-1, 1)).view(bias.shape)


def _e2m1(codes: Tensor, exponents: Tensor) -> Tensor:
    numbers = torch.tensor(E2M1)[torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).int()]
    return numbers * (exponents.float() - 127).exp2().repeat_interleave(32, -1)
