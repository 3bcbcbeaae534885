"""Matrix products in Triton with float8 weights (e4m3), which have one scale per output and group of inputs.

On GPUs with float8 products, the rows of x are rounded to e4m3 too, with one scale per row and group. The rounding of a
row does not depend on other rows. On older GPUs, the weights are converted to x's dtype instead, without loss.
"""

# Pyright cannot check the arguments of kernel launches.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.matmul.rounded_rows import RoundedRows

FLOAT8_CAPABILITY = (8, 9)  # minimum compute capability of float8 products
LARGEST = tl.constexpr(448.0)  # largest value of e4m3
ROUND_BLOCK = 1024  # numbers per iteration of a program that rounds rows
FEW_ROWS = 32  # up to this number of rows, reading the weight takes most of the time
MIN_PROGRAMS = 128  # programs that fill a GPU: about the number of multiprocessors
MAX_SPLITS = 8
# torch's float8 product requires that sizes are multiples of this number. It returns bfloat16.
TORCH_MULTIPLE = 16


def multiplies_float8(device: torch.device) -> bool:
    """Return whether the device has float8 products. True for a CPU, so that tests can run these kernels."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= FLOAT8_CAPABILITY


def row_group(groups: int, in_size: int) -> int | None:
    """Return the number of inputs per scale if the kernel before a product can round the product's input, else None.

    It can if a row is one group, or if the group size is a power of two.
    """
    group = in_size // groups
    return group if groups == 1 or group & (group - 1) == 0 else None


def round_rows(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Round x [T, I] to e4m3 with one scale per row and group of inputs: the group's largest magnitude / 448.

    Return the numbers [T, I] and the scales, float32 [T, I / group]. If x is `RoundedRows` with groups of this size,
    return its own numbers and scales.
    """
    if isinstance(x, RoundedRows) and (known := x.rounding(group)) is not None:
        return known
    num_rows, in_size = x.shape
    numbers = torch.empty((num_rows, in_size), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((num_rows, in_size // group), dtype=torch.float32, device=x.device)
    block = min(triton.next_power_of_2(group), ROUND_BLOCK)
    lines = ROUND_BLOCK // block
    grid = (num_rows, triton.cdiv(in_size // group, lines))
    _round_kernel[grid](
        x,
        numbers,
        scales,
        x.stride(0),
        GROUPS=in_size // group,
        GROUP=group,
        LINES=lines,
        BLOCK=block,
        num_warps=4,
    )
    return numbers, scales


def product(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype, *, rounded_rows: bool
) -> Tensor:
    """Return x [T, I] @ weight.T + bias in `dtype`, [T, O].

    The weight is `codes` (e4m3 [O, I]) times `scales` (float32 [O, G]). With `rounded_rows` x is rounded to e4m3.
    """
    (num_rows, in_size), (out_size, groups) = x.shape, scales.shape
    row_scales = None
    if rounded_rows:
        x, row_scales = round_rows(x, in_size // groups)
        if _in_torch(num_rows, codes.shape, groups, dtype, bias):
            return torch._scaled_mm(
                x, codes.t(), scale_a=row_scales, scale_b=scales.t(), bias=bias, out_dtype=dtype, use_fast_accum=True
            )
    tile = _tile(num_rows, inputs_per_step(in_size, groups), x.dtype)
    columns = triton.cdiv(out_size, tile["OUT_BLOCK"])
    splits = _num_splits(num_rows, columns, triton.cdiv(in_size, tile["IN_BLOCK"]))
    out = torch.empty((num_rows, out_size), dtype=dtype, device=x.device)
    parts = out.unsqueeze(0)
    if splits > 1:
        parts = torch.empty((splits, num_rows, out_size), dtype=torch.float32, device=x.device)
    _product_kernel[(triton.cdiv(num_rows, tile["ROWS_BLOCK"]), columns, splits)](
        x,
        row_scales,
        codes.view(torch.uint8),
        scales,
        bias if splits == 1 else None,
        parts,
        num_rows,
        x.stride(0),
        OUT=out_size,
        IN=in_size,
        GROUP=in_size // groups,
        SPLITS=splits,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        **tile,
    )
    if splits > 1:
        add_parts(parts, bias, out)
    return out


def add_parts(parts: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Add `parts` (float32 [S, T, O]) in the order of S, add the bias, and write the result to `out` [T, O]."""
    splits, num_rows, out_size = parts.shape
    block = min(1024, triton.next_power_of_2(out_size))
    _add_kernel[(num_rows, triton.cdiv(out_size, block))](
        parts, bias, out, num_rows, OUT=out_size, SPLITS=splits, BLOCK=block
    )


def num_splits(num_programs: int, num_steps: int) -> int:
    """Return the number of programs among which to divide each main loop, so that programs fill the GPU.

    Without a division there are `num_programs` programs, with a main loop of `num_steps` iterations each.
    """
    if num_programs >= 3 * MIN_PROGRAMS // 4:
        return 1
    wanted = min(MAX_SPLITS, num_steps, MIN_PROGRAMS // num_programs)
    return 1 << max(0, wanted.bit_length() - 1)


def _num_splits(num_rows: int, columns: int, num_steps: int) -> int:
    return num_splits(columns, num_steps) if num_rows <= FEW_ROWS else 1


def _in_torch(num_rows: int, shape: torch.Size, groups: int, dtype: torch.dtype, bias: Tensor | None) -> bool:
    """Return whether torch computes the product: many rows, bfloat16, and one scale per output."""
    if num_rows <= FEW_ROWS or groups != 1 or dtype != torch.bfloat16 or (bias is not None and bias.dtype != dtype):
        return False
    return not any(size % TORCH_MULTIPLE for size in shape)


def inputs_per_step(in_size: int, groups: int) -> int:
    """Return the maximum number of inputs that an iteration of the main loop reads: up to 256, all in one group.

    If a row is one group, the last iteration may read fewer.
    """
    group = in_size // groups
    return 256 if groups == 1 else min(group & -group, 256)


def _tile(num_rows: int, step: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the tile sizes. An iteration of the main loop reads at most `step` inputs."""
    if dtype.itemsize == 4:
        return {"ROWS_BLOCK": 16, "OUT_BLOCK": 32, "IN_BLOCK": min(step, 32), "num_warps": 4, "num_stages": 2}
    if num_rows <= FEW_ROWS:
        rows = 16 if num_rows <= 16 else 32
        return {"ROWS_BLOCK": rows, "OUT_BLOCK": 32, "IN_BLOCK": step, "num_warps": 4, "num_stages": 4}
    return {
        "ROWS_BLOCK": 128 if num_rows > 64 else 64,
        "OUT_BLOCK": 128,
        "IN_BLOCK": min(step, 128 if dtype.itemsize == 1 else 64),
        "num_warps": 8,
        "num_stages": 3,
    }


@triton.jit
def to_float8(x):
    """Round float32 numbers of magnitude up to 448 to e4m3, to nearest even.

    The function rounds in float32 before it converts, because the conversion of Triton's interpreter rounds wrongly.
    """
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    small = (x + 24576.0) - 24576.0  # subnormal numbers are multiples of 2 ** -9
    return tl.where(tl.abs(x) < 0.015625, small, normal).to(tl.float8e4nv)


@triton.jit
def round_scale(largest):
    """Return the scale with which a group of numbers is rounded to e4m3. `largest` is their largest magnitude."""
    return tl.maximum(largest / LARGEST, 1e-12)


@triton.jit
def from_float8(codes, like):
    """Convert codes of e4m3 (uint8) to the dtype of `like`, exactly: 16-bit floats or float32."""
    if like.dtype == tl.float16:
        shifted = ((codes.to(tl.int16) & 0x80) << 8) | ((codes.to(tl.int16) & 0x7F) << 7)
        return shifted.to(tl.float16, bitcast=True) * 256.0
    wide = ((codes.to(tl.int32) & 0x80) << 24) | ((codes.to(tl.int32) & 0x7F) << 20)
    return (wide.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(like.dtype)  # 2 ** 120


@triton.jit
def _round_kernel(
    x,  # [T, GROUPS * GROUP]
    numbers,  # [T, GROUPS * GROUP]
    scales,  # [T, GROUPS]
    stride,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    groups, inner = tl.program_id(1) * LINES + tl.arange(0, LINES), tl.arange(0, BLOCK)
    is_group = groups < GROUPS
    offsets = groups[:, None] * GROUP + inner[None, :]  # [LINES, BLOCK]
    largest = tl.zeros([LINES], tl.float32)
    for base in range(0, GROUP, BLOCK):
        inside = is_group[:, None] & (base + inner < GROUP)[None, :]
        part = tl.load(x + row * stride + offsets + base, mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(part), axis=1))
    scale = round_scale(largest)
    tl.store(scales + row * GROUPS + groups, scale, mask=is_group)
    for base in range(0, GROUP, BLOCK):
        inside = is_group[:, None] & (base + inner < GROUP)[None, :]
        part = tl.load(x + row * stride + offsets + base, mask=inside, other=0.0).to(tl.float32)
        part = tl.clamp(part / scale[:, None], -LARGEST, LARGEST)
        tl.store(numbers + row * (GROUPS * GROUP) + offsets + base, to_float8(part), mask=inside)


# `num_rows` varies between steps. Triton would compile further variants for the value 1 and multiples of 16.
@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    x,  # [num_rows, IN]
    row_scales,  # [num_rows, IN / GROUP], or None if x is not rounded
    codes,  # uint8 [OUT, IN]
    scales,  # [OUT, IN / GROUP]
    bias,  # [OUT], or None
    out,  # [SPLITS, num_rows, OUT]
    num_rows,
    x_stride,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    IN_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS_BLOCK + tl.arange(0, ROWS_BLOCK)
    columns = tl.program_id(1) * OUT_BLOCK + tl.arange(0, OUT_BLOCK)
    inner, is_row, is_column = tl.arange(0, IN_BLOCK), rows < num_rows, columns < OUT
    x_rows = x + rows.to(tl.int64)[:, None] * x_stride + inner[None, :]  # [ROWS, IN]
    code_rows = codes + columns.to(tl.int64)[:, None] * IN + inner[None, :]  # [OUT, IN]
    scale_lines = scales + columns.to(tl.int64) * (IN // GROUP)
    row_lines = row_scales + rows.to(tl.int64) * (IN // GROUP) if row_scales is not None else None
    total = tl.zeros([ROWS_BLOCK, OUT_BLOCK], tl.float32)
    steps: tl.constexpr = (IN + IN_BLOCK - 1) // IN_BLOCK
    per_split: tl.constexpr = (steps + SPLITS - 1) // SPLITS * IN_BLOCK
    first = tl.program_id(2) * per_split
    for base in range(first, min(first + per_split, IN), IN_BLOCK):
        is_in = (base + inner < IN)[None, :]
        a = tl.load(x_rows + base, mask=is_row[:, None] & is_in, other=0.0)
        b = tl.load(code_rows + base, mask=is_column[:, None] & is_in, other=0)
        b = from_float8(b, a) if row_scales is None else b.to(tl.float8e4nv, bitcast=True)
        if GROUP == IN:
            total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
        else:
            group = base // GROUP
            part = tl.dot(a, tl.trans(b), input_precision=PRECISION)
            part *= tl.load(scale_lines + group, mask=is_column, other=0.0)[None, :]
            if row_scales is not None:
                part *= tl.load(row_lines + group, mask=is_row, other=0.0)[:, None]
            total += part
    if GROUP == IN:
        total *= tl.load(scale_lines, mask=is_column, other=0.0)[None, :]
        if row_scales is not None:
            total *= tl.load(row_lines, mask=is_row, other=0.0)[:, None]
    if bias is not None:
        total += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    position = (tl.program_id(2).to(tl.int64) * num_rows + rows)[:, None] * OUT + columns[None, :]
    tl.store(out + position, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


# `num_rows` varies between steps. Triton would compile further variants for the value 1 and multiples of 16.
@triton.jit(do_not_specialize=["num_rows"])
def _add_kernel(
    parts,  # [SPLITS, num_rows, OUT]
    bias,  # [OUT], or None
    out,  # [num_rows, OUT]
    num_rows,
    OUT: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < OUT
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + (split * num_rows + row) * OUT + columns, mask=is_column, other=0.0)
    if bias is not None:
        total += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out + row * OUT + columns, total.to(out.dtype.element_ty), mask=is_column)
