"""Mixtures of experts with FlashInfer's fused CUTLASS kernels: sort, two grouped products, activation and sum.

Written for flashinfer-python 0.6.13. The kernels compute experts in float16 and bfloat16, and on Hopper in float8 with
one scale per block of 128 x 128 numbers. In their weights, the rows of `up` come before the rows of the gate. Triton
kernels compute the routing, and unquantised mixtures in other dtypes.
"""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from ops.matmul.block_scaled import BLOCK, block_scales, has_blocks
from ops.matmul.grouped import GroupedWeight
from ops.matmul.with_triton import Parts, pack
from ops.moe import GroupedMixture, Mixture, with_triton
from ops.moe.with_triton import route

__all__ = ["mix", "one_expert", "prepare_experts", "prepare_grouped_experts", "route"]

ALIGNMENT = 8  # the kernels read 16 bytes at a time


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
    bias = None if gate_up_bias is None else _swapped(gate_up_bias.detach()).as_subclass(UpFirst)
    return Mixture(_swapped(gate_up.detach()).as_subclass(UpFirst), down, bias, down_bias)


def prepare_grouped_experts(mixture: GroupedMixture, dtype: torch.dtype) -> Mixture:
    """Return packed float8 weights with `up` before the gate (see `ops.moe`).

    Raises ValueError for weights that the kernels do not read.
    """
    gate_up, down, *biases = mixture
    rows = gate_up.codes.shape[1] // 2
    swapped = gate_up._replace(codes=_swapped(gate_up.codes), scales=_swapped(gate_up.scales))
    up_first, packed = _pack(swapped), _pack(down)
    is_divided = rows % BLOCK != 0  # one block has rows of `up` and of the gate
    is_biased = any(bias is not None for bias in biases)
    if up_first is None or packed is None or is_divided or is_biased or dtype != torch.bfloat16:
        raise ValueError(
            f"flashinfer_cutlass reads quantised experts only in float8 with one scale per block of {BLOCK} x {BLOCK} "
            f"numbers, for bfloat16, without biases, and with inner sizes on each rank that are multiples of {BLOCK}. "
            "Use --moe-runner-backend triton."
        )
    return Mixture(up_first, packed)


def one_expert(mixture: Mixture, expert: int, size: int, inner_size: int) -> Mixture:
    """Return the weights of one expert, with the gate before `up` (see `ops.moe`)."""
    gate_up, down, gate_up_bias, down_bias = mixture
    if isinstance(gate_up, UpFirst):
        one = slice(expert, expert + 1)
        mixture, expert = (
            Mixture(
                _swapped(gate_up[one].as_subclass(Tensor)),
                down[one],
                None if gate_up_bias is None else _swapped(gate_up_bias[one].as_subclass(Tensor)),
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
    if not isinstance(gate_up, UpFirst) and not has_blocks(gate_up):
        return with_triton.mix(x, mixture, weights, experts, activation, weigh_inputs=weigh_inputs)
    if activation != "silu":
        raise ValueError(
            f"flashinfer_cutlass computes experts with silu, not with {activation}. Use --moe-runner-backend triton."
        )
    if weigh_inputs:
        if experts.shape[1] > 1:
            raise ValueError("flashinfer_cutlass cannot weigh the inputs of several experts. Use triton.")
        x, weights = (x * weights).to(x.dtype), torch.ones_like(weights)
    run, quant_scales = import_module("flashinfer.fused_moe").cutlass_fused_moe, None
    if is_float8 := has_blocks(gate_up):
        (gate_up, up_scales, _), (down, down_scales, _) = gate_up.parts, down.parts  # type: ignore[attr-defined]
        quant_scales = [up_scales, down_scales]
    return run(
        input=x.as_subclass(Tensor).contiguous(),
        token_selected_experts=experts,
        token_final_scales=weights,
        fc1_expert_weights=gate_up.as_subclass(Tensor),
        fc2_expert_weights=down,
        output_dtype=x.dtype,
        quant_scales=quant_scales,
        use_deepseek_fp8_block_scale=is_float8,
        fc1_expert_biases=None if gate_up_bias is None else gate_up_bias.as_subclass(Tensor),
        fc2_expert_biases=down_bias,
        output=torch.empty_like(x, memory_format=torch.contiguous_format),
    )


def _pack(weight: GroupedWeight) -> Tensor | None:
    """Return packed float8 weights with one scale per block, or None for other weights."""
    scales = block_scales(weight)
    if scales is None or weight.codes.shape[1] % BLOCK:
        return None
    return pack(Parts(weight.codes.view(torch.float8_e4m3fn), scales))


def _swapped(rows: Tensor) -> Tensor:
    """Return rows [X, 2F, ...] with the second half first."""
    return torch.cat(rows.chunk(2, dim=1)[::-1], dim=1)
