"""Weights of experts in the layout of a library's fused kernels, and the steps that all such layouts share."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.activation import SWIGLU_LIMIT, SWIGLU_SLOPE
from ops.matmul.block_scaled import has_blocks
from ops.matmul.fused_weight import FusedWeight, fuse
from ops.matmul.grouped import E2M1, GroupedWeight, packed_pairs
from ops.matmul.nvfp4 import Rounded, factored, input_factor, is_nvfp4
from ops.moe import GroupedMixture, Mixture

MXFP4_GROUP = 32  # inputs per scale of MXFP4
ONE = 127  # stored exponent of the scale 1: 0 plus the bias
ACTIVATIONS = ("silu", "clamped_swiglu")  # with weights in float8 or NVFP4, only silu


class Fp4(NamedTuple):
    """E2m1 weights with one scale per group of inputs, before they are put into a library's layout."""

    codes: Tensor  # uint8 [X, O, I / 2], two per byte, the first in the lower half
    # uint8 [X, O, I / G]: exponents plus 127 (MXFP4, G = 32), or float8 numbers (e4m3; NVFP4, G = 16)
    scales: Tensor


def prepare_mxfp4(
    mixture: GroupedMixture,
    multiple: int,
    join: Callable[[Tensor, Tensor], Tensor],
    of_weight: Callable[[Fp4], tuple[Tensor, Tensor]],
    of_bias: Callable[[Tensor], Tensor] = torch.Tensor.detach,
) -> Mixture:
    """Return an MXFP4 mixture in a library's layout. Sizes are padded to a multiple of `multiple`.

    `join` joins the rows of `up` and of the gate, [X, F, ...] each, to [X, 2F, ...]. `of_weight` and `of_bias` return
    the library's layout. The first weight's third part is `clamped_swiglu`.
    """
    gate_up, down, gate_up_bias, down_bias = mixture
    num_experts, size, inner_size = down.codes.shape
    wide, inner = round_up(size, multiple), round_up(inner_size, multiple)
    gate, up = (padded(each, inner, wide) for each in halves(mxfp4(gate_up)))
    first = Fp4(*(join(*rows) for rows in zip(up, gate, strict=True)))
    if gate_up_bias is not None:
        gate_bias, up_bias = (F.pad(each, (0, inner - inner_size)) for each in gate_up_bias.detach().chunk(2, dim=1))
        gate_up_bias = of_bias(join(up_bias, gate_bias))
    limits = clamped_swiglu(num_experts, down.codes.device)
    return Mixture(
        fuse(gate_up.codes.shape, (*of_weight(first), limits)),
        fuse(down.codes.shape, of_weight(padded(mxfp4(down), wide, inner))),
        gate_up_bias,
        None if down_bias is None else of_bias(F.pad(down_bias, (0, wide - size))),
    )


class InputFactors(NamedTuple):
    """Factors by which the kernels multiply inputs and products of NVFP4 experts, float32."""

    divisor: Tensor  # [1]: 1 / the factor of the inputs of the first product, which all experts share
    products: Tensor  # [X]: of the first product: the factor of its weights times that of its inputs
    inner_divisors: Tensor  # [X]: 1 / the factor of the inputs of the second product
    inner_products: Tensor  # [X]: of the second product: likewise


def prepare_nvfp4(
    mixture: GroupedMixture,
    multiple: int,
    join: Callable[[Tensor, Tensor], Tensor],
    of_weight: Callable[[Fp4], tuple[Tensor, Tensor]],
) -> Mixture:
    """Return an NVFP4 mixture in a library's layout, as `prepare_mxfp4` does. Further parts are the `InputFactors`.

    Raises ValueError if an expert's gate and `up` weights have different factors.
    """
    gate_up, down, *_ = mixture
    _, size, inner_size = down.codes.shape
    wide, inner = round_up(size, multiple), round_up(inner_size, multiple)
    (first, factors), (second, inner_factors) = nvfp4(gate_up), nvfp4(down)
    gate, up = (padded(each, inner, wide) for each in halves(first))
    joined = Fp4(*(join(*rows) for rows in zip(up, gate, strict=True)))
    inputs, inner_inputs = of_inputs(gate_up).amax(0, keepdim=True), of_inputs(down)
    found = InputFactors(1 / inputs, factors * inputs, 1 / inner_inputs, inner_factors * inner_inputs)
    return Mixture(
        fuse(gate_up.codes.shape, (*of_weight(joined), found.divisor, found.products)),
        fuse(down.codes.shape, (*of_weight(padded(second, wide, inner)), found.inner_divisors, found.inner_products)),
    )


def of_inputs(weight: GroupedWeight) -> Tensor:
    """Return the factor of each expert's inputs, float32 [X]: the largest of its joined tensors."""
    return torch.stack([input_factor(weight.expert(number)) for number in range(len(weight.codes))])


def nvfp4(weight: GroupedWeight) -> tuple[Fp4, Tensor]:
    """Return an NVFP4 weight [X, O, I] with packed codes and float8 scales, and a factor per expert, float32 [X]."""
    experts = [factored(weight.expert(number)) for number in range(len(weight.codes))]
    found = [each for each in experts if each is not None]
    if len(found) < len(experts):
        raise ValueError(
            "FlashInfer's kernels need one factor (weight_scale_2 or weight_global_scale) for an expert's gate and up "
            "projections. Those of this checkpoint differ. Use --moe-runner-backend triton."
        )
    rounded = Rounded(*(torch.stack(parts) for parts in zip(*(each for each, _ in found), strict=True)))
    return Fp4(rounded.codes, rounded.scales.view(torch.uint8)), torch.stack([factor for _, factor in found])


def both_nvfp4(mixture: GroupedMixture) -> bool:
    """Return whether the experts are in NVFP4, have factors for their inputs, and have no biases."""
    return all(map(is_nvfp4, mixture[:2])) and mixture.gate_up_bias is None and mixture.down_bias is None


def in_nvfp4(weight: Tensor) -> bool:
    """Return whether `prepare_nvfp4` has packed this weight of experts."""
    return isinstance(weight, FusedWeight) and len(weight.parts) == 4


def is_mxfp4(weight: GroupedWeight) -> bool:
    """Return whether the weight is in MXFP4: e2m1 with a power of two per 32 inputs."""
    is_e2m1 = weight.bits == 4 and weight.table == E2M1 and weight.shifts is None
    return is_e2m1 and weight.powers and weight.group == MXFP4_GROUP


def mxfp4(weight: GroupedWeight) -> Fp4:
    """Return an MXFP4 weight [X, O, I] with packed codes and exponents."""
    codes = packed_pairs(weight.codes)
    exponents = (weight.scales.float().contiguous().view(torch.int32) >> 23).to(torch.uint8)
    return Fp4(codes, exponents)


def padded(weight: Fp4, num_rows: int, num_inputs: int) -> Fp4:
    """Return the weight, padded with zeros to `num_rows` rows and `num_inputs` inputs."""
    rows, half = num_rows - weight.codes.shape[1], weight.codes.shape[2]
    codes = F.pad(weight.codes, (0, num_inputs // 2 - half, 0, rows))
    group = 2 * half // weight.scales.shape[2]
    more, value = num_inputs // group - weight.scales.shape[2], ONE if group == MXFP4_GROUP else 0
    return Fp4(codes, F.pad(weight.scales, (0, more, 0, rows), value=value))


def halves(gate_up: Fp4) -> tuple[Fp4, Fp4]:
    """Split a weight into those of the gate (the first half of the rows) and of `up`."""
    gate, up = (Fp4(*parts) for parts in zip(*(each.chunk(2, dim=1) for each in gate_up), strict=True))
    return gate, up


def clamped_swiglu(num_experts: int, device: torch.device) -> Tensor:
    """Return the slope, the addend and the limit of gpt-oss's activation for each expert, float32 [3, X].

    The kernels compute min(g, limit) * sigmoid(slope * min(g, limit)) * (clamp(u, -limit, limit) + addend).
    """
    values = torch.tensor((SWIGLU_SLOPE, 1.0, SWIGLU_LIMIT), dtype=torch.float32, device=device)
    return values.unsqueeze(1).repeat(1, num_experts)


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple that is at least `size`."""
    return -(-size // multiple) * multiple


def check_activation(activation: str, gate_up: Tensor, kernels: str) -> None:
    """Raise ValueError if the kernels do not compute this activation after a product with `gate_up`."""
    if activation not in ACTIVATIONS or (activation != "silu" and (has_blocks(gate_up) or in_nvfp4(gate_up))):
        raise ValueError(f"{kernels} do not compute experts with {activation}. Use --moe-runner-backend triton.")


def weighed(x: Tensor, weights: Tensor, kernels: str) -> tuple[Tensor, Tensor]:
    """Return the weighted inputs [T, E], rounded, and weights [T, 1] of 1.

    Raises ValueError unless each token has one expert.
    """
    if weights.shape[1] > 1:
        raise ValueError(f"{kernels} cannot weigh the inputs of several experts. Use triton.")
    return (x * weights).to(x.dtype), torch.ones_like(weights)
