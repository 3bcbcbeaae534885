"""NVFP4: e2m1 numbers with a float8 scale per 16 inputs and one float32 factor per tensor, for weights and inputs.

A checkpoint may have a factor for the inputs of a weight, measured on calibration data. Kernels for Blackwell then
round the inputs too: each group of 16 inputs of a row gets the scale e4m3(largest magnitude / 6 / factor), and its
numbers become e2m1(input / (scale * factor)), both to nearest even. Groups whose magnitudes exceed 6 * 448 * factor are
clipped. This file has these steps in torch. Sources: NVIDIA's Model Optimizer, `export/quant_utils.py`; FlashInfer's
`nv_internal/tensorrt_llm/kernels/quantization_utils.cuh`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.matmul.fused_weight import FusedWeight
from ops.matmul.grouped import E2M1, GroupedWeight, factor_scales, nibbles, packed_pairs

GROUP = 16  # inputs per scale
LARGEST, LARGEST_SCALE = 6.0, 448.0  # largest numbers of e2m1 and e4m3
# A magnitude halfway between two numbers of e2m1 is rounded to the number with the even code: down at the first four
# values, up at the other three.
DOWN, UP = (0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5)
SCALE_ROWS, SCALE_COLUMNS = 128, 4  # size of the tiles in which kernels for Blackwell read scales


class Rounded(NamedTuple):
    """Rows in NVFP4, without their factor."""

    codes: Tensor  # uint8 [..., I / 2], two per byte, the first in the lower half
    scales: Tensor  # e4m3 [..., I / 16]

    def dequantised(self) -> Tensor:
        """Return the rows divided by their factor, float32 [..., I]."""
        numbers = torch.tensor(E2M1, device=self.codes.device)
        return numbers[nibbles(self.codes).int()] * self.scales.float().repeat_interleave(GROUP, dim=-1)


def is_nvfp4(weight: GroupedWeight) -> bool:
    """Return whether the weight is in NVFP4 and has factors for its inputs."""
    is_e2m1 = weight.bits == 4 and weight.table == E2M1 and weight.shifts is None and not weight.powers
    return is_e2m1 and weight.group == GROUP and weight.input_scales is not None


def factored(weight: GroupedWeight) -> tuple[Rounded, Tensor] | None:
    """Return the codes and scales of a weight [O, I] in NVFP4, and its factor (float32, scalar).

    Returns None if no single factor represents all scales, for example if the weight joins several tensors of a
    checkpoint with different factors.
    """
    found = factor_scales(weight.scales.reshape(1, -1))
    if found is None:
        return None
    scales, factors = found
    return Rounded(packed_pairs(weight.codes), scales.view(weight.scales.shape)), factors[0]


def round_rows(x: Tensor, factor: Tensor | float) -> Rounded:
    """Round rows [..., I] with this factor, as the kernels do."""
    grouped = x.float().unflatten(-1, (-1, GROUP))
    largest = grouped.abs().amax(-1)
    scales = (largest / (LARGEST * factor)).clamp(max=LARGEST_SCALE).to(torch.float8_e4m3fn)
    divisors = scales.float() * factor
    numbers = torch.where(divisors.unsqueeze(-1) > 0, grouped / divisors.unsqueeze(-1), 0.0).flatten(-2)
    return Rounded(packed_pairs(to_e2m1(numbers)), scales)


def to_e2m1(numbers: Tensor) -> Tensor:
    """Return the codes (uint8) of the nearest numbers of e2m1. Larger magnitudes than 6 become 6."""
    magnitudes, device = numbers.abs().contiguous(), numbers.device
    codes = torch.bucketize(magnitudes, torch.tensor(DOWN, device=device))
    codes += torch.bucketize(magnitudes, torch.tensor(UP, device=device), right=True)
    return (codes + 8 * numbers.signbit()).to(torch.uint8)


def linear(x: Tensor, weight: GroupedWeight, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias with rounded rows of x: the reference for products of kernels for Blackwell.

    Products are in float32, and the output has the dtype of x.
    """
    factor = input_factor(weight)
    rows = round_rows(x, factor).dequantised() * factor
    return F.linear(rows, weight.dequantised(), None if bias is None else bias.float()).to(x.dtype)


def input_factor(weight: GroupedWeight) -> Tensor:
    """Return the factor for the weight's inputs: the largest of the tensors that it joins (float32, scalar)."""
    if weight.input_scales is None:
        raise ValueError("The weight has no scales of its inputs.")
    return weight.input_scales.amax()


def exact_input(weight: Tensor) -> Tensor | float:
    """Return a positive input that a product with this prepared weight does not round if the other inputs are 0.

    For a weight that `with_fp4` packed, this is 6 times the factor of its inputs: the scale becomes 1 and the code 6.
    """
    return LARGEST / weight.parts[2] if isinstance(weight, FusedWeight) else 1.0


def tiled(scales: Tensor) -> Tensor:
    """Return scales [..., R, G] in the order in which kernels for Blackwell read them. Sizes are padded with zeros.

    Tiles of 128 rows and 4 columns follow each other; in a tile, the rows r, r + 32, r + 64 and r + 96 are adjacent.
    """
    rows, columns = scales.shape[-2:]
    zeros = (0, -columns % SCALE_COLUMNS, 0, -rows % SCALE_ROWS)
    padded = F.pad(scales.view(torch.uint8), zeros)
    tiles = padded.unflatten(-1, (-1, SCALE_COLUMNS)).unflatten(-3, (-1, 4, SCALE_ROWS // 4))  # [..., r, 4, 32, c, 4]
    order = tiles.movedim(-2, -4).transpose(-3, -2)  # [..., r, c, 32, 4, 4]
    return order.reshape(padded.shape).view(scales.dtype)
