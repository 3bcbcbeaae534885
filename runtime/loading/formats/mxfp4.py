"""MXFP4 of gpt-oss: experts in e2m1 with one exponent per 32 inputs.

    NAME_blocks uint8 [X, O, I / 32, 16]   two per byte, the lower half first
    NAME_scales uint8 [X, O, I / 32]       e8m0

NAME is PREFIX.gate_up_proj, whose rows are of gate and up in turn, or PREFIX.down_proj. The model's tensors are
PREFIX.0.gate_proj.weight and so on, [O, I] for each expert, and their biases. Another NAME is a tensor [X, I, O] or
[I, O], with inputs first as in unquantised checkpoints. Source: the OCP Microscaling Formats specification 1.0,
gpt-oss' reference implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ops.matmul.grouped import E2M1, GroupedWeight, GroupForm, nibbles, packed_pairs
from ops.matmul.nvfp4 import LARGEST, to_e2m1
from runtime.config.fields import Fields
from runtime.errors import CheckpointError
from runtime.loading.formats.bits import look_up, power_of_two
from runtime.loading.formats.stored import Derived, Read, Stored, require
from runtime.loading.tensors import Cut

# Maps the last part of NAME to each projection in it and the rows of this projection.
PROJECTIONS = {
    "gate_up_proj": {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)},
    "down_proj": {"down_proj": slice(None)},
}
BIAS, SMALLEST_EXPONENT, LARGEST_EXPONENT = 127, -127, 127  # of stored exponents
FORM = GroupForm(32, table=E2M1, shifted=False, powers=True)


def derive(stored: Stored, fields: Fields) -> Derived:
    """Return how the model's tensors are computed from the stored tensors (see `runtime.loading.formats`)."""
    derived = Derived()
    for name in stored.shapes:
        if name.endswith("_blocks"):
            _add(derived, stored, name.removesuffix("_blocks"))
    return derived


def rounded(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Round a tensor of all experts, as trainers send it, to the two tensors of the format: NAME_blocks, NAME_scales.

    `tensor` is NAME.gate_up_proj or NAME.down_proj, [X, I, O]. A group's exponent is the smallest one with which no
    number exceeds 6, and numbers are rounded to the nearest, halves to even. Numbers that are in MXFP4 already keep
    their values. Other tensors are returned unchanged. Raises CheckpointError for values that are not finite.
    """
    is_experts = name.endswith(tuple(f".experts.{last}" for last in PROJECTIONS))
    if not is_experts or not tensor.is_floating_point() or tensor.dim() != 3 or tensor.shape[1] % FORM.group:
        return {name: tensor}
    experts = [_rounded_expert(name, each) for each in tensor]
    blocks, scales = (torch.stack(parts) for parts in zip(*experts, strict=True))
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def _rounded_expert(name: str, tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return blocks [O, I / 32, 16] and scales [O, I / 32] of one expert's tensor [I, O]."""
    groups = tensor.t().float().unflatten(1, (-1, FORM.group))
    largest = groups.abs().amax(-1)
    if not bool(largest.isfinite().all()):
        raise CheckpointError(f"{name} has values that are not finite.")
    mantissas, exponents = torch.frexp(largest / LARGEST)
    exponents = (exponents - (mantissas == 0.5).int()).clamp(SMALLEST_EXPONENT, LARGEST_EXPONENT)
    codes = to_e2m1(torch.ldexp(groups, -exponents.unsqueeze(-1)))
    return packed_pairs(codes), (exponents + BIAS).to(torch.uint8)


def _add(derived: Derived, stored: Stored, name: str) -> None:
    blocks, scales, bias = f"{name}_blocks", f"{name}_scales", f"{name}_bias"
    require(stored, scales)
    *outer, groups, half = stored.shapes[blocks]
    if (*outer, groups) != stored.shapes[scales] or len(outer) not in (1, 2):
        raise CheckpointError(f"{blocks} and {scales} do not match.")
    prefix, _, last = name.rpartition(".")
    projections = PROJECTIONS.get(last, {})
    if not projections or len(outer) == 1 or 2 * half != FORM.group or outer[1] % len(projections):
        derived.add(name, (*outer[:-1], groups * half * 2, outer[-1]), [blocks, scales], _whole(blocks, scales))
        return
    num_experts, out_size = outer[0], outer[1] // len(projections)
    for projection, rows in projections.items():
        for expert in range(num_experts):
            ours, cut = f"{prefix}.{expert}.{projection}", (slice(expert, expert + 1), rows)
            make, make_grouped = _expert(blocks, scales, cut)
            derived.add(f"{ours}.weight", (out_size, groups * 2 * half), [blocks, scales], make, make_grouped, FORM)
            if bias in stored.shapes:
                derived.add(f"{ours}.bias", (out_size,), [bias], partial(_bias, bias, cut))


def _whole(blocks: str, scales: str) -> Callable[[Read], Tensor]:
    """Return a function that computes a tensor with the inputs first."""

    def make(read: Read) -> Tensor:
        numbers = look_up(nibbles(read(blocks)), E2M1)  # [X, O, G, 32]
        return (numbers * power_of_two(read(scales)).unsqueeze(-1)).flatten(-2).transpose(-1, -2)

    return make


def _expert(
    blocks: str, scales: str, cut: Cut
) -> tuple[Callable[[Read], Tensor], Callable[[Read, slice], GroupedWeight]]:
    """Return the functions `make` and `make_grouped` of one expert's projection (see `DerivedTensor`)."""

    def make_grouped(read: Read, rows: slice) -> GroupedWeight:
        codes, exponents = (read(name, cut)[0][rows] for name in (blocks, scales))
        return GroupedWeight(nibbles(codes).flatten(1), power_of_two(exponents), table=E2M1, powers=True)

    return lambda read: make_grouped(read, slice(None)).dequantised(), make_grouped


def _bias(name: str, cut: Cut, read: Read) -> Tensor:
    return read(name, cut)[0].float()
