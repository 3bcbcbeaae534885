"""Matrix products in Triton with weights in 8 and 4 bits, which the main loop converts to x's dtype.

4-bit weights are integers in groups (`ops/matmul/grouped.py`). A byte has two of them, the first in its lower half. The
sum of a group's products is scaled once, in float32. 8-bit weights are integers with one scale per output. Rows of x
are never rounded. Weights in float8 are in `triton_float8.py`. torch computes products with other weights.
"""

# Pyright cannot check the arguments of kernel launches.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ops.matmul import triton_float8
from ops.matmul.grouped import WHOLE, GroupedWeight

GROUPS = (16, 32, 64, 128)  # supported numbers of inputs per group; multiples of the last one are supported as well
LARGEST_8 = 127.0
ALIGNMENT = 256  # alignment of the parts in bytes


class Parts(NamedTuple):
    """Tensors of a packed weight."""

    codes: Tensor  # uint8 [O, I / 2], int8 [O, I] or float8 (e4m3) [O, I]; experts have one more dimension before
    scales: Tensor  # float32 [O, G] or [O, 1]
    shifts: Tensor | None = None  # float32 [O, G]


class Packed(Tensor):
    """A packed weight. The tensor has its shape [..., O, I], but strides of 0. Its data is in `parts`."""

    parts: Parts

    def detach(self) -> Self:
        """Return a detached tensor with the same parts. `Parameter` calls this method."""
        return _view(self.parts)

    @property
    def nbytes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Bytes of the weight's memory."""
        return self.untyped_storage().nbytes()


def pack(parts: Parts) -> Any:
    """Copy the parts into one block of memory, so that new weights can overwrite it. Return the packed weight."""
    sizes = [0 if part is None else -(-part.nbytes // ALIGNMENT) * ALIGNMENT for part in parts]
    memory, first, views = torch.empty(sum(sizes), dtype=torch.uint8, device=parts.codes.device), 0, []
    for part, size in zip(parts, sizes, strict=True):
        if part is None:
            views.append(None)
            continue
        views.append(memory[first : first + part.nbytes].view(part.dtype).view(part.shape).copy_(part))
        first += size
    return _view(Parts(*views))


def _view(parts: Parts) -> Any:
    codes = parts.codes
    shape = (*codes.shape[:-1], codes.shape[-1] * (2 if codes.dtype == torch.uint8 else 1))
    packed = codes.view(torch.uint8).as_strided(shape, (0,) * len(shape)).as_subclass(Packed)
    packed.parts = parts
    return packed


def prepare(weight: Tensor, *, bits: int | None = None) -> Tensor:
    """Return the weight, quantised if `bits` is 8 (see `ops.matmul`)."""
    if bits is None:
        return weight
    if bits != 8:
        raise ValueError(f"Weights can be rounded to 8 bits, not to {bits}.")
    wide = weight.detach().float()
    scales = (wide.abs().amax(1, keepdim=True) / LARGEST_8).clamp_min(torch.finfo(torch.float32).tiny)
    return pack(Parts((wide / scales).round_().to(torch.int8), scales))


def prepare_grouped(weight: GroupedWeight, dtype: torch.dtype) -> Tensor:
    """Return the packed weight, or the dequantised one if the kernel does not support it (see `ops.matmul`)."""
    if weight.floating:
        return pack(Parts(weight.codes.view(torch.float8_e4m3fn), weight.scales.float()))
    if weight.bits != 4 or weight.table != WHOLE or not (weight.group in GROUPS or weight.group % GROUPS[-1] == 0):
        return weight.dequantised().to(dtype)
    codes = weight.codes[:, ::2] | (weight.codes[:, 1::2] << 4)
    shifts = None if weight.shifts is None else weight.shifts.float().contiguous()
    return pack(Parts(codes, weight.scales.float().contiguous(), shifts))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias (see `ops.matmul`)."""
    if not isinstance(weight, Packed):
        return F.linear(x, weight, bias)
    return _product(x, weight, bias, x.dtype)


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T (see `ops.matmul`)."""
    if not isinstance(weight, Packed):
        return F.linear(x, weight)
    return _product(x, weight, None, torch.float32)


def _product(x: Tensor, weight: Packed, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    (codes, scales, shifts), (out_size, in_size) = weight.parts, weight.shape
    rows = x.reshape(-1, in_size)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    if codes.dtype == torch.float8_e4m3fn:
        rounded = triton_float8.multiplies_float8(x.device)
        out = triton_float8.product(rows, codes, scales, bias, dtype, rounded_rows=rounded)
        return out.view(*x.shape[:-1], out_size)
    out = torch.empty((len(rows), out_size), dtype=dtype, device=x.device)
    group = in_size // scales.shape[1]
    tile = _tile(len(rows), group if codes.dtype == torch.uint8 else 128, x.dtype)
    grid = (triton.cdiv(len(rows), tile["ROWS_BLOCK"]), triton.cdiv(out_size, tile["OUT_BLOCK"]))
    _product_kernel[grid](
        rows,
        codes,
        scales,
        shifts,
        bias,
        out,
        len(rows),
        rows.stride(0),
        OUT=out_size,
        IN=in_size,
        GROUP=group,
        OF_4_BITS=codes.dtype == torch.uint8,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        **tile,
    )
    return out.view(*x.shape[:-1], out_size)


def _tile(num_rows: int, step: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the tile sizes. Each iteration of the main loop reads at most `step` inputs, which are in one group."""
    step = min(step, 128)
    if dtype.itemsize == 4:
        return {
            "ROWS_BLOCK": 16,
            "OUT_BLOCK": 32,
            "IN_BLOCK": min(step, 32),
            "num_warps": 4,
            "num_stages": 2,
        }
    many = num_rows > 32
    return {
        "ROWS_BLOCK": 64 if many else 16,
        "OUT_BLOCK": 128 if many else 64,
        "IN_BLOCK": min(step, 64) if many else step,
        "num_warps": 8 if many else 4,
        "num_stages": 3,
    }


# varies between steps; a specialised kernel would be compiled for each value
@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    x,  # [num_rows, IN]
    codes,  # [OUT, IN / 2] or [OUT, IN]
    scales,  # [OUT, IN / GROUP]
    shifts,  # [OUT, IN / GROUP], or None
    bias,  # [OUT], or None
    out,  # [num_rows, OUT]
    num_rows,
    x_stride,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    GROUP: tl.constexpr,
    OF_4_BITS: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    IN_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS_BLOCK + tl.arange(0, ROWS_BLOCK)
    columns = tl.program_id(1) * OUT_BLOCK + tl.arange(0, OUT_BLOCK)
    inner, is_row, is_column = tl.arange(0, IN_BLOCK), rows < num_rows, columns < OUT
    x_rows = x + rows.to(tl.int64)[:, None] * x_stride + inner[None, :]  # [ROWS, IN]
    total = tl.zeros([ROWS_BLOCK, OUT_BLOCK], tl.float32)
    scale_lines = scales + columns.to(tl.int64) * (IN // GROUP)
    if OF_4_BITS:
        pairs = tl.arange(0, IN_BLOCK // 2)
        bytes_of = codes + columns.to(tl.int64)[:, None] * (IN // 2) + pairs[None, :]
        for base in range(0, IN, IN_BLOCK):  # IN_BLOCK divides GROUP, so an iteration has one scale per output
            a = tl.load(x_rows + base, mask=is_row[:, None], other=0.0)
            both = tl.load(bytes_of + base // 2, mask=is_column[:, None], other=0).to(tl.int32)
            numbers = tl.interleave(both & 15, both >> 4) - 8  # [OUT, IN]
            part = tl.dot(a, tl.trans(numbers.to(a.dtype)), input_precision=PRECISION)
            total += part * tl.load(scale_lines + base // GROUP, mask=is_column, other=0.0)[None, :]
            if shifts is not None:
                shift = tl.load(
                    shifts + columns.to(tl.int64) * (IN // GROUP) + base // GROUP, mask=is_column, other=0.0
                )
                total += tl.sum(a.to(tl.float32), axis=1)[:, None] * shift[None, :]
    else:
        bytes_of = codes + columns.to(tl.int64)[:, None] * IN + inner[None, :]
        for base in range(0, IN, IN_BLOCK):
            is_in = (base + inner < IN)[None, :]
            a = tl.load(x_rows + base, mask=is_row[:, None] & is_in, other=0.0)
            numbers = tl.load(bytes_of + base, mask=is_column[:, None] & is_in, other=0.0)
            total = tl.dot(a, tl.trans(numbers.to(a.dtype)), total, input_precision=PRECISION)
        total *= tl.load(scale_lines, mask=is_column, other=0.0)[None, :]
    if bias is not None:
        total += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    position = rows.to(tl.int64)[:, None] * OUT + columns[None, :]
    tl.store(out + position, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
