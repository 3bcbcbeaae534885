"""torchao's checkpoints, written through transformers: several tensors per quantised parameter.

    LAYER._NAME_qdata       parameter LAYER.NAME: int8 or float8 [..., O, I]; or int8 [..., O, I / 2], two signed 4-bit
                            numbers per byte, low half first
    LAYER._NAME_scale       float [..., O, 1], [1, 1] or [O, G]; for 4 bits [..., G, O]
    LAYER._NAME_zero_point  integers of the scale's shape, or missing; for 4 bits floats [..., G, O]

weight = (q - zero) * scale; for 4 bits q * scale + zero. Other tensors concern activations, except `act_pre_scale`, a
factor of the weight's columns. A parameter may hold all experts of a layer. Source: torchao's tensor subclasses and
flatten_tensor_state_dict.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from ops.matmul.grouped import GroupedWeight, GroupForm, nibbles
from runtime.config.fields import Fields
from runtime.errors import CheckpointError
from runtime.loading.formats.bits import spread
from runtime.loading.formats.stored import Derived, Read, Stored, require

DATA = re.compile(r"(.+)\._(\w+)_qdata")
ACTIVATION_PARTS = re.compile(r".+\._\w+_(act_quant_scale|act_quant_zero_point|act_per_tensor_scale)")
WIDE = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
KERNEL_PARTS = ("scale_and_zero", "per_tensor_scale")  # parts of layouts that are not supported


def derive(stored: Stored, fields: Fields) -> Derived:
    """Return how the model's tensors are computed from the stored tensors (see `runtime.loading.formats`)."""
    derived, dtypes = Derived(), stored.dtypes
    for name in dtypes:
        if match := DATA.fullmatch(name):
            _add(derived, stored, dtypes, f"{match[1]}.{match[2]}", f"{match[1]}._{match[2]}")
        elif ACTIVATION_PARTS.fullmatch(name):
            derived.used.add(name)
    return derived


def _add(derived: Derived, stored: Stored, dtypes: Mapping[str, torch.dtype], name: str, prefix: str) -> None:
    data, scale, zero, before = (f"{prefix}_{part}" for part in ("qdata", "scale", "zero_point", "act_pre_scale"))
    shape, dtype = stored.shapes[data], dtypes[data]
    foreign = any(f"{prefix}_{part}" in dtypes for part in KERNEL_PARTS)
    if foreign or dtype not in WIDE or len(shape) not in (2, 3) or dtypes.get(scale) == torch.float8_e8m0fnu:
        raise CheckpointError(
            f"{data} ({dtype}, {len(shape)} dimensions) is packed for a GPU kernel or in a microscaling format, which "
            "is not supported. Have torchao write int8, float8, or 4 bits with the packing format PLAIN."
        )
    require(stored, scale)
    of_4_bits = zero in dtypes and dtypes[zero].is_floating_point and stored.shapes[scale][-1] == shape[-2]
    scaled_before = before in dtypes

    def whole(read: Read) -> Tensor:
        if of_4_bits:
            scales, shifts = (read(each).float().mT for each in (scale, zero))
            codes = (nibbles(read(data).view(torch.uint8)) ^ 8).float() - 8
            return codes * spread(scales, codes.shape) + spread(shifts, codes.shape)
        numbers = read(data).float()
        if zero in dtypes:
            numbers = numbers - spread(read(zero).float(), shape)
        return numbers * spread(read(scale).float(), shape)

    def grouped(read: Read, rows: slice) -> GroupedWeight:
        codes = nibbles(read(data).view(torch.uint8)) ^ 8
        return GroupedWeight(codes, read(scale).float().T, read(zero).float().T).rows(rows)

    def make(read: Read) -> Tensor:
        return whole(read) * read(before).float() if scaled_before else whole(read)

    for part in () if of_4_bits else (scale, *([zero] if zero in dtypes else [])):
        _check_grid(shape, stored.shapes[part], f"{data} and {part} do not match.")
    used = [data, scale, *(each for each in (zero, before) if each in dtypes)]
    if not of_4_bits:
        derived.add(name, shape, used, make)
        return
    *outer, groups, out_size = stored.shapes[scale]
    in_size = 2 * shape[-1]
    if (*outer, out_size) != shape[:-1] or stored.shapes[zero] != stored.shapes[scale] or in_size % groups:
        raise CheckpointError(f"{data} and {scale} do not match.")
    kept = (None, None) if scaled_before or outer else (grouped, GroupForm(in_size // groups))
    derived.add(name, (*shape[:-1], in_size), used, make, *kept)


def _check_grid(shape: tuple[int, ...], grid: tuple[int, ...], message: str) -> None:
    """Raise CheckpointError unless scales are per tensor, per row, per group of a row, or per block of 128."""
    *outer, out_size, in_size = shape
    *outer_too, rows, columns = (*grid, 0, 0) if len(grid) < 2 else grid
    of_groups = rows in (1, out_size) and columns and in_size % columns == 0
    in_eights = columns == 1 or not of_groups or in_size // columns % 8 == 0
    blocks = (rows, columns) == (-(-out_size // 128), -(-in_size // 128))
    if len(outer) != len(outer_too) or not (blocks or (of_groups and in_eights)):
        raise CheckpointError(message)
