"""Matrix products in C++ with packed weights (`ops/cpp/source/product.h`).

Each output is one float32 sum over all inputs in a fixed order, so a row's result does not depend on other rows.
A packed weight consists of panels, the layout that the kernels read.
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
from ops.cpp.library import TYPES, address, contiguous_tokens
from ops.cpp.structures import Pack, Pack4, Pack8, Product, Product4, Product8
from ops.matmul.grouped import GroupedWeight, GroupForm, is_whole
from ops.matmul.native import row_group

SCALE_BYTES = 4
CACHE_LINE = 64


class PackedWeight(Tensor):
    """A view [O, I] of an unquantised weight that is packed into panels. Its memory is padded to whole panels."""


class PackedWeight8(Tensor):
    """A view [O, I] of an 8-bit weight that is packed into panels, preceded in memory by its float32 scales."""

    @property
    def scales_address(self) -> int:
        return self.untyped_storage().data_ptr()


class Header4(Structure):
    """Header that precedes the panels of a grouped weight in memory."""

    _fields_ = (
        ("group", c_int64),
        ("shifted", c_int64),
        ("type_size", c_int64),  # bytes per element of x
        ("rounded_rows", c_int64),  # whether products round each row of x to 8 bits
        ("bits", c_int64),  # number of bits per code
        ("unused", c_int64 * 3),  # aligns the table to a cache line
        ("table", c_float * 16),
    )


class PackedWeight4(Tensor):
    """A grouped weight [O, I] with 4, 5, 6 or 8 bits, packed into panels. The strides of the tensor are 0.

    Its dtype is that of x in products. Its memory holds a header (`Header4`), followed by the panels
    (`ops/cpp/source/product4.h`).
    """

    @property
    def nbytes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Bytes of the weight's memory."""
        return self.untyped_storage().nbytes()

    @property
    def header(self) -> Header4:
        """The header in the weight's memory."""
        return Header4.from_address(self.untyped_storage().data_ptr())


def product4(
    launcher: KernelLauncher, plain: Product, weight: PackedWeight4, rows: int, dtype: torch.dtype
) -> tuple[Product4, Tensor | None]:
    """Return the operands of a product with `rows` rows of x in `dtype`, and a tensor to keep alive until the launch.

    `plain` has all operands except the weight. Raises ValueError if the weight is packed for another dtype.
    """
    header = weight.header
    if header.type_size != dtype.itemsize:
        raise ValueError(f"A grouped weight that is packed for another dtype cannot be multiplied by rows in {dtype}.")
    operands = grouped_operands(weight, plain)
    num_groups, sums, rounded = plain.in_size // header.group, None, None
    if header.rounded_rows:  # each rounded row is followed by the sums of its groups and by its scale
        stride = -(-(plain.in_size + (num_groups + 1) * SCALE_BYTES) // CACHE_LINE) * CACHE_LINE
        rounded = launcher.empty((rows, stride), torch.uint8)
    elif header.shifted:
        sums = launcher.empty((rows, num_groups), torch.float32)
    operands.group_sums, operands.rounded = address(sums), address(rounded)
    return operands, sums if rounded is None else rounded


def grouped_operands(weight: PackedWeight4, plain: Product | None = None) -> Product4:
    """Return the operands of a product with the packed weight. `plain` has all operands except those of the weight."""
    header, first = weight.header, weight.untyped_storage().data_ptr()
    plain = Product(in_size=weight.shape[-1], out_size=weight.shape[-2]) if plain is None else plain
    plain.weight = first + sizeof(Header4)
    return Product4(
        plain=plain,
        table=first + Header4.table.offset,
        group=header.group,
        shifted=header.shifted,
        bits=header.bits,
    )


PACKED = (PackedWeight, PackedWeight8, PackedWeight4)


def scratch8(launcher: KernelLauncher, rows: int, in_size: int) -> Tensor:
    """Return memory for `rows` 8-bit rows of x.

    Each row is padded to a multiple of `byte_step` bytes. Further `byte_step` bytes hold its scale and its sum.
    """
    step = launcher.library.byte_step
    return launcher.empty((rows, (-(-in_size // step) + 1) * step), torch.uint8)


def make(launcher: KernelLauncher) -> Mapping[str, Callable[..., Any]]:
    """Return all operations of `ops.matmul`."""
    operations = (prepare, prepare_grouped, linear, logits)
    return {"row_group": row_group} | {operation.__name__: partial(operation, launcher) for operation in operations}


def prepare(launcher: KernelLauncher, weight: Tensor, *, bits: int | None = None) -> Tensor:
    """Return the packed weight, or `weight` itself if the kernels do not support it.

    If `bits` is 8, the weight is quantised to 8 bits, unless it has more inputs than the 8-bit kernels support.
    """
    if bits not in (None, 8):
        raise ValueError(f"Weights can be rounded to 8 bits, not to {bits}.")
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
        launcher.launch(
            "pack8",
            dtype,
            Pack8(weight=address(plain), packed=first + scales, scales=first, in_size=in_size, out_size=out_size),
        )
        return memory.as_strided((out_size, in_size), (in_size, 1), scales).as_subclass(PackedWeight8)
    if in_size * dtype.itemsize % 4:
        return weight
    memory = launcher.weight_memory(padded * in_size * dtype.itemsize).view(dtype)
    launcher.launch(
        "pack", dtype, Pack(weight=address(plain), packed=address(memory), in_size=in_size, out_size=out_size)
    )
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
    """Return the packed weight, or the dequantised weight if the kernels do not support its form."""
    rows, in_size = weight.codes.shape
    form = GroupForm(weight.group, weight.bits, weight.table, weight.shifts is not None)
    width = launcher.library.panel_width
    if into is None and (dtype not in TYPES or not form.fits or weight.floating):
        return prepare(launcher, weight.dequantised().to(dtype))
    if into is None:
        into = _grouped_memory(launcher, form, out_size or rows, in_size, dtype, weight.rounded_rows)
    if not isinstance(into, PackedWeight4) or first % width:
        raise ValueError(f"Rows are packed in panels of {width}, so `first` must be a multiple of it, not {first}.")
    codes, scales = weight.codes.contiguous(), weight.scales.float().contiguous()
    shifts = None if weight.shifts is None else weight.shifts.float().contiguous()
    packed = into.untyped_storage().data_ptr() + sizeof(Header4)
    packed += first // width * _panel_bytes(width, in_size, form, dtype)
    operands = Pack4(
        codes=address(codes),
        scales=address(scales),
        shifts=address(shifts),
        packed=packed,
        in_size=in_size,
        out_size=rows,
        group=form.group,
        bits=form.bits,
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
    """Return an uninitialised packed weight with its header."""
    width = launcher.library.panel_width
    panels = -(-out_size // width) * _panel_bytes(width, in_size, form, dtype)
    memory = launcher.weight_memory(sizeof(Header4) + panels).view(dtype)
    weight = memory.as_strided((out_size, in_size), (0, 0)).as_subclass(PackedWeight4)
    header = weight.header
    header.group, header.bits, header.shifted = form.group, form.bits, form.shifted
    header.type_size = dtype.itemsize
    header.table[:] = form.table
    header.rounded_rows = rounded_rows and form.bits == 4 and is_whole(form.table)
    return weight


def _panel_bytes(width: int, in_size: int, form: GroupForm, dtype: torch.dtype) -> int:
    scale_bytes = 2 if dtype == torch.bfloat16 else 4
    return width * (in_size // form.group * scale_bytes * (1 + form.shifted) + in_size * form.bits // 8)


def linear(launcher: KernelLauncher, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias."""
    if not isinstance(weight, PACKED):
        return F.linear(x, weight, bias)
    return _product(launcher, x, weight, bias, x.dtype)


def logits(launcher: KernelLauncher, x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T in float32."""
    if not isinstance(weight, PACKED):
        return F.linear(x, weight).float()
    return _product(launcher, x, weight, None, torch.float32)


def _product(
    launcher: KernelLauncher, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    out_size, in_size = weight.shape
    shape = (*x.shape[:-1], out_size)
    x = contiguous_tokens(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]))
    if x.shape[1] != in_size:
        raise ValueError(f"A weight with {in_size} inputs cannot be multiplied by rows of {x.shape[1]}.")
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
            raise ValueError(f"A weight in {weight.dtype} cannot be multiplied by rows in {x.dtype}.")
        launcher.launch(f"product{wide}", x.dtype, plain)
        return out.view(shape)
    rounded = scratch8(launcher, len(x), in_size)
    launcher.launch(
        f"product8{wide}",
        x.dtype,
        Product8(plain=plain, scales=weight.scales_address, rounded=address(rounded)),
    )
    return out.view(shape)
