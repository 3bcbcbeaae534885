"""Normalisation in Triton: one pass over each row, which stays in registers."""

# Pyright cannot check the arguments of kernel launches.
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.matmul.rounded_rows import RoundedRows
from ops.matmul.triton_float8 import round_scale, to_float8
from ops.norm import native
from ops.norm.native import add

# torch computes `add`, because it needs only one kernel for it.
__all__ = [
    "add",
    "add_layer_norm",
    "add_rms_norm",
    "add_rms_norm_round",
    "layer_norm",
    "rms_norm",
]

TILE = 1024  # elements per program; short rows (heads) share a program


class Kind(NamedTuple):
    """A kind of normalisation with its parameters."""

    weight: Tensor  # [E]
    eps: float
    unit_offset: bool = False
    centred: bool = False
    bias: Tensor | None = None  # [E]


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor:
    if weight.dim() == 2:  # one weight per head
        return native.rms_norm(x, weight, eps, unit_offset=unit_offset)
    return _norm(x, Kind(weight, eps, unit_offset))


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """Add, then normalise (see `ops.norm`). The normalised values and the sum overwrite the inputs."""
    return _add_norm(x, residual, Kind(weight, eps, unit_offset))


def add_rms_norm_round(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: int, *, unit_offset: bool = False
) -> tuple[RoundedRows, Tensor]:
    """Add, normalise and round (see `ops.norm`). The normalised values and the sum overwrite the inputs."""
    x, residual = x.contiguous(), residual.contiguous()
    numbers = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((len(x), x.shape[1] // group), dtype=torch.float32, device=x.device)
    kind = Kind(weight, eps, unit_offset)
    _launch(x.unsqueeze(0), residual, x, kind, added=True, numbers=numbers, scales=scales)
    return RoundedRows.of(x, numbers, scales), residual


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    if weight.dim() == 2:  # one weight per head
        return native.layer_norm(x, weight, bias, eps)
    return _norm(x, Kind(weight, eps, centred=True, bias=bias))


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Add, then centre and normalise (see `ops.norm`). The normalised values and the sum overwrite the inputs."""
    return _add_norm(x, residual, Kind(weight, eps, centred=True, bias=bias))


def _norm(x: Tensor, kind: Kind) -> Tensor:
    heads = x if x.dim() == 3 and x.stride(-1) == 1 else x.reshape(1, -1, x.shape[-1]).contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(heads, heads, out, kind, added=False)
    return out


def _add_norm(x: Tensor, residual: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    x, residual = x.contiguous(), residual.contiguous()
    _launch(x.unsqueeze(0), residual, x, kind, added=True)
    return x, residual


def _launch(
    x: Tensor,
    residual: Tensor,
    out: Tensor,
    kind: Kind,
    *,
    added: bool,
    numbers: Tensor | None = None,
    scales: Tensor | None = None,
) -> None:
    num_tokens, num_heads, width = x.shape
    num_rows, block = num_tokens * num_heads, triton.next_power_of_2(width)
    rows = max(1, TILE // block)
    _norm_kernel[(triton.cdiv(num_rows, rows),)](
        x,
        residual,
        kind.weight,
        kind.weight if kind.bias is None else kind.bias,  # without a bias, a valid pointer that is not read
        out,
        numbers,
        scales,
        num_rows,
        num_heads,
        x.stride(0) if num_tokens > 1 else 0,  # one token's stride is arbitrary, and Triton specialises on it
        x.stride(1),
        kind.eps,
        WIDTH=width,
        BLOCK=block,
        ROWS=rows,
        UNIT_OFFSET=kind.unit_offset,
        CENTRED=kind.centred,
        HAS_BIAS=kind.bias is not None,
        ADDED=added,
        GROUP=0 if scales is None else width // scales.shape[1],
        num_warps=min(16, max(4, block // 1024)),
    )


# These arguments vary between steps. Triton would compile further variants for the value 1 and multiples of 16.
@triton.jit(do_not_specialize=["num_rows", "num_heads"])
def _norm_kernel(
    x,  # [T, H, WIDTH]
    residual,  # [T * H, WIDTH]; if ADDED, x + residual overwrites it
    weight,  # [WIDTH]
    bias,  # [WIDTH]
    out,  # [T * H, WIDTH]
    numbers,  # e4m3 [T * H, WIDTH], the result rounded to float8; None if GROUP is 0
    scales,  # [T * H, WIDTH / GROUP]
    num_rows,
    num_heads,
    token_stride,
    head_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    CENTRED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDED: tl.constexpr,
    GROUP: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (rows < num_rows) & (columns < WIDTH)
    offset = rows // num_heads * token_stride + rows % num_heads * head_stride + columns
    values = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
    packed = rows * WIDTH + columns
    if ADDED:
        values += tl.load(residual + packed, mask=inside, other=0.0).to(tl.float32)
        total = values.to(residual.dtype.element_ty)
        tl.store(residual + packed, total, mask=inside)
        values = total.to(tl.float32)  # normalise the rounded sum
    if CENTRED:
        mean = tl.sum(values, axis=1)[:, None] / WIDTH
        values = tl.where(inside, values - mean, 0.0)
    mean_square = tl.sum(values * values, axis=1)[:, None] / WIDTH
    factor = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    if UNIT_OFFSET:
        factor += 1.0
    normed = values * tl.rsqrt(mean_square + eps) * factor
    if HAS_BIAS:
        normed += tl.load(bias + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    result = normed.to(out.dtype.element_ty)
    tl.store(out + packed, result, mask=inside)
    if GROUP == WIDTH:
        wide = result.to(tl.float32)
        scale = round_scale(tl.max(tl.abs(wide), axis=1)[:, None])  # [ROWS, 1]
        tl.store(scales + rows, scale, mask=rows < num_rows)
        tl.store(numbers + packed, to_float8(tl.clamp(wide / scale, -448.0, 448.0)), mask=inside)
    elif GROUP > 0:
        groups: tl.constexpr = WIDTH // GROUP
        grouped = result.to(tl.float32).reshape(ROWS, BLOCK // GROUP, GROUP)
        scale = round_scale(tl.max(tl.abs(grouped), axis=2))  # [ROWS, BLOCK / GROUP]
        group = tl.arange(0, BLOCK // GROUP)[None, :]
        tl.store(scales + rows * groups + group, scale, mask=(rows < num_rows) & (group < groups))
        grouped = tl.clamp(grouped / scale[:, :, None], -448.0, 448.0)
        tl.store(numbers + packed, to_float8(grouped.reshape(ROWS, BLOCK)), mask=inside)
