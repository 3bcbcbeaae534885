"""Mixtures of experts with FlashInfer's fused CUTLASS kernels: sort, two grouped products, activation and sum.

Written for flashinfer-python 0.6.13 and 0.7.2. The kernels compute experts in float16 and bfloat16. On Hopper, they
also compute experts in MXFP4 (with inputs in bfloat16), and in float8 with one scale per block of 128 x 128 numbers. On
Blackwell, they also compute experts in NVFP4, and round the inputs of both products to NVFP4. In their weights, the
rows of `up` come before the rows of the gate. Triton kernels compute the routing, and unquantised mixtures in other
dtypes.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.matmul.block_scaled import BLOCK, has_blocks
from ops.matmul.fused_weight import FusedWeight
from ops.matmul.nvfp4 import tiled
from ops.moe import GroupedMixture, Mixture, with_triton
from ops.moe.fused_weights import (
    Fp4,
    both_nvfp4,
    check_activation,
    clamped_swiglu,
    in_nvfp4,
    is_mxfp4,
    prepare_mxfp4,
    prepare_nvfp4,
    weighed,
)
from ops.moe.up_first import pack_blocks, swapped
from ops.moe.with_triton import route

__all__ = ["mix", "one_expert", "prepare_experts", "prepare_grouped_experts", "route"]

ALIGNMENT = 8  # the kernels read 16 bytes at a time
FP4_MULTIPLE = 128  # sizes of MXFP4 and NVFP4 experts are padded to a multiple of this
KERNELS = "FlashInfer's CUTLASS kernels"


class UpFirst(Tensor):
    """Weights [X, 2F, E] or biases [X, 2F] whose first F rows belong to `up`, and the other rows to the gate."""


def prepare_experts(mixture: Mixture, *, bits: int | None = None) -> Mixture:
    """Return the weights with `up` before the gate, or `mixture` itself if Triton must compute it (see `ops.moe`).

    Raises ValueError for sizes that the kernels do not read.
    """
    gate_up, down, gate_up_bias, down_bias = mixture
    if bits is not None or gate_up.dtype not in (torch.float16, torch.bfloat16):
        return mixture
    if any(size % ALIGNMENT for size in down.shape[1:]):
        raise ValueError(
            f"flashinfer_cutlass needs sizes of experts that are multiples of {ALIGNMENT}, not {down.shape[1]} and "
            f"{down.shape[2]}. Use --moe-runner-backend triton."
        )
    bias = None if gate_up_bias is None else swapped(gate_up_bias.detach()).as_subclass(UpFirst)
    return Mixture(swapped(gate_up.detach()).as_subclass(UpFirst), down, bias, down_bias)


def prepare_grouped_experts(mixture: GroupedMixture, dtype: torch.dtype) -> Mixture:
    """Return packed weights with `up` before the gate (see `ops.moe`).

    Raises ValueError for weights that the kernels do not read.
    """
    gate_up, down, *biases = mixture
    if dtype == torch.bfloat16 and is_mxfp4(gate_up) and is_mxfp4(down):
        return prepare_mxfp4(mixture, FP4_MULTIPLE, _up_first, _interleaved)
    if dtype == torch.bfloat16 and both_nvfp4(mixture):
        return prepare_nvfp4(mixture, FP4_MULTIPLE, _up_first, _tiled)
    packed = pack_blocks(gate_up, down)
    if packed is None or any(bias is not None for bias in biases) or dtype != torch.bfloat16:
        raise ValueError(
            "FlashInfer's CUTLASS kernels read quantised experts only in MXFP4, in NVFP4 with scales of the inputs and "
            f"without biases, or in float8 with one scale per block of {BLOCK} x {BLOCK} numbers without biases and "
            f"with inner sizes on each rank that are multiples of {BLOCK}, for bfloat16. Use --moe-runner-backend "
            "triton."
        )
    return packed


def _up_first(up: Tensor, gate: Tensor) -> Tensor:
    return torch.cat((up, gate), dim=1)


def _interleaved(weight: Fp4) -> tuple[Tensor, Tensor]:
    """Return codes and scales in the installed FlashInfer's layout for mixed-input products on Hopper."""
    library = import_module("flashinfer.fused_moe")
    codes = library.interleave_moe_weights_for_sm90_mixed_gemm(weight.codes.contiguous(), "fp4")
    scales = library.interleave_moe_scales_for_sm90_mixed_gemm(weight.scales.contiguous())
    return codes, scales.view(torch.int32)


def _tiled(weight: Fp4) -> tuple[Tensor, Tensor]:
    """Return codes and scales in the layout for products on Blackwell. The sizes are multiples of the tiles' sizes."""
    return weight.codes, tiled(weight.scales)


def one_expert(mixture: Mixture, expert: int, size: int, inner_size: int) -> Mixture:
    """Return the weights of one expert, with the gate before `up` (see `ops.moe`)."""
    gate_up, down, gate_up_bias, down_bias = mixture
    if isinstance(gate_up, FusedWeight):
        raise ValueError("Experts in the layout of FlashInfer's kernels are not readable one by one.")
    if isinstance(gate_up, UpFirst):
        one = slice(expert, expert + 1)
        mixture, expert = (
            Mixture(
                swapped(gate_up[one].as_subclass(Tensor)),
                down[one],
                None if gate_up_bias is None else swapped(gate_up_bias[one].as_subclass(Tensor)),
                None if down_bias is None else down_bias[one],
            ),
            0,
        )
    return with_triton.one_expert(mixture, expert, size, inner_size)


def mix(
    x: Tensor,
    mixture: Mixture,
    weights: Tensor,
    experts: Tensor,
    activation: str,
    *,
    weigh_inputs: bool = False,
) -> Tensor:
    """Return the weighted sum of each token's experts. Raise ValueError for an activation that the kernels lack."""
    gate_up, down, gate_up_bias, down_bias = mixture
    if not isinstance(gate_up, UpFirst | FusedWeight) and not has_blocks(gate_up):
        return with_triton.mix(x, mixture, weights, experts, activation, weigh_inputs=weigh_inputs)
    check_activation(activation, gate_up, KERNELS)
    if weigh_inputs:
        x, weights = weighed(x, weights, KERNELS)
    first, second, options = _operands(mixture)
    if activation == "clamped_swiglu":
        names = ("swiglu_alpha", "swiglu_beta", "swiglu_limit")
        limits = gate_up.parts[2] if isinstance(gate_up, FusedWeight) else clamped_swiglu(len(down), x.device)
        options |= dict(zip(names, limits, strict=True))
    size, wide, rows = x.shape[1], second.shape[1], x.as_subclass(Tensor).contiguous()
    rows = rows if wide == size else F.pad(rows, (0, wide - size))
    out = import_module("flashinfer.fused_moe").cutlass_fused_moe(
        input=rows,
        token_selected_experts=experts,
        token_final_scales=weights,
        fc1_expert_weights=first,
        fc2_expert_weights=second,
        output_dtype=x.dtype,
        fc1_expert_biases=None if gate_up_bias is None else gate_up_bias.as_subclass(Tensor),
        fc2_expert_biases=down_bias,
        output=torch.empty_like(rows),
        **options,
    )
    return out if wide == size else out[:, :size].contiguous()


def _operands(mixture: Mixture) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return (weights of the first product, of the second product, further arguments) of a prepared mixture."""
    gate_up, down = mixture.gate_up, mixture.down
    if in_nvfp4(gate_up):
        (codes, scales, *factors), (down_codes, down_scales, *others) = gate_up.parts, down.parts  # type: ignore[attr-defined]
        (divisor, products), words = factors, torch.int32
        quant_scales = [divisor[0], scales.view(words), products, others[0], down_scales.view(words), others[1]]
        return codes.view(torch.int64), down_codes.view(torch.int64), {"quant_scales": quant_scales}
    if isinstance(gate_up, FusedWeight):
        (codes, scales, _), (down_codes, down_scales) = gate_up.parts, down.parts  # type: ignore[attr-defined]
        return codes, down_codes, {"quant_scales": [scales, down_scales], "use_w4_group_scaling": True}
    if has_blocks(gate_up):
        (codes, scales, *_), (down_codes, down_scales, *_) = gate_up.parts, down.parts  # type: ignore[attr-defined]
        return codes, down_codes, {"quant_scales": [scales, down_scales], "use_deepseek_fp8_block_scale": True}
    return gate_up.as_subclass(Tensor), down, {"quant_scales": None}
