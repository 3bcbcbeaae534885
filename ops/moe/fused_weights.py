"""Weights of experts in the layout of a library's fused kernels, and the steps that all such layouts share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.activation import SWIGLU_LIMIT, SWIGLU_SLOPE
from ops.matmul.grouped import E2M1, GroupedWeight

ALIGNMENT = 256  # alignment of each part in memory, in bytes
MXFP4_GROUP = 32  # inputs per scale of MXFP4
ONE = 127  # stored exponent of the scale 1: 0 plus the bias


class FusedWeight(Tensor):
    """A weight [X, O, I] of all experts. The tensor has strides of 0; the data is in `parts`.

    The shape is that of the checkpoint's weight. Parts may be padded.
    """

    parts: tuple[Tensor, ...]

    def detach(self) -> Self:
        """Return a detached tensor with the same parts. `Parameter` calls this method."""
        return _view(self.shape, self.parts)

    @property
    def nbytes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Bytes of the weight's memory."""
        return self.untyped_storage().nbytes()


class Fp4(NamedTuple):
    """E2m1 weights with one scale per group of inputs, before they are put into a library's layout."""

    codes: Tensor  # uint8 [X, O, I / 2], two per byte, the first in the lower half
    scales: Tensor  # uint8 [X, O, I / G]: exponents plus 127 (MXFP4)


def fuse(shape: Sequence[int], parts: Sequence[Tensor]) -> Any:
    """Return a weight of this shape. The parts are copied into one block of memory, which new weights can overwrite."""
    sizes = [-(-part.nbytes // ALIGNMENT) * ALIGNMENT for part in parts]
    memory, first, views = torch.empty(sum(sizes), dtype=torch.uint8, device=parts[0].device), 0, []
    for part, size in zip(parts, sizes, strict=True):
        views.append(memory[first : first + part.nbytes].view(part.dtype).view(part.shape).copy_(part))
        first += size
    return _view(shape, tuple(views))


def _view(shape: Sequence[int], parts: tuple[Tensor, ...]) -> Any:
    weight = parts[0].view(torch.uint8).as_strided(tuple(shape), (0,) * len(shape)).as_subclass(FusedWeight)
    weight.parts = parts
    return weight


def is_mxfp4(weight: GroupedWeight) -> bool:
    """Return whether the weight is in MXFP4: e2m1 with a power of two per 32 inputs."""
    is_e2m1 = weight.bits == 4 and weight.table == E2M1 and weight.shifts is None
    return is_e2m1 and weight.powers and weight.group == MXFP4_GROUP


def mxfp4(weight: GroupedWeight) -> Fp4:
    """Return an MXFP4 weight [X, O, I] with packed codes and exponents."""
    codes = weight.codes[..., ::2] | (weight.codes[..., 1::2] << 4)
    exponents = (weight.scales.float().contiguous().view(torch.int32) >> 23).to(torch.uint8)
    return Fp4(codes, exponents)


def padded(weight: Fp4, num_rows: int, num_inputs: int) -> Fp4:
    """Return the MXFP4 weight, padded with zeros to `num_rows` rows and `num_inputs` inputs."""
    rows = num_rows - weight.codes.shape[1]
    codes = F.pad(weight.codes, (0, num_inputs // 2 - weight.codes.shape[2], 0, rows))
    groups = num_inputs // MXFP4_GROUP - weight.scales.shape[2]
    return Fp4(codes, F.pad(weight.scales, (0, groups, 0, rows), value=ONE))


def halves(gate_up: Fp4) -> tuple[Fp4, Fp4]:
    """Split a weight into those of the gate (the first half of the rows) and of `up`."""
    gate, up = (Fp4(*parts) for parts in zip(*(each.chunk(2, dim=1) for each in gate_up), strict=True))
    return gate, up


def padded_bias(bias: Tensor | None, num_rows: int) -> Tensor | None:
    """Return a bias [X, O] with zeros added up to `num_rows` outputs."""
    return None if bias is None else F.pad(bias, (0, num_rows - bias.shape[1]))


def clamped_swiglu(num_experts: int, device: torch.device) -> Tensor:
    """Return the slope, the addend and the limit of gpt-oss's activation for each expert, float32 [3, X].

    The kernels compute min(g, limit) * sigmoid(slope * min(g, limit)) * (clamp(u, -limit, limit) + addend).
    """
    values = torch.tensor((SWIGLU_SLOPE, 1.0, SWIGLU_LIMIT), dtype=torch.float32, device=device)
    return values.unsqueeze(1).repeat(1, num_experts)


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple that is at least `size`."""
    return -(-size // multiple) * multiple
