"""Weights with separate scales: fp8 (also DeepSeek's blocks), compressed-tensors, ModelOpt's fp8 and int8.

The names and dtypes of the tensors determine the scheme; its name in the configuration is ignored:

    weight fp8 or int8 [O, I]      with weight_scale or weight_scale_inv per tensor, row, group or block
    weight_packed int32 [O, W]     integers of 1 to 8 bits, offset by half their range; weight_shape. Packed densely, or
                                   by older versions without numbers that span two words
    weight_packed uint8 [O, I / 2] e2m1, two per byte, with a scale per 16 (e4m3, divided by weight_global_scale) or
                                   per 32 inputs (e8m0); or e2m3, four in three bytes, per 32 inputs

The configuration gives bit widths and block sizes where shapes are ambiguous. Static scales of activations are ignored,
because activations are not rounded.

Source: the compressors of compressed-tensors, ModelOpt's unified checkpoint export, DeepSeek-V3's model card.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ops.matmul.grouped import E2M1, GroupedWeight, GroupForm, code_bits, nibbles
from runtime.config.fields import Fields
from runtime.errors import CheckpointError, MissingTensor
from runtime.loading.formats.bits import E2M3, look_up, power_of_two, spread, unpack
from runtime.loading.formats.stored import Derived, Read, Stored, first_of, require

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
NARROW = (*FLOAT8, torch.int8)
FLOAT8_UNIT = 32  # number of inputs that float8 kernels multiply at a time; group sizes must be multiples of it
IN_WEIGHTS = ("weight_input", "weight_output")  # locations of rotations that are already part of a checkpoint's weights
PACKED_FORMATS = ("marlin-24", "sparse-24-bitmask", "sparse-bitmask")  # other layouts, not supported

# Scales of activations. They are ignored, because activations are not rounded.
_UNNEEDED = re.compile(
    r".*[._](input_scale|input_zero_point|input_global_scale|output_zero_point|activation_scale|"
    r"input_scale_ub|q_proj\.output_scale|q_scale|(q_proj|o_proj)\.q_scale|[kvq]_zero_point)"
)
# Scales of the KV cache, under the names that different tools use.
_CACHE_SCALE = re.compile(r"(.*\.)(?:(?:(k|v)_proj\.output_scale)|(?:[kv]_proj\.(k|v)_scale)|(?:attn\.(k|v)_scale))")

_CACHE_SCALES = re.compile(r".*\.self_attn\.[kv]_scale")


def derive(stored: Stored, fields: Fields) -> Derived:
    """Return how the model's tensors are computed from the stored tensors (see `runtime.loading.formats`)."""
    _check(fields)
    derived = Derived()
    schemes = _schemes(fields.values)
    for name, dtype in stored.dtypes.items():
        if name.endswith("_packed"):
            weight = name.removesuffix("_packed")
            if dtype == torch.int32:
                _add_integers(derived, stored, weight, schemes)
            else:
                add_floats(derived, stored, weight, name, schemes)
        elif dtype in NARROW and not name.endswith(("_scale", "_zero_point", "_scale_inv")):
            _add_scaled(derived, stored, name, schemes)
        elif _UNNEEDED.fullmatch(name):
            derived.used.add(name)
        elif match := _CACHE_SCALE.fullmatch(name):
            part = next(each for each in match.groups()[1:] if each)
            _add_cache_scale(derived, stored, name, f"{match[1]}{part}_scale")
        elif _CACHE_SCALES.fullmatch(name):
            _add_cache_scale(derived, stored, name, name)
    return derived


def _add_cache_scale(derived: Derived, stored: Stored, name: str, ours: str) -> None:
    """Add one scale for all heads: the largest, so that no head's keys or values overflow."""
    if stored.shapes[name] in ((), (1,)):
        derived.renamed[name] = ours
    else:
        derived.add(ours, (1,), [name], lambda read: read(name).float().amax().reshape(1))


class Schemes(NamedTuple):
    """The quantisation schemes that the configuration lists. The shapes of a weight and its scales select one."""

    bits: tuple[int, ...] = ()
    blocks: tuple[tuple[int, int], ...] = ()  # outputs and inputs per scale
    strategies: frozenset[str] = frozenset()  # strategies of all weights; empty if some are unknown
    shifted: bool = False  # whether all weights have zero points
    ordered: bool = False  # whether all weights have a `weight_g_idx`

    def check(self, grid: tuple[int, ...], shape: tuple[int, ...], name: str) -> None:
        """Raise CheckpointError if no strategy of the configuration allows scales of shape `grid` for a weight [O, I].

        `shape` is the shape of the weight. If some strategies are unknown, every `grid` is accepted.
        """
        if not self.strategies or len(shape) != 2:
            return
        allowed = {tuple(-(-size // part) for size, part in zip(shape, each, strict=True)) for each in self.blocks}
        allowed |= {(), (1,), (1, 1)} if "tensor" in self.strategies else set()
        allowed |= {shape[:1], (shape[0], 1)} if "channel" in self.strategies else set()
        if grid not in allowed:
            raise CheckpointError(f"{name}: {list(grid)} scales do not cover {list(shape)} {self.stated}.")

    @property
    def stated(self) -> str:
        return "in blocks of " + (" or ".join(f"{a} by {b}" for a, b in self.blocks) or "equal size")


STRATEGIES = frozenset(("tensor", "channel", "group", "tensor_group", "block"))


def weight_settings(values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the weight settings of each of the `config_groups`."""
    groups = values.get("config_groups")
    stated = groups.values() if isinstance(groups, Mapping) else ()
    weights = [each.get("weights") for each in stated if isinstance(each, Mapping)]
    return [each for each in weights if isinstance(each, Mapping)]


def _schemes(values: Mapping[str, Any]) -> Schemes:
    weights = weight_settings(values)
    blocks = [values.get("weight_block_size"), *(each.get("block_structure") for each in weights)]
    pairs = [tuple(each) for each in blocks if isinstance(each, list | tuple) and len(each) == 2]
    pairs += [(1, each.get("group_size")) for each in weights]
    pairs += [(128, 128)] if str(values.get("quant_algo")).lower() == "fp8_pb_wo" else []
    strategies = {str(each.get("strategy")) for each in weights}
    return Schemes(
        tuple(dict.fromkeys(each["num_bits"] for each in weights if each.get("num_bits") in range(1, 9))),
        tuple((a, b) for a, b in pairs if _is_size(a) and _is_size(b)),
        frozenset(strategies if strategies <= STRATEGIES else ()),
        bool(weights) and all(each.get("symmetric") is False for each in weights),
        bool(weights) and all(each.get("actorder") == "group" for each in weights),
    )


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


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
            raise CheckpointError(f"{fields.path}{each} weights are not supported. Use a dense checkpoint.")
    transforms = values.get("transform_config")
    rotations = transforms.get("config_groups") if isinstance(transforms, Mapping) else None
    for name, rotation in (rotations if isinstance(rotations, Mapping) else {}).items():
        applied = rotation.get("apply") if isinstance(rotation, Mapping) else None
        locations = [each.get("location") if isinstance(each, Mapping) else None for each in applied or [None]]
        if not all(location in IN_WEIGHTS for location in locations):
            raise CheckpointError(
                f"{fields.path}transform_config: {name} rotates activations or the cache, which is not supported. "
                "Use a checkpoint without rotations, or with rotations of weights only (SpinQuant's R1 and R2)."
            )


def _add_scaled(derived: Derived, stored: Stored, name: str, schemes: Schemes) -> None:
    """Add a weight of 8-bit numbers, multiplied by their scales."""
    scale = first_of(stored, f"{name}_scale_inv", f"{name}_scale", f"{name}_weight_scale")
    if scale is None:
        raise MissingTensor(f"{name}_scale")
    shape, zero = stored.shapes[name], f"{name}_zero_point"
    require(stored, *([zero] if schemes.shifted else ()))
    zero = zero if zero in stored.shapes else None
    if scale.endswith("_inv") and schemes.blocks:
        schemes = schemes._replace(strategies=frozenset(("block",)))
    schemes.check(stored.shapes[scale], shape, scale)

    def make(read: Read) -> Tensor:
        numbers = read(name).float()
        if zero is not None:
            numbers = numbers - _spread(read(zero).float(), shape, schemes, zero)
        return numbers * _spread(_scales(read(scale)), shape, schemes, scale)

    def make_grouped(read: Read, rows: slice) -> GroupedWeight:
        if form is not None and form.floating:
            columns = shape[1] // form.group
            scales = _spread(_scales(read(scale)), shape, schemes, scale).expand(shape)[rows, :: form.group]
            return GroupedWeight(read(name)[rows].view(torch.uint8), scales[:, :columns], bits=8, floating=True)
        codes = (read(name)[rows].to(torch.int16) + 128).to(torch.uint8)
        return GroupedWeight(codes, _scales(read(scale))[rows], bits=8)

    form = None
    if stored.dtypes[name] == torch.int8 and zero is None:
        form = _form(stored, shape, scale, 8, shifted=False)
    elif stored.dtypes[name] == torch.float8_e4m3fn and zero is None:
        form = _float8_form(stored.shapes[scale], shape, schemes)
    used = [name, scale, *([zero] if zero else [])]
    derived.add(name, shape, used, make, make_grouped if form else None, form)


def _add_integers(derived: Derived, stored: Stored, name: str, schemes: Schemes) -> None:
    """Add a weight of packed integers; `weight_g_idx` maps columns to groups, if present."""
    packed, scale, shape_name = f"{name}_packed", f"{name}_scale", f"{name}_shape"
    zero, order = (part if part in stored.shapes else None for part in (f"{name}_zero_point", f"{name}_g_idx"))
    require(stored, scale, shape_name)
    require(stored, *([f"{name}_zero_point"] if schemes.shifted else ()))
    require(stored, *([f"{name}_g_idx"] if schemes.ordered else ()))
    shape = tuple(int(size) for size in stored.read(shape_name).flatten().tolist())
    rows, words = (*stored.shapes[packed], 0, 0)[:2]
    if len(shape) != 2 or rows != shape[0] or not 0 < shape[1] <= 2**24:
        raise CheckpointError(f"{shape_name} is {list(shape)}, which does not fit {packed}.")
    schemes.check(stored.shapes[scale], shape, scale)
    bits, dense = _packing(schemes.bits or tuple(range(1, 9)), words, shape[1])
    if bits == 0:
        raise CheckpointError(f"{packed} of {words} words cannot hold {shape[1]} numbers of 1 to 8 bits.")
    offset = 1 << (bits - 1)

    def read_zeros(read: Read) -> Tensor | None:
        """Return the zero points, float32 [O, G], or None if the weight has none."""
        zeros = None if zero is None else read(zero)
        if zeros is not None and zeros.dtype == torch.int32:  # packed along the outputs
            zeros = unpack(zeros.T.contiguous(), bits, shape[0], dense=dense).T - offset
        return None if zeros is None else zeros.float()

    def make(read: Read) -> Tensor:
        numbers = unpack(read(packed), bits, shape[1], dense=dense) - offset
        scales, zeros = _scales(read(scale)), read_zeros(read)
        if order is not None and bool((read(order) >= 0).all()):
            group = read(order).long()
            scales = scales[:, group]
            zeros = None if zeros is None else zeros[:, group]
        else:
            scales = _spread(scales, shape, schemes, scale)
            zeros = None if zeros is None else _spread(zeros, shape, schemes, str(zero))
        return (numbers.float() - (0 if zeros is None else zeros)) * scales

    def make_grouped(read: Read, rows: slice) -> GroupedWeight:
        scales, zeros = _scales(read(scale)), read_zeros(read)
        shifts = None if zeros is None else -zeros * scales
        codes = unpack(read(packed), bits, shape[1], dense=dense) + ((1 << kept_bits >> 1) - offset)
        return GroupedWeight(codes.to(torch.uint8), scales, shifts, bits=kept_bits).rows(rows)

    grid = stored.shapes[scale]
    packed_zeros = zero is not None and stored.dtypes[zero] == torch.int32
    if zero is not None and stored.shapes[zero][packed_zeros:] != grid[packed_zeros:]:
        raise CheckpointError(f"{zero} and {scale} do not match.")
    kept_bits = code_bits(bits)
    form = None if order else _form(stored, shape, scale, kept_bits)
    used = [packed, scale, shape_name, *(x for x in (zero, order) if x)]
    derived.add(name, shape, used, make, make_grouped if form else None, form)


def _form(stored: Stored, shape: Sequence[int], scale: str, bits: int, *, shifted: bool = True) -> GroupForm | None:
    """Return the form in which a weight can stay quantised, or None.

    The weight needs one scale for each output and group of inputs.
    """
    grid = stored.shapes[scale]
    if len(shape) != 2 or len(grid) != 2 or grid[0] != shape[0] or not grid[1] or shape[1] % grid[1]:
        return None
    return GroupForm(shape[1] // grid[1], bits, shifted=shifted)


def _float8_form(grid: tuple[int, ...], shape: tuple[int, ...], schemes: Schemes) -> GroupForm | None:
    """Return the form in which a float8 weight can stay quantised, or None.

    The weight needs one group per row, or groups whose size is a multiple of 32 inputs.
    """
    if len(shape) != 2:
        return None
    columns = grid[2] if len(grid) == 4 else grid[1] if len(grid) == 2 else 1  # ModelOpt's blocks are [a, 1, b, 1]
    groups = {inputs for _, inputs in schemes.blocks if -(-shape[1] // inputs) == columns}
    groups |= {shape[1] // columns} if columns and shape[1] % columns == 0 and not groups else set()
    group = shape[1] if columns == 1 else min(groups, default=0)
    fits = columns == 1 or (group and group % FLOAT8_UNIT == 0 and group * columns == shape[1])
    return GroupForm(group, 8, shifted=False, floating=True) if fits and group % 8 == 0 else None


def _packing(candidates: Sequence[int], words: int, count: int) -> tuple[int, bool]:
    """Return the bit width that fits (0 if none does), and whether numbers may span two words."""
    for dense in (True, False):
        for bits in candidates:
            if words == (-(-count * bits // 32) if dense else -(-count // (32 // bits))):
                return bits, dense
    return 0, True


def add_floats(derived: Derived, stored: Stored, name: str, packed: str, schemes: Schemes) -> None:
    """Add a packed weight of floats.

    The weight is e2m1 with a scale per 16 inputs and a global divisor, or e2m1 or e2m3 with a scale per 32 inputs.
    """
    scale = f"{name}_scale"
    whole = f"{name}_global_scale"
    whole = whole if whole in stored.shapes else None
    require(stored, scale)
    *rows, size = (*stored.shapes[packed],)
    *rows_too, groups = (*stored.shapes[scale],)
    of_6_bits = size == groups * 24
    shape = (*rows, size * 8 // (6 if of_6_bits else 4))
    small = size == groups * 8 and stored.dtypes[scale] not in (torch.uint8, torch.float8_e8m0fnu)
    if rows != rows_too or not (of_6_bits or small or size == groups * 16) or stored.dtypes[packed] != torch.uint8:
        raise CheckpointError(f"{packed} and {scale} do not match.")
    require(stored, *([f"{name}_global_scale"] if small else ()))

    def read_scales(read: Read) -> Tensor:
        scales = _scales(read(scale))
        return scales if whole is None else scales / read(whole).float()

    def make(read: Read) -> Tensor:
        scales = read_scales(read)
        if of_6_bits:
            codes = unpack(read(packed).contiguous().flatten(0, -2).view(torch.int32), 6, shape[-1])
            numbers = look_up(codes, E2M3).view(shape)
        else:
            numbers = look_up(nibbles(read(packed)), E2M1)
        return numbers * _spread(scales, shape, schemes, scale)

    def make_grouped(read: Read, rows: slice) -> GroupedWeight:
        return GroupedWeight(nibbles(read(packed)[rows]), read_scales(read)[rows], table=E2M1, powers=form.powers)

    powers = whole is None and stored.dtypes[scale] in (torch.uint8, torch.float8_e8m0fnu)
    used = [packed, scale, *([whole] if whole else [])]
    kept, inputs = len(shape) == 2 and not of_6_bits, f"{name.removesuffix('weight')}input_global_scale"
    input_scaled = kept and small and stored.shapes.get(inputs) in ((), (1,))
    form = GroupForm(16 if small else 32, table=E2M1, shifted=False, powers=powers, input_scaled=input_scaled)
    if input_scaled:
        derived.add_input_scale(name, inputs, inverse=True)
    derived.add(name, shape, used, make, make_grouped if kept else None, form if kept else None)


def _scales(stored: Tensor) -> Tensor:
    """Convert scales of any dtype to float32. Bytes are exponents."""
    return power_of_two(stored) if stored.dtype == torch.uint8 else stored.float()


def _spread(scales: Tensor, shape: tuple[int, ...], schemes: Schemes, name: str) -> Tensor:
    """Expand scales to the shape of their weight. If a block size that the configuration states fits, it is used."""
    if scales.numel() == 1:
        return scales.reshape(())
    if scales.dim() == 4 and len(shape) == 2:  # ModelOpt's blocks: [a, 1, b, 1]
        scales = scales.squeeze(3).squeeze(1)
    if scales.dim() == 1 and len(shape) == 3:  # one scale per expert
        scales = scales.unsqueeze(-1)
    if scales.dim() == 2 and len(shape) == 3 and scales.shape[1] == shape[2] != 1:
        if shape[1] == shape[2]:
            raise CheckpointError(f"{name} is ambiguous: its scales may belong to rows or to columns.")
        scales = scales.unsqueeze(1)
    if scales.dim() == len(shape) - 1:
        scales = scales.unsqueeze(-1)
    if scales.dim() != len(shape):
        raise CheckpointError(f"{name} has the shape {list(scales.shape)} for a weight {list(shape)}.")
    block = next((each for each in schemes.blocks if _covers(scales.shape, shape, each)), None)
    if block is None and (schemes.blocks or any(size % count for count, size in zip(scales.shape, shape, strict=True))):
        raise CheckpointError(f"{name}: {list(scales.shape)} scales {schemes.stated} do not cover {list(shape)}.")
    return spread(scales, shape, block or ())


def _covers(grid: Sequence[int], shape: Sequence[int], block: tuple[int, int]) -> bool:
    return all(
        count in (1, size) or count == -(-size // part)
        for count, size, part in zip(grid[-2:], shape[-2:], block, strict=True)
    )
