"""Weights with scales beside them: fp8 (also DeepSeek's blocks), compressed-tensors, ModelOpt's fp8 and fp4.

The names and dtypes of the tensors say what they are, whatever the configuration calls the scheme:

    weight fp8 or int8 [O, I]      with weight_scale or weight_scale_inv, of the tensor, rows, groups or blocks
    weight_packed int32 [O, W]     whole numbers of 2 to 8 bits, dense, offset by half their range; weight_shape
    weight_packed uint8 [O, I / 2] e2m1, two in a byte, with a scale for each 16 (e4m3; weight_global_scale divides it)
                                   or each 32 (e8m0)
    weight uint8 [O, I / 2]        ModelOpt's e2m1, with weight_scale (e4m3) and weight_scale_2 (float32)

Static scales of activations are not needed: activations are not rounded.

Source: the compressors of compressed-tensors, ModelOpt's unified checkpoint export, DeepSeek-V3's model card.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ops.matmul.grouped import GroupedWeight
from runtime.config.fields import Fields
from runtime.errors import CheckpointError
from runtime.models.formats.bits import E2M1, look_up, nibbles, power_of_two, spread, unpack
from runtime.models.formats.stored import Derived, Read, Stored, first_of, require

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
NARROW = (*FLOAT8, torch.int8)
PACKED_FORMATS = ("marlin-24", "sparse-24-bitmask", "sparse-bitmask")  # that have other layouts

# Of activations, which are not rounded here.
_UNNEEDED = re.compile(
    r".*\.(input_scale|input_zero_point|input_global_scale|output_zero_point|activation_scale|"
    r"input_scale_ub|q_proj\.output_scale|q_scale|(q_proj|o_proj)\.q_scale|[kvq]_zero_point)"
)
# A cache's scales, under the names that tools have for them.
_CACHE_SCALE = re.compile(
    r"(.*\.)(?:(?:(k|v)_proj\.output_scale)|(?:[kv]_proj\.(k|v)_scale)|(?:attn\.(k|v)_scale))"
)


def derive(stored: Stored, fields: Fields) -> Derived:
    """See `runtime.models.formats`."""
    _check(fields)
    derived = Derived()
    blocks = fields.values.get("weight_block_size") or ()
    for name, dtype in stored.dtypes.items():
        if name.endswith("_packed"):
            weight = name.removesuffix("_packed")
            (_add_whole_numbers if dtype == torch.int32 else _add_floats4)(derived, stored, weight, blocks)
        elif dtype == torch.uint8 and f"{name}_scale_2" in stored.shapes:
            _add_modelopt4(derived, stored, name)
        elif dtype in NARROW and not name.endswith(("_scale", "_zero_point", "_scale_inv")):
            _add_scaled(derived, stored, name, blocks)
        elif _UNNEEDED.fullmatch(name):
            derived.used.add(name)
        elif found := _CACHE_SCALE.fullmatch(name):
            part = next(each for each in found.groups()[1:] if each)
            derived.renamed[name] = f"{found[1]}{part}_scale"
    return derived


def _check(fields: Fields) -> None:
    values = fields.values
    groups = values.get("config_groups")
    formats = [values.get("format")]
    if isinstance(groups, Mapping):
        formats += [group.get("format") for group in groups.values() if isinstance(group, Mapping)]
    sparsity = values.get("sparsity_config") or {}
    if isinstance(sparsity, Mapping):
        formats.append(sparsity.get("format"))
    for each in formats:
        if each in PACKED_FORMATS:
            raise CheckpointError(f"{fields.path}{each} weights are not supported; use a dense checkpoint.")
    transforms = values.get("transform_config")
    if isinstance(transforms, Mapping) and transforms.get("config_groups"):
        raise CheckpointError(f"{fields.path}transform_config: rotated weights are not supported.")


def _add_scaled(derived: Derived, stored: Stored, name: str, blocks: Any) -> None:
    """One number of 8 bits for each weight, times its scale."""
    scale = first_of(stored, f"{name}_scale_inv", f"{name}_scale")
    if scale is None:
        raise CheckpointError(f"The quantized checkpoint lacks {name}_scale.")
    shape, zero = stored.shapes[name], f"{name}_zero_point"
    zero = zero if zero in stored.shapes else None

    def make(read: Read) -> Tensor:
        numbers = read(name).float()
        if zero is not None:
            numbers = numbers - _spread(read(zero).float(), shape, blocks, zero)
        return numbers * _spread(_scales(read(scale)), shape, blocks, scale)

    derived.add(name, shape, [name, scale, *([zero] if zero else [])], make)


def _add_whole_numbers(derived: Derived, stored: Stored, name: str, blocks: Any) -> None:
    """Numbers of `bits` bits, as many as fit in the words of a row; order of columns by `weight_g_idx` if there."""
    packed, scale, shape_name = f"{name}_packed", f"{name}_scale", f"{name}_shape"
    zero, order = (
        other if other in stored.shapes else None for other in (f"{name}_zero_point", f"{name}_g_idx")
    )
    require(stored, scale, shape_name)
    shape = tuple(int(size) for size in stored.read(shape_name).tolist())
    rows, words = stored.shapes[packed][-2:]
    if len(shape) != 2 or rows != shape[0] or not 0 < shape[1] <= 2**24:
        raise CheckpointError(f"{shape_name} is {list(shape)}, which does not fit {packed}.")
    bits = next((b for b in range(2, 9) if -(-shape[1] * b // 32) == words), None)
    if bits is None:
        raise CheckpointError(f"{packed} of {words} words does not hold {shape[1]} numbers of 2 to 8 bits.")
    offset = 1 << (bits - 1)

    def make(read: Read) -> Tensor:
        numbers = unpack(read(packed), bits, shape[1]) - offset
        scales = _scales(read(scale))
        zeros = None
        if zero is not None:
            zeros = read(zero)
            if zeros.dtype == torch.int32:  # packed along the outputs
                zeros = unpack(zeros.T.contiguous(), bits, shape[0]).T - offset
            zeros = zeros.float()
        if order is not None and bool((read(order) >= 0).all()):
            group = read(order).long()
            scales = scales[:, group]
            zeros = None if zeros is None else zeros[:, group]
        else:
            scales = _spread(scales, shape, blocks, scale)
            zeros = None if zeros is None else _spread(zeros, shape, blocks, str(zero))
        return (numbers.float() - (0 if zeros is None else zeros)) * scales

    def make_grouped(read: Read) -> GroupedWeight:
        scales, shifts = _scales(read(scale)), None
        if zero is not None:
            zeros = read(zero)
            if zeros.dtype == torch.int32:
                zeros = unpack(zeros.T.contiguous(), bits, shape[0]).T - offset
            shifts = -zeros.float() * scales
        return GroupedWeight(unpack(read(packed), 4, shape[1]).to(torch.uint8), scales, shifts)

    grid = stored.shapes[scale]
    kept = bits == 4 and order is None and len(grid) == 2 and grid[0] == rows and shape[1] % grid[1] == 0
    used = [packed, scale, shape_name, *(x for x in (zero, order) if x)]
    derived.add(name, shape, used, make, make_grouped if kept else None, shape[1] // grid[1] if kept else 0)


def _add_floats4(derived: Derived, stored: Stored, name: str, blocks: Any) -> None:
    """e2m1 with a scale for each 16 or 32, and for the former one that divides those of the whole tensor."""
    packed, scale = f"{name}_packed", f"{name}_scale"
    whole = f"{name}_global_scale"
    whole = whole if whole in stored.shapes else None
    require(stored, scale)
    *rows, half = stored.shapes[packed]
    shape = (*rows, 2 * half)

    def make(read: Read) -> Tensor:
        scales = _scales(read(scale))
        if whole is not None:
            scales = scales / read(whole).float()
        return look_up(nibbles(read(packed)), E2M1) * _spread(scales, shape, blocks, scale)

    derived.add(name, shape, [packed, scale, *([whole] if whole else [])], make)


def _add_modelopt4(derived: Derived, stored: Stored, name: str) -> None:
    scale, whole = f"{name}_scale", f"{name}_scale_2"
    require(stored, scale)
    *rows, half = stored.shapes[name]
    shape = (*rows, 2 * half)

    def make(read: Read) -> Tensor:
        scales = _scales(read(scale)) * read(whole).float()
        return look_up(nibbles(read(name)), E2M1) * _spread(scales, shape, (), scale)

    derived.add(name, shape, [name, scale, whole], make)


def _scales(stored: Tensor) -> Tensor:
    """float32, of any dtype that scales have: bytes are exponents."""
    return power_of_two(stored) if stored.dtype == torch.uint8 else stored.float()


def _spread(scales: Tensor, shape: tuple[int, ...], blocks: Any, name: str) -> Tensor:
    if scales.numel() == 1:
        return scales.reshape(())
    if scales.dim() == len(shape) - 1:
        scales = scales.unsqueeze(-1)
    if scales.dim() != len(shape):
        raise CheckpointError(f"{name} has the shape {list(scales.shape)} for a weight {list(shape)}.")
    try:
        return spread(scales, shape, tuple(blocks))
    except ValueError as error:
        raise CheckpointError(f"{name}: {error}.") from error
