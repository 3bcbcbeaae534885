"""Matrix products in Triton with weights in 8 and 4 bits, which the main loop converts to x's dtype.

4-bit weights are integers or e2m1 numbers, with one scale per group of inputs (`ops/matmul/grouped.py`).

- Integers (`triton_four_bits.py`): a byte has two codes, the first in its lower half. If x is in float32, the kernel
  multiplies the sum of a group's products by the scale. If x has 16 bits, it multiplies each weight by its scale in
  float32 and then rounds it, so that an iteration of the main loop can read several groups.
- E2m1 numbers (`triton_e2m1.py`): words of eight codes have the order in which tensor cores read weights. Scales are
  stored without a common factor of their row, so that they fit into one byte: as float8 numbers (e4m3) for NVFP4, and
  as exponents for MXFP4. The kernel multiplies each output by its row's factor.

8-bit weights are integers with one scale per output. x is never rounded. `triton_float8.py` computes products with
float8 weights, and torch computes products with other weights.
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
from ops.matmul.grouped import E2M1, WHOLE, GroupedWeight, factor_scales, fits_triton, nibbles, packed_pairs
from ops.matmul.triton_e2m1 import fits_words, multiply_words, pack_words, unpack_words
from ops.matmul.triton_four_bits import add_step

FOUR_BITS = {WHOLE: torch.uint8, E2M1: torch.float4_e2m1fn_x2}  # values of the codes -> dtype of two codes in a byte
FLOATS_OF_4_BITS = FOUR_BITS[E2M1]
LARGEST_8 = 127.0
FEW_ROWS = 32  # up to this number of rows, reading the weight takes most of the time
ALIGNMENT = 256  # alignment of each part of a packed weight, in bytes


class Parts(NamedTuple):
    """Tensors of a packed weight."""

    # 4-bit codes: [O, I / 2], uint8 (integers) or float4 (e2m1, in the order of `pack_words`). 8-bit codes: [O, I],
    # int8 or float8 (e4m3). Experts have an additional first dimension.
    codes: Tensor
    # [O, G] or [O, 1], in one of three dtypes. float32: the scales. float8 (e4m3): the scales times 2 ** 8. uint8: the
    # exponents of powers of two, plus 127 or, for e2m1 codes, plus 253.
    scales: Tensor
    shifts: Tensor | None = None  # float32 [O, G]
    # float32 [O], set for e2m1 codes: the row's factor, by which its stored scales (at most 2) must be multiplied.
    factors: Tensor | None = None


class Packed(Tensor):
    """A packed weight. The tensor has the shape [..., O, I] and strides of 0; the data is in `parts`."""

    parts: Parts

    def detach(self) -> Self:
        """Return a detached tensor with the same parts. `Parameter` calls this method."""
        return _view(self.parts)

    @property
    def nbytes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Bytes of the weight's memory."""
        return self.untyped_storage().nbytes()


def pack(parts: Parts) -> Any:
    """Return a packed weight. Its parts are copied into one block of memory, which new weights can overwrite."""
    sizes = [0 if part is None else -(-part.nbytes // ALIGNMENT) * ALIGNMENT for part in parts]
    memory, first, views = torch.empty(sum(sizes), dtype=torch.uint8, device=parts.codes.device), 0, []
    for part, size in zip(parts, sizes, strict=True):
        if part is None:
            views.append(None)
            continue
        views.append(memory[first : first + part.nbytes].view(part.dtype).view(part.shape).copy_(part))
        first += size
    return _view(Parts(*views))


def as_bytes(scales: Tensor) -> Tensor:
    """Return float8 scales as uint8, because older GPUs lack float8. Return other scales unchanged."""
    return scales.view(torch.uint8) if scales.dtype == torch.float8_e4m3fn else scales


def _view(parts: Parts) -> Any:
    codes = parts.codes
    shape = (*codes.shape[:-1], codes.shape[-1] * (1 + is_of_4_bits(codes)))
    packed = codes.view(torch.uint8).as_strided(shape, (0,) * len(shape)).as_subclass(Packed)
    packed.parts = parts
    return packed


def is_of_4_bits(codes: Tensor) -> bool:
    """Return whether each byte of `codes` has two 4-bit codes."""
    return codes.dtype in FOUR_BITS.values()


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
    """Return the packed weight, or the dequantised weight if the kernel does not support it (see `ops.matmul`)."""
    if weight.floating:
        return pack(Parts(weight.codes.view(torch.float8_e4m3fn), weight.scales.float()))
    if not fits_triton(weight):
        return weight.dequantised().to(dtype)
    scales, factors = weight.scales.float().contiguous(), None
    if weight.table == E2M1:
        if weight.shifts is not None or not fits_words(weight.codes.shape[-1]):
            return weight.dequantised().to(dtype)
        codes = pack_words(weight.codes)
        scales, factors = _scales_of_floats(scales, powers=weight.powers)
    else:
        codes = packed_pairs(weight.codes)
        if weight.powers:
            scales = (scales.view(torch.int32) >> 23).to(torch.uint8)
    shifts = None if weight.shifts is None else weight.shifts.float().contiguous()
    return pack(Parts(codes.view(FOUR_BITS[weight.table]), scales, shifts, factors))


def _scales_of_floats(scales: Tensor, *, powers: bool) -> tuple[Tensor, Tensor]:
    """Return the scales [..., G] of e2m1 codes as `Parts.scales`, and the rows' factors [...]."""
    if not powers and (factored := factor_scales(scales)) is not None:
        numbers, factors = factored
        return numbers, factors * 256.0
    largest = scales.abs().amax(-1, keepdim=True)
    factors = torch.where(largest > 0, largest, 1.0).log2().ceil().exp2()
    scales = scales / factors
    if powers:
        scales = ((scales.view(torch.int32) >> 23) + 126).to(torch.uint8)
    return scales, factors.squeeze(-1)


def unpacked(parts: Parts) -> Tensor:
    """Return a dequantised copy of a 4-bit weight in float32."""
    codes, scales, shifts, factors = parts
    table = next(table for table, stored in FOUR_BITS.items() if stored == codes.dtype)
    both = codes.view(torch.uint8)
    if scales.dtype == torch.uint8:
        bias = 126 if factors is not None else 0
        scales = (scales.to(torch.int32) - bias << 23).view(torch.float32)
    elif scales.dtype == torch.float8_e4m3fn:
        scales = scales.float() / 256.0
    if factors is not None:
        scales = scales * factors.unsqueeze(-1)
    numbers = unpack_words(both) if table == E2M1 else nibbles(both)
    return GroupedWeight(numbers, scales, shifts, table).dequantised()


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


def row_group(weight: Tensor) -> int | None:
    """Return the number of inputs per scale if `linear` rounds the rows of x to float8 (see `ops.matmul`)."""
    if not isinstance(weight, Packed) or weight.parts.codes.dtype != torch.float8_e4m3fn:
        return None
    if weight.parts.scales.shape[-2] != weight.shape[-2]:  # scales per block of outputs: see `block_scaled.py`
        return None
    if not triton_float8.multiplies_float8(weight.parts.codes.device):
        return None
    return triton_float8.row_group(weight.parts.scales.shape[-1], weight.shape[-1])


def _product(x: Tensor, weight: Packed, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    (codes, scales, shifts, factors), (out_size, in_size) = weight.parts, weight.shape
    rows = x if x.dim() == 2 else x.reshape(-1, in_size)  # a reshape would drop the rounding of `RoundedRows`
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    if codes.dtype == torch.float8_e4m3fn:
        rounded = triton_float8.multiplies_float8(x.device)
        out = triton_float8.product(rows, codes, scales, bias, dtype, rounded_rows=rounded)
        return out.view(*x.shape[:-1], out_size)
    out = torch.empty((len(rows), out_size), dtype=dtype, device=x.device)
    group, of_4_bits, floating = in_size // scales.shape[1], is_of_4_bits(codes), codes.dtype == FLOATS_OF_4_BITS
    if floating:
        tile = tile_of_words(len(rows), "ROWS_BLOCK", x.dtype)
    else:
        tile = _tile(len(rows), group if of_4_bits else in_size, x.dtype, of_4_bits=of_4_bits)
    columns, splits, parts = triton.cdiv(out_size, tile["OUT_BLOCK"]), 1, out.unsqueeze(0)
    if len(rows) <= FEW_ROWS:
        splits = triton_float8.num_splits(columns, triton.cdiv(in_size, tile["IN_BLOCK"]))
    if splits > 1:
        parts = torch.empty((splits, len(rows), out_size), dtype=torch.float32, device=x.device)
    _product_kernel[triton.cdiv(len(rows), tile["ROWS_BLOCK"]), columns, splits](
        rows,
        codes.view(torch.int32 if floating else torch.uint8) if of_4_bits else codes,
        as_bytes(scales),
        shifts,
        factors,
        bias if splits == 1 else None,
        parts,
        len(rows),
        rows.stride(0),
        OUT=out_size,
        IN=in_size,
        GROUP=group,
        SPLITS=splits,
        OF_4_BITS=of_4_bits,
        FLOATING=floating,
        FLOAT8_SCALES=scales.dtype == torch.float8_e4m3fn,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        **tile,
    )
    if splits > 1:
        triton_float8.add_parts(parts, bias, out)
    return out.view(*x.shape[:-1], out_size)


def tile_of_words(num_rows: int, name: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the tile sizes of products with e2m1 weights. `name` is the name of the size in rows."""
    rows = min(128, max(16, triton.next_power_of_2(num_rows)))
    if dtype.itemsize == 4:
        return {name: 16, "OUT_BLOCK": 32, "IN_BLOCK": 32, "num_warps": 4, "num_stages": 2}
    if rows <= FEW_ROWS:  # reading the weight takes most of the time, so many loads are in flight
        return {name: rows, "OUT_BLOCK": 64, "IN_BLOCK": 128, "num_warps": 4, "num_stages": 4}
    return {name: rows, "OUT_BLOCK": 128, "IN_BLOCK": 64, "num_warps": 8, "num_stages": 4}


def _tile(num_rows: int, group: int, dtype: torch.dtype, *, of_4_bits: bool) -> dict[str, Any]:
    """Return the tile sizes. An iteration of the main loop reads whole groups, or a part of one group."""
    if dtype.itemsize == 4:  # an iteration reads inputs of one group only
        return {"ROWS_BLOCK": 16, "OUT_BLOCK": 32, "IN_BLOCK": min(group, 32), "num_warps": 4, "num_stages": 2}
    if num_rows <= FEW_ROWS:  # reading the weight takes most of the time, so many loads are in flight
        rows = 16 if num_rows <= 16 else 32
        return {
            "ROWS_BLOCK": rows,
            "OUT_BLOCK": 32,
            "IN_BLOCK": 256 if of_4_bits else 128,
            "num_warps": 4,
            "num_stages": 4,
        }
    return {"ROWS_BLOCK": 64, "OUT_BLOCK": 128, "IN_BLOCK": 64, "num_warps": 8, "num_stages": 3}


# `num_rows` varies between steps. Triton would compile further variants for the value 1 and multiples of 16.
@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    x,  # [num_rows, IN]
    codes,  # [OUT, IN / 2] or [OUT, IN]; words (int32) [OUT, IN / 8] if FLOATING
    scales,  # [OUT, IN / GROUP], see `Parts`; float8 as uint8
    shifts,  # [OUT, IN / GROUP], or None
    factors,  # [OUT], or None
    bias,  # [OUT], or None
    out,  # [SPLITS, num_rows, OUT]
    num_rows,
    x_stride,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    OF_4_BITS: tl.constexpr,
    FLOATING: tl.constexpr,
    FLOAT8_SCALES: tl.constexpr,
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
    shift_lines = None if shifts is None else shifts + columns.to(tl.int64) * (IN // GROUP)
    steps: tl.constexpr = (IN + IN_BLOCK - 1) // IN_BLOCK
    per_split: tl.constexpr = (steps + SPLITS - 1) // SPLITS * IN_BLOCK
    first = tl.program_id(2) * per_split
    end = min(first + per_split, IN)
    if FLOATING:
        words_of = codes + columns.to(tl.int64) * (IN // 8)
        total = multiply_words(
            x_rows, is_row, words_of, scale_lines, is_column, first, end, IN, GROUP, FLOAT8_SCALES, PRECISION
        )
        total *= tl.load(factors + columns, mask=is_column, other=0.0)[None, :]
    elif OF_4_BITS:
        pairs = tl.arange(0, IN_BLOCK // 2)
        bytes_of = codes + columns.to(tl.int64)[:, None] * (IN // 2) + pairs[None, :]
        for base in range(first, end, IN_BLOCK):
            a = tl.load(x_rows + base, mask=is_row[:, None] & (base + inner < IN)[None, :], other=0.0)
            is_byte = is_column[:, None] & (base // 2 + pairs < IN // 2)[None, :]  # this form permits wide loads
            both = tl.load(bytes_of + base // 2, mask=is_byte, other=0)
            total = add_step(total, a, both, scale_lines, shift_lines, is_column, base, IN, GROUP, PRECISION)
    else:
        bytes_of = codes + columns.to(tl.int64)[:, None] * IN + inner[None, :]
        for base in range(first, end, IN_BLOCK):
            is_in = (base + inner < IN)[None, :]
            a = tl.load(x_rows + base, mask=is_row[:, None] & is_in, other=0.0)
            numbers = tl.load(bytes_of + base, mask=is_column[:, None] & is_in, other=0.0)
            total = tl.dot(a, tl.trans(numbers.to(a.dtype)), total, input_precision=PRECISION)
        total *= tl.load(scale_lines, mask=is_column, other=0.0)[None, :]
    if bias is not None:
        total += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    position = (tl.program_id(2).to(tl.int64) * num_rows + rows)[:, None] * OUT + columns[None, :]
    tl.store(out + position, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
