"""Weights of experts in the layout of a library's fused kernels, and the steps that all such layouts share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.activation import SWIGLU_LIMIT, SWIGLU_SLOPE
from ops.matmul.block_scaled import has_blocks
from ops.matmul.grouped import E2M1, GroupedWeight
from ops.moe import GroupedMixture, Mixture

ALIGNMENT = 256  # alignment of each part in memory, in bytes
MXFP4_GROUP = 32  # inputs per scale of MXFP4
ONE = 127  # stored exponent of the scale 1: 0 plus the bias
ACTIVATIONS = ("silu", "clamped_swiglu")  # with float8 weights only the first


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
    if activation not in ACTIVATIONS or (activation != "silu" and has_blocks(gate_up)):
        raise ValueError(f"{kernels} do not compute experts with {activation}. Use --moe-runner-backend triton.")


def weighed(x: Tensor, weights: Tensor, kernels: str) -> tuple[Tensor, Tensor]:
    """Return the weighted inputs [T, E], rounded, and weights [T, 1] of 1.

    Raises ValueError unless each token has one expert.
    """
    if weights.shape[1] > 1:
        raise ValueError(f"{kernels} cannot weigh the inputs of several experts. Use triton.")
    return (x * weights).to(x.dtype), torch.ones_like(weights)
