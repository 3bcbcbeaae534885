"""What torchao writes through transformers: each tensor of a quantised weight under a name of its own.

    NAME._weight_qdata       int8 or float8 [O, I]; or int8 [O, I / 2], two signed numbers of 4 bits, low half first
    NAME._weight_scale       float [O, 1], [1, 1] or [O, G]; of 4 bits [G, O]
    NAME._weight_zero_point  whole numbers as the scale, or none; of 4 bits floats [G, O]

weight = (q - zero) * scale, of 4 bits q * scale + zero. What else there is concerns activations, but for
`act_pre_scale`, by which their columns are multiplied first. Source: torchao's tensor subclasses and
flatten_tensor_state_dict.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.matmul.grouped import GroupedWeight
from runtime.config.fields import Fields
from runtime.errors import CheckpointError
from runtime.models.formats.bits import nibbles, spread
from runtime.models.formats.stored import Derived, Read, Stored, require

DATA = "._weight_qdata"
WIDE = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


def derive(stored: Stored, fields: Fields) -> Derived:
    """See `runtime.models.formats`."""
    derived = Derived()
    for name in stored.shapes:
        if name.endswith(DATA):
            _add(derived, stored, name.removesuffix(DATA))
        elif "._weight_" in name:
            derived.used.add(name)
    return derived


def _add(derived: Derived, stored: Stored, layer: str) -> None:
    data, scale, zero, before = (
        f"{layer}._weight_{part}" for part in ("qdata", "scale", "zero_point", "act_pre_scale")
    )
    require(stored, scale)
    shape, dtype = stored.shapes[data], stored.dtypes[data]
    if dtype not in WIDE or len(shape) != 2:
        raise CheckpointError(
            f"{data} is {dtype} of {len(shape)} dimensions, which is packed for a GPU's kernel; have torchao write "
            "int8, float8, or 4 bits with the packing format PLAIN."
        )
    of_4_bits = zero in stored.shapes and stored.dtypes[zero].is_floating_point
    scaled_before = before in stored.shapes

    def whole(read: Read) -> Tensor:
        if of_4_bits:
            return grouped(read).dequantised()
        numbers = read(data).float()
        if zero in stored.shapes:
            numbers = numbers - spread(read(zero).float(), shape)
        return numbers * spread(read(scale).float(), shape)

    def grouped(read: Read) -> GroupedWeight:
        codes = nibbles(read(data).view(torch.uint8)) ^ 8
        return GroupedWeight(codes, read(scale).float().T.contiguous(), read(zero).float().T.contiguous())

    def make(read: Read) -> Tensor:
        return whole(read) * read(before).float() if scaled_before else whole(read)

    used = [data, scale, *(each for each in (zero, before) if each in stored.shapes)]
    if not of_4_bits:
        derived.add(f"{layer}.weight", shape, used, make)
        return
    out_size, in_size = shape[0], 2 * shape[1]
    groups = stored.shapes[scale][0]
    if (
        stored.shapes[scale] != (groups, out_size)
        or stored.shapes[zero] != (groups, out_size)
        or in_size % groups
    ):
        raise CheckpointError(f"{data} and {scale} do not fit each other.")
    kept = (None, 0) if scaled_before else (grouped, in_size // groups)
    derived.add(f"{layer}.weight", (out_size, in_size), used, make, *kept)
