"""ModelOpt's unified checkpoints: the tensors that `scaled` reads, and weights packed two per byte.

    weight uint8 [O, I / 2]   e2m1, with weight_scale e4m3 per 16 inputs (or 32, 64, 128) and weight_scale_2 of the
                              whole weight, or with weight_scale uint8, an exponent per 32 inputs
    weight uint8 [O / 2, I]   signed 4 bits, two outputs per byte, the lower half first, with weight_scale float [O, G]
    pre_quant_scale [I]       factor of inputs; this code multiplies the weight's columns by it
    NAME, NAME_weight_scale   all experts in one tensor; [X, I, O] if the model stores inputs first

Source: NVIDIA's Model Optimizer, `export/quant_utils.py` and `export/unified_export_hf.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ops.matmul.grouped import E2M1, GroupedWeight, GroupForm, nibbles
from runtime.config.fields import Fields
from runtime.errors import CheckpointError
from runtime.loading.formats import scaled
from runtime.loading.formats.bits import look_up, power_of_two
from runtime.loading.formats.stored import Derived, Read, Stored, require

INPUT_SCALE, LOW_RANK = ".pre_quant_scale", ".svdquant_lora_a"


def derive(stored: Stored, fields: Fields) -> Derived:
    """Return how the model's tensors are computed from the stored tensors (see `runtime.loading.formats`)."""
    derived, groups = scaled.derive(stored, fields), _group_sizes(fields.values)
    for name, dtype in stored.dtypes.items():
        stem = name if name.endswith("weight") else f"{name}_weight"
        if name.endswith(LOW_RANK):
            raise CheckpointError(
                f"{name}: low-rank weights (SVDQuant) are not supported. Use a checkpoint without them."
            )
        if dtype == torch.uint8 and f"{stem}_scale" in stored.shapes:
            by_bits = stored.dtypes[f"{stem}_scale"] in (torch.uint8, torch.float8_e4m3fn)
            (_add_floats if by_bits else _add_integers)(derived, stored, name, stem, groups)
    for name in stored.shapes:
        if name.endswith(INPUT_SCALE):
            _multiply_columns(derived, stored, f"{name.removesuffix(INPUT_SCALE)}.weight", name)
    return derived


def _group_sizes(values: Mapping[str, Any]) -> set[int]:
    """Return the group sizes that config.json states for all weights, or an empty set if it states them per layer."""
    if "quantized_layers" in values:
        return set()
    sizes = [each.get("group_size") for each in (values, *scaled.weight_settings(values))]
    return {each for each in sizes if type(each) is int and each > 0}


def _add_floats(derived: Derived, stored: Stored, name: str, stem: str, groups: set[int]) -> None:
    """Add a weight of e2m1, packed two per byte along the inputs. A tensor of all experts may have the inputs first."""
    scale, whole = f"{stem}_scale", f"{stem}_scale_2"
    by_exponent = stored.dtypes[scale] == torch.uint8
    packed, grid = stored.shapes[name], stored.shapes[scale]
    stated = [each // 2 for each in groups]
    sizes = (16,) if by_exponent else stated or (8, 16, 32, 64)  # bytes per scale
    candidates = ((axis, size) for axis in (-1, -2)[: len(packed) - 1] for size in sizes)
    along, size = next((each for each in candidates if _shares(packed, grid, *each)), (0, 0))
    if not size or (along == -2 and len(packed) != 3):
        raise CheckpointError(f"{name} and {scale} do not match.")
    if not by_exponent:
        require(stored, whole)
    shape = list(packed)
    shape[along] *= 2

    def read_scales(read: Read) -> Tensor:
        if by_exponent:
            return power_of_two(read(scale))
        scales, second = read(scale).float(), read(whole).float()
        return scales * second.view(*second.shape, *(1,) * (scales.dim() - second.dim()))

    def make(read: Read) -> Tensor:
        scales = read_scales(read)
        numbers = look_up(nibbles(read(name).transpose(along, -1)), E2M1)
        return (numbers * scales.transpose(along, -1).repeat_interleave(2 * size, dim=-1).contiguous()).transpose(
            along, -1
        )

    def make_grouped(read: Read, rows: slice) -> GroupedWeight:
        return GroupedWeight(nibbles(read(name)[rows]), read_scales(read)[rows], table=E2M1, powers=by_exponent)

    used, kept = [name, scale, *([] if by_exponent else [whole])], len(shape) == 2
    inputs = stem.removesuffix("weight") + "input_scale"
    input_scaled = kept and not by_exponent and size == 8 and stored.shapes.get(inputs) in ((), (1,))
    form = GroupForm(2 * size, table=E2M1, shifted=False, powers=by_exponent, input_scaled=input_scaled)
    if input_scaled:
        derived.add_input_scale(name, inputs)
    derived.add(name, shape, used, make, make_grouped if kept else None, form if kept else None)


def _shares(packed: tuple[int, ...], grid: tuple[int, ...], axis: int, size: int) -> bool:
    """Whether each scale belongs to `size` consecutive bytes along this axis."""
    expected = list(packed)
    expected[axis] //= size
    return not packed[axis] % size and tuple(expected) == grid


def _add_integers(derived: Derived, stored: Stored, name: str, stem: str, sizes: set[int]) -> None:
    scale, second = f"{stem}_scale", f"{stem}_scale_2"
    half, in_size, *more = stored.shapes[name]
    out_size, groups, *_ = (*stored.shapes[scale], 0, 0)
    if (
        more
        or len(stored.shapes[scale]) != 2
        or out_size != 2 * half
        or not groups
        or in_size % groups
        or (sizes and in_size // groups not in sizes)
    ):
        raise CheckpointError(f"{name} and {scale} do not match.")

    def read_codes(read: Read) -> Tensor:
        return nibbles(read(name).T).T.contiguous() ^ 8

    def make(read: Read) -> Tensor:
        scales = read(scale).float().repeat_interleave(in_size // groups, dim=1)
        return (read_codes(read).float() - 8) * scales

    def make_grouped(read: Read, rows: slice) -> GroupedWeight:
        return GroupedWeight(read_codes(read), read(scale).float()).rows(rows)

    # The second scale is not read: only kernels that round the dequantised weight to fp8 need it.
    used = [name, scale, *([second] if second in stored.shapes else [])]
    derived.add(name, (out_size, in_size), used, make, make_grouped, GroupForm(in_size // groups, shifted=False))


def _multiply_columns(derived: Derived, stored: Stored, weight: str, scale: str) -> None:
    unscaled = derived.tensors.get(weight)
    if unscaled is None or stored.shapes[scale] != unscaled.shape[-1:]:
        raise CheckpointError(f"{scale} does not match {weight}.")
    derived.add(weight, unscaled.shape, [scale], lambda read: unscaled.make(read) * read(scale).float())
