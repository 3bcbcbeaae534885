"""Matrix products in C++ with packed weights (`ops/cpp/source/product.h`).

Every output is one sum over the whole depth in a fixed order, in float32, so a row's result does not depend on what
is computed beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ctypes import Structure, c_float, c_int64, sizeof
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.cpp.kernel_launcher import KernelLauncher
from ops.cpp.library import TYPES, address, in_line
from ops.cpp.structures import Pack, Pack4, Pack8, Product, Product4, Product8
from ops.matmul.grouped import GroupedWeight, GroupForm, is_whole

SCALE_BYTES = 4
CACHE_LINE = 64


class PackedWeight(Tensor):
    """A weight [O, I] packed in panels of its own dtype: a view of their memory, filled up to whole panels."""


class PackedWeight8(Tensor):
    """A weight [O, I] packed in panels of 8 bits; before them in the same memory stand the outputs' scales, float32."""

    @property
    def scales_address(self) -> int:
        return self.untyped_storage().data_ptr()


class Header4(Structure):
    """What stands before the panels of a weight in groups."""

    _fields_ = (
        ("group", c_int64),
        ("shifted", c_int64),
        ("type_size", c_int64),  # of the numbers it is multiplied with
        ("rounded_rows", c_int64),  # whether those are rounded to 8 bits
        ("bits", c_int64),  # of a code
        ("unused", c_int64 * 3),
        ("table", c_float * 16),
    )


class PackedWeight4(Tensor):
    """A weight [O, I] packed in panels of 4, 5, 6 or 8 bits with scales for groups: a view of its shape alone.

    Its dtype is that of the rows that it is multiplied with.

    Its memory holds a header (`Header4`), then the panels (`ops/cpp/source/product4.h`).
    """

    @property
    def nbytes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Of all that is held in memory."""
        return self.untyped_storage().nbytes()

    @property
    def header(self) -> Header4:
        """What kernels have to know of it."""
        return Header4.from_address(self.untyped_storage().data_ptr())


def product4(
    launcher: KernelLauncher, plain: Product, weight: PackedWeight4, rows: int, dtype: torch.dtype
) -> tuple[Product4, Tensor | None]:
    """The operands of a product of so many rows in `dtype`, and what must live until it is launched.

    `plain` needs no weight.

    ValueError for a weight that was packed for another dtype.
    """
    header = weight.header
    if header.type_size != dtype.itemsize:
        raise ValueError(
            f"A weight in groups packed for another dtype cannot be multiplied with rows in {dtype}."
        )
    operands = grouped_operands(weight, plain)
    num_groups, sums, rounded = plain.in_size // header.group, None, None
    if header.rounded_rows:  # with the groups' sums and the row's scale
        stride = -(-(plain.in_size + (num_groups + 1) * SCALE_BYTES) // CACHE_LINE) * CACHE_LINE
        rounded = launcher.empty((rows, stride), torch.uint8)
    elif header.shifted:
        sums = launcher.empty((rows, num_groups), torch.float32)
    operands.group_sums, operands.rounded = address(sums), address(rounded)
    return operands, sums if rounded is None else rounded


def grouped_operands(weight: PackedWeight4, plain: Product | None = None) -> Product4:
    """How the weight is packed, for kernels; the rest of its product is `plain`, or nothing."""
    header, first = weight.header, weight.untyped_storage().data_ptr()
    plain = Product(in_size=weight.shape[-1], out_size=weight.shape[-2]) if plain is None else plain
    plain.weight = first + sizeof(Header4)
    return Product4(
        plain,
        table=first + Header4.table.offset,
        group=header.group,
        shifted=header.shifted,
        bits=header.bits,
    )


PACKED = (PackedWeight, PackedWeight8, PackedWeight4)


def scratch8(launcher: KernelLauncher, rows: int, in_size: int) -> Tensor:
    """Memory for so many rows in 8 bits: each has its depth in whole steps, and one more for its scale and sum."""
    step = launcher.library.byte_step
    return launcher.empty((rows, (-(-in_size // step) + 1) * step), torch.uint8)


def make(launcher: KernelLauncher) -> Mapping[str, Callable[..., Any]]:
    """`prepare`, `linear` and `logits` (see `ops.matmul`)."""
    operations = (prepare, prepare_grouped, linear, logits)
    return {operation.__name__: partial(operation, launcher) for operation in operations}


def prepare(launcher: KernelLauncher, weight: Tensor, *, bits: int | None = None) -> Tensor:
    """The weight in packed, of 8 bits if asked; as it is where the kernels do not take it."""
    if bits not in (None, 8):
        raise ValueError(f"Weights are rounded to 8 bits, not {bits}.")
    dtype, (out_size, in_size) = weight.dtype, weight.shape
    width, step = launcher.library.panel_width, launcher.library.byte_step
    if weight.device.type != "cpu" or dtype not in TYPES:
        return weight
    padded = -(-out_size // width) * width
    plain = weight.detach().contiguous()
    if bits == 8 and in_size <= launcher.library.max_byte_depth:
        scales, depth = padded * SCALE_BYTES, -(-in_size // step) * step
        memory = launcher.weight_memory(scales + padded * depth)
        first = memory.data_ptr()
        launcher.launch("pack8", dtype, Pack8(address(plain), first + scales, first, in_size, out_size))
        return memory.as_strided((out_size, in_size), (in_size, 1), scales).as_subclass(PackedWeight8)
    if in_size * dtype.itemsize % 4:
        return weight
    memory = launcher.weight_memory(padded * in_size * dtype.itemsize).view(dtype)
    launcher.launch("pack", dtype, Pack(address(plain), address(memory), in_size, out_size))
    return memory.as_strided((out_size, in_size), (in_size, 1)).as_subclass(PackedWeight)


def prepare_grouped(
    launcher: KernelLauncher,
    weight: GroupedWeight,
    dtype: torch.dtype,
    *,
    out_size: int | None = None,
    into: Tensor | None = None,
    first: int = 0,
) -> Tensor:
    """The weight packed as it is; as a plain one where the kernels do not take it."""
    rows, in_size = weight.codes.shape
    form = GroupForm(weight.group, weight.bits, weight.table, weight.shifts is not None)
    width = launcher.library.panel_width
    if into is None and (dtype not in TYPES or not form.fits):
        return prepare(launcher, weight.dequantised().to(dtype))
    if into is None:
        into = _grouped_memory(launcher, form, out_size or rows, in_size, dtype, weight.rounded_rows)
    if not isinstance(into, PackedWeight4) or first % width:
        raise ValueError(f"Rows are packed {width} at a time, not from {first} on.")
    codes, scales = weight.codes.contiguous(), weight.scales.float().contiguous()
    shifts = None if weight.shifts is None else weight.shifts.float().contiguous()
    packed = into.untyped_storage().data_ptr() + sizeof(Header4)
    packed += first // width * _panel_bytes(width, in_size, form, dtype)
    operands = Pack4(
        address(codes), address(scales), address(shifts), packed, in_size, rows, form.group, form.bits
    )
    launcher.launch("pack4", dtype, operands)
    return into


def _grouped_memory(
    launcher: KernelLauncher,
    form: GroupForm,
    out_size: int,
    in_size: int,
    dtype: torch.dtype,
    rounded_rows: bool,
) -> PackedWeight4:
    """A weight that is still to be packed."""
    width = launcher.library.panel_width
    panels = -(-out_size // width) * _panel_bytes(width, in_size, form, dtype)
    memory = launcher.weight_memory(sizeof(Header4) + panels).view(dtype)
    made = memory.as_strided((out_size, in_size), (0, 0)).as_subclass(PackedWeight4)
    header = made.header
    header.group, header.bits, header.shifted = form.group, form.bits, form.shifted
    header.type_size = dtype.itemsize
    header.table[:] = form.table
    header.rounded_rows = rounded_rows and form.bits == 4 and is_whole(form.table)
    return made


def _panel_bytes(width: int, in_size: int, form: GroupForm, dtype: torch.dtype) -> int:
    scale_bytes = 2 if dtype == torch.bfloat16 else 4
    return width * (in_size // form.group * scale_bytes * (1 + form.shifted) + in_size * form.bits // 8)


def linear(launcher: KernelLauncher, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias."""
    if not isinstance(weight, PACKED):
        return F.linear(x, weight, bias)
    return _product(launcher, x, weight, bias, x.dtype)


def logits(launcher: KernelLauncher, x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T, not rounded to x's dtype."""
    if not isinstance(weight, PACKED):
        return F.linear(x, weight).float()
    return _product(launcher, x, weight, None, torch.float32)


def _product(
    launcher: KernelLauncher, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    out_size, in_size = weight.shape
    shape = (*x.shape[:-1], out_size)
    x = in_line(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]))
    if x.shape[1] != in_size:
        raise ValueError(f"A weight of {in_size} inputs cannot be multiplied with rows of {x.shape[1]}.")
    wide = "_wide" if out_dtype != x.dtype else ""
    out = launcher.empty((len(x), out_size), out_dtype)
    plain = Product(
        x=address(x),
        x_stride=x.stride(0),
        rows=launcher.tokens(x),
        weight=address(weight),
        bias=address(bias),
        out=address(out),
        in_size=in_size,
        out_size=out_size,
    )
    if isinstance(weight, PackedWeight4):
        operands, _kept = product4(launcher, plain, weight, len(x), x.dtype)
        launcher.launch(f"product4{wide}", x.dtype, operands)
        return out.view(shape)
    if not isinstance(weight, PackedWeight8):
        if x.dtype != weight.dtype:
            raise ValueError(f"A weight in {weight.dtype} cannot be multiplied with rows in {x.dtype}.")
        launcher.launch(f"product{wide}", x.dtype, plain)
        return out.view(shape)
    rounded = scratch8(launcher, len(x), in_size)
    launcher.launch(f"product8{wide}", x.dtype, Product8(plain, weight.scales_address, address(rounded)))
    return out.view(shape)
