"""Matrix products in Triton with weights of 8 or 4 bits, which become numbers of x's type in the main loop.

Of 4 bits are whole numbers in groups (`ops/matmul/grouped.py`), two in a byte, the lower half first; a group's products
are scaled once, in float32. Of 8 bits are whole numbers with a scale for each output. Rows of x are never rounded.
Other weights are plain, and products with them torch's own.
"""

# The types of a launch are not those of its kernel.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ops.matmul.grouped import WHOLE, GroupedWeight

GROUPS = (16, 32, 64, 128)  # inputs of a group that are a step of the main loop; or multiples of the last
MOST_8 = 127.0
ALIGNMENT = 256  # bytes


class Parts(NamedTuple):
    """What a weight is made of."""

    codes: Tensor  # uint8 [O, I / 2] or int8 [O, I]
    scales: Tensor  # float32 [O, G] or [O, 1]
    shifts: Tensor | None = None  # float32 [O, G]


class Packed(Tensor):
    """A weight [O, I]: a view of nothing but its shape, whose `parts` hold its numbers."""

    parts: Parts

    def detach(self) -> Self:
        """What a parameter is made of: it keeps the parts."""
        return _view(self.parts)

    @property
    def nbytes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Of all that is held in memory."""
        return self.untyped_storage().nbytes()


def _packed(parts: Parts) -> Any:
    """The parts one after the other in one memory, so that new weights can take the place of old ones."""
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
    in_size = codes.shape[1] * (2 if codes.dtype == torch.uint8 else 1)
    made = codes.view(torch.uint8).as_strided((len(codes), in_size), (0, 0)).as_subclass(Packed)
    made.parts = parts
    return made


def prepare(weight: Tensor, *, bits: int | None = None) -> Tensor:
    """The weight as it is, or rounded to 8 bits if asked (see `ops.matmul`)."""
    if bits is None:
        return weight
    if bits != 8:
        raise ValueError(f"Weights are rounded to 8 bits, not {bits}.")
    wide = weight.detach().float()
    scales = (wide.abs().amax(1, keepdim=True) / MOST_8).clamp_min(torch.finfo(torch.float32).tiny)
    return _packed(Parts((wide / scales).round_().to(torch.int8), scales))


def prepare_grouped(weight: GroupedWeight, dtype: torch.dtype) -> Tensor:
    """The weight in 4 bits; as a plain one where the kernel does not take it (see `ops.matmul`)."""
    if weight.table != WHOLE or not (weight.group in GROUPS or weight.group % GROUPS[-1] == 0):
        return weight.dequantised().to(dtype)
    codes = weight.codes[:, ::2] | (weight.codes[:, 1::2] << 4)
    shifts = None if weight.shifts is None else weight.shifts.float().contiguous()
    return _packed(Parts(codes, weight.scales.float().contiguous(), shifts))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias (see `ops.matmul`)."""
    if not isinstance(weight, Packed):
        return F.linear(x, weight, bias)
    return _product(x, weight, bias, x.dtype)


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T (see `ops.matmul`)."""
    if not isinstance(weight, Packed):
        return F.linear(x, weight)
    return _product(x, weight, None, torch.float32)


def _product(x: Tensor, weight: Packed, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    (codes, scales, shifts), (out_size, in_size) = weight.parts, weight.shape
    lines = x.reshape(-1, in_size)
    lines = lines if lines.stride(1) == 1 else lines.contiguous()
    out = torch.empty((len(lines), out_size), dtype=dtype, device=x.device)
    group = in_size // scales.shape[1]
    tile = _tile(len(lines), group if codes.dtype == torch.uint8 else 128, x.dtype)
    grid = (triton.cdiv(len(lines), tile["ROWS_BLOCK"]), triton.cdiv(out_size, tile["OUT_BLOCK"]))
    _product_kernel[grid](
        lines,
        codes,
        scales,
        shifts,
        bias,
        out,
        len(lines),
        lines.stride(0),
        OUT=out_size,
        IN=in_size,
        GROUP=group,
        OF_4_BITS=codes.dtype == torch.uint8,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        **tile,
    )
    return out.view(*x.shape[:-1], out_size)


def _tile(num_rows: int, step: int, dtype: torch.dtype) -> dict[str, Any]:
    """Tile sizes: a step of the main loop lies within a group."""
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


@triton.jit(do_not_specialize=["num_rows"])  # differs from step to step
def _product_kernel(
    x,  # [num_rows, IN]
    codes,  # [OUT, IN / 2] or [OUT, IN]
    scales,  # [OUT, IN / GROUP]
    shifts,  # the same, or none
    bias,  # [OUT] or none
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
    lines = x + rows.to(tl.int64)[:, None] * x_stride + inner[None, :]  # [ROWS, IN]
    total = tl.zeros([ROWS_BLOCK, OUT_BLOCK], tl.float32)
    scale_lines = scales + columns.to(tl.int64) * (IN // GROUP)
    if OF_4_BITS:
        pairs = tl.arange(0, IN_BLOCK // 2)
        bytes_of = codes + columns.to(tl.int64)[:, None] * (IN // 2) + pairs[None, :]
        for base in range(0, IN, IN_BLOCK):  # which a group's size divides, or it the group's
            a = tl.load(lines + base, mask=is_row[:, None], other=0.0)
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
            a = tl.load(lines + base, mask=is_row[:, None] & is_in, other=0.0)
            numbers = tl.load(bytes_of + base, mask=is_column[:, None] & is_in, other=0.0)
            total = tl.dot(a, tl.trans(numbers.to(a.dtype)), total, input_precision=PRECISION)
        total *= tl.load(scale_lines, mask=is_column, other=0.0)[None, :]
    if bias is not None:
        total += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    position = rows.to(tl.int64)[:, None] * OUT + columns[None, :]
    tl.store(out + position, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
