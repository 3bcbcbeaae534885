"""Mixtures of experts with TensorRT-LLM's fused kernels for Blackwell, through FlashInfer.

Written for flashinfer-python 0.6.13 and 0.7.2. The kernels compute experts in MXFP4, with inputs in bfloat16 or rounded
to MXFP8 (e4m3 with a power of two per 32 inputs), in NVFP4, with the inputs of both products rounded to NVFP4, and in
float8 with one scale per block of 128 x 128 numbers. In 4-bit weights, rows of `up` and of the gate alternate,
beginning with `up`. In float8 weights, all rows of `up` come before those of the gate. Routing weights are rounded to
bfloat16. Triton kernels compute the routing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.matmul.block_scaled import BLOCK, has_blocks
from ops.matmul.fused_weight import FusedWeight
from ops.matmul.triton_float8 import round_rows
from ops.moe import GroupedMixture, Mixture, with_triton
from ops.moe.fused_weights import (
    Fp4,
    both_nvfp4,
    check_activation,
    in_nvfp4,
    is_mxfp4,
    prepare_mxfp4,
    prepare_nvfp4,
    weighed,
)
from ops.moe.up_first import pack_blocks
from ops.moe.with_triton import prepare_experts, route

MULTIPLE = 256  # sizes of MXFP4 and NVFP4 experts are padded to a multiple of this
EPILOGUE_TILE = 128  # rows of the kernels' output tiles; an argument of FlashInfer's layout functions
RENORMALIZE = 1  # a `RoutingMethodType` of FlashInfer; without effect, because the experts are already chosen
KERNELS = "TensorRT-LLM's kernels"


def prepare_grouped_experts(mixture: GroupedMixture, dtype: torch.dtype) -> Mixture:
    """Return packed weights in the layout of the kernels (see `ops.moe`).

    Raises ValueError for weights that the kernels do not read.
    """
    if dtype == torch.bfloat16:
        if is_mxfp4(mixture.gate_up) and is_mxfp4(mixture.down):
            return prepare_mxfp4(mixture, MULTIPLE, _alternate, _shuffled, _shuffled_bias)
        if both_nvfp4(mixture):
            return prepare_nvfp4(mixture, MULTIPLE, _alternate, _shuffled)
        gate_up, down, *biases = mixture
        packed = pack_blocks(gate_up, down)
        if packed is not None and not any(bias is not None for bias in biases):
            return packed
    raise ValueError(
        f"TensorRT-LLM's kernels read experts only in MXFP4, in NVFP4 with scales of the inputs and without biases, or "
        f"in float8 with one scale per block of {BLOCK} x {BLOCK} numbers without biases and with inner sizes on each "
        f"rank that are multiples of {BLOCK}, for bfloat16. Use --moe-runner-backend triton."
    )


def _alternate(one: Tensor, other: Tensor) -> Tensor:
    """Interleave the rows of two tensors [X, F, ...]. Return [X, 2F, ...], beginning with a row of `one`."""
    return torch.stack((one, other), dim=2).flatten(1, 2)


def _shuffled(weight: Fp4) -> tuple[Tensor, Tensor]:
    """Return codes and scales in the order in which the kernels read them.

    The shapes do not change. One call shuffles the rows of all experts, because no tile has rows of two experts.
    """
    library = import_module("flashinfer")
    codes, scales = (each.flatten(0, 1) for each in weight)
    shuffled = library.shuffle_matrix_a(codes, EPILOGUE_TILE).view(weight.codes.shape)
    interleaved = library.shuffle_matrix_sf_a(scales, EPILOGUE_TILE)
    return shuffled, interleaved.view(torch.float8_e4m3fn).reshape(weight.scales.shape)


def _shuffled_bias(bias: Tensor) -> Tensor:
    """Return a bias [X, O] in float32, with its rows in the order of `_shuffled`."""
    rows = bias.detach().float().reshape(-1, 1)
    return import_module("flashinfer").shuffle_matrix_a(rows, EPILOGUE_TILE).view(bias.shape)


def one_expert(mixture: Mixture, expert: int, size: int, inner_size: int) -> Mixture:
    """Return the weights of one expert if the mixture is unquantised (see `ops.moe`)."""
    if isinstance(mixture.gate_up, FusedWeight) or has_blocks(mixture.gate_up):
        raise ValueError("Experts in the layout of TensorRT-LLM's kernels are not readable one by one.")
    return with_triton.one_expert(mixture, expert, size, inner_size)


def mix(
    x: Tensor,
    mixture: Mixture,
    weights: Tensor,
    experts: Tensor,
    activation: str,
    *,
    weigh_inputs: bool = False,
    rounds: bool = True,
) -> Tensor:
    """Return the weighted sum of each token's experts. With `rounds`, inputs of MXFP4 experts are rounded to MXFP8.

    Raises ValueError for an activation that the kernels lack.
    """
    gate_up = mixture.gate_up
    is_float8 = has_blocks(gate_up)
    if not is_float8 and not isinstance(gate_up, FusedWeight):
        return with_triton.mix(x, mixture, weights, experts, activation, weigh_inputs=weigh_inputs)
    check_activation(activation, gate_up, KERNELS)
    if weigh_inputs:
        x, weights = weighed(x, weights, KERNELS)
    if is_float8:
        return _float8(x, mixture, weights, experts)
    if in_nvfp4(gate_up):
        return _nvfp4(x, mixture, weights, experts)
    return _mxfp4(x, mixture, weights, experts, activation, rounds)


def _mxfp4(x: Tensor, mixture: Mixture, weights: Tensor, experts: Tensor, activation: str, rounds: bool) -> Tensor:
    limits, (wide, size) = mixture.gate_up.parts[2], (mixture.down.parts[0].shape[1], x.shape[1])  # type: ignore[attr-defined]
    rows, row_scales = x.as_subclass(Tensor).contiguous(), None
    if rounds:
        rows, row_scales = import_module("flashinfer").mxfp8_quantize(rows, False, alignment=wide)
        row_scales = row_scales.view(torch.float8_e4m3fn).reshape(len(x), -1)
    elif wide > size:
        rows = F.pad(rows, (0, wide - size))
    slopes = limits if activation == "clamped_swiglu" else (None, None, None)
    return _fp4(rows, row_scales, mixture, weights, experts, size, slopes)


def _nvfp4(x: Tensor, mixture: Mixture, weights: Tensor, experts: Tensor) -> Tensor:
    _, _, divisor, products = mixture.gate_up.parts  # type: ignore[attr-defined]
    down, _, inner_divisors, inner_products = mixture.down.parts  # type: ignore[attr-defined]
    rows, wide, size = x.as_subclass(Tensor).contiguous(), down.shape[1], x.shape[1]
    rows = rows if wide == size else F.pad(rows, (0, wide - size))
    numbers, row_scales = import_module("flashinfer").fp4_quantize(rows, divisor, is_sf_swizzled_layout=False)
    row_scales = row_scales.view(torch.float8_e4m3fn).reshape(len(x), -1)
    factors = (products * inner_divisors, products, inner_products)
    return _fp4(numbers, row_scales, mixture, weights, experts, size, factors=factors)


def _fp4(
    rows: Tensor,
    row_scales: Tensor | None,
    mixture: Mixture,
    weights: Tensor,
    experts: Tensor,
    size: int,
    slopes: Sequence[Tensor | None] | Tensor = (None, None, None),
    factors: Sequence[Tensor | None] = (None, None, None),
) -> Tensor:
    """Return the mixture of 4-bit experts, [T, size].

    `slopes` are the slope, the addend and the limit of `clamped_swiglu`. `factors` multiply the rows of `up`, the rows
    of the gate before the activation, and the output of the second product.
    """
    (codes, scales, *_), (down, down_scales, *_) = mixture.gate_up.parts, mixture.down.parts  # type: ignore[attr-defined]
    num_experts, wide, half = down.shape
    slope, addend, limit = slopes
    out = import_module("flashinfer.fused_moe").trtllm_fp4_block_scale_routed_moe(
        topk_ids=(experts, weights.to(torch.bfloat16)),
        hidden_states=rows,
        hidden_states_scale=row_scales,
        gemm1_weights=codes,
        gemm1_weights_scale=scales,
        gemm1_bias=mixture.gate_up_bias,
        gemm1_alpha=slope,
        gemm1_beta=addend,
        gemm1_clamp_limit=limit,
        gemm2_weights=down,
        gemm2_weights_scale=down_scales,
        gemm2_bias=mixture.down_bias,
        output1_scale_scalar=factors[0],
        output1_scale_gate_scalar=factors[1],
        output2_scale_scalar=factors[2],
        **_of_all(num_experts, experts.shape[1], 2 * half),
    )
    out = out if isinstance(out, Tensor) else out[0]
    return out if wide == size else out[:, :size].contiguous()


def _float8(x: Tensor, mixture: Mixture, weights: Tensor, experts: Tensor) -> Tensor:
    (codes, scales, *_), (down, down_scales, *_) = mixture.gate_up.parts, mixture.down.parts  # type: ignore[attr-defined]
    numbers, row_scales = round_rows(x if x.is_contiguous() else x.contiguous(), BLOCK)
    bits = weights.to(torch.bfloat16).view(torch.int16).to(torch.int32)
    num_experts, _, inner_size = down.shape
    out = import_module("flashinfer.fused_moe").trtllm_fp8_block_scale_routed_moe(
        topk_ids=(experts << 16) | (bits & 0xFFFF),
        hidden_states=numbers,
        hidden_states_scale=row_scales.t().contiguous(),
        gemm1_weights=codes,
        gemm1_weights_scale=scales,
        gemm2_weights=down,
        gemm2_weights_scale=down_scales,
        **_of_all(num_experts, experts.shape[1], inner_size),
    )
    return out if isinstance(out, Tensor) else out[0]


def _of_all(num_experts: int, top_k: int, inner_size: int) -> dict[str, Any]:
    """Return the kernels' arguments for a rank with all experts, and for routing that is already done."""
    return {
        "routing_bias": None,
        "num_experts": num_experts,
        "top_k": top_k,
        "n_group": None,
        "topk_group": None,
        "intermediate_size": inner_size,
        "local_expert_offset": 0,
        "local_num_experts": num_experts,
        "routed_scaling_factor": None,
        "routing_method_type": RENORMALIZE,
    }


def make(*, rounds: bool = True) -> dict[str, Any]:
    """Return the callables of this backend. With `rounds`, inputs of MXFP4 experts are rounded to MXFP8."""
    return {
        "route": route,
        "mix": partial(mix, rounds=rounds),
        "prepare_experts": prepare_experts,
        "prepare_grouped_experts": prepare_grouped_experts,
        "one_expert": one_expert,
    }
