"""Gated activations in Triton. The kernel reads both halves of x once, and rounds the result once."""

# Pyright cannot check the arguments of kernel launches.
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.activation.native import activate, modulate
from ops.matmul.rounded_rows import RoundedRows
from ops.matmul.triton_float8 import round_rows, round_scale, to_float8

__all__ = ["activate", "gate", "gate_round", "modulate"]  # torch computes `activate` and `modulate`

BLOCK = 1024
MAX_BLOCK = 32_768  # maximum number of elements that one program rounds


def gate(x: Tensor, activation: str) -> Tensor:
    """Return activation(first half) * second half (see `ops.activation`)."""
    x = x.contiguous()
    width = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    num_rows = out.numel() // width
    _gate_kernel[(num_rows, triton.cdiv(width, BLOCK))](
        x, out, width, None, None, ACTIVATION=activation, BLOCK=BLOCK, GROUP=0
    )
    return out


def gate_round(x: Tensor, activation: str, group: int) -> RoundedRows:
    """Return activation(first half) * second half, also rounded to float8 (see `ops.activation`)."""
    width = x.shape[-1] // 2
    block = triton.next_power_of_2(width) if group == width else max(BLOCK, group)
    if block > MAX_BLOCK:
        out = gate(x, activation)
        return RoundedRows.of(out, *round_rows(out, group))
    x = x.contiguous()
    num_rows = len(x)
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    numbers = torch.empty((num_rows, width), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((num_rows, width // group), dtype=torch.float32, device=x.device)
    _gate_kernel[(num_rows, triton.cdiv(width, block))](
        x,
        out,
        width,
        numbers,
        scales,
        ACTIVATION=activation,
        BLOCK=block,
        GROUP=block if group == width else group,
        num_warps=min(32, max(4, block // 512)),
    )
    return RoundedRows.of(out, numbers, scales)


@triton.jit
def _gate_kernel(
    x,  # [rows, 2 * width]
    out,  # [rows, width]
    width,
    numbers,  # e4m3 [rows, width], the result rounded to float8; None if GROUP is 0
    scales,  # [rows, width / GROUP]
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gates = tl.load(x + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(x + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        active = gates * tl.sigmoid(gates)
    elif ACTIVATION == "gelu":
        active = 0.5 * gates * (1.0 + tl.erf(gates * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(y)) / 2 is sigmoid(2 y), and y is sqrt(2 / pi) * (x + 0.044715 x^3).
        active = gates * tl.sigmoid(1.5957691216057308 * (gates + 0.044715 * gates * gates * gates))
    elif ACTIVATION == "clamped_swiglu":
        gates = tl.minimum(gates, 7.0)
        active = gates * tl.sigmoid(1.702 * gates)
        values = tl.clamp(values, -7.0, 7.0) + 1.0
    else:
        active = tl.maximum(gates, 0.0)
        if ACTIVATION == "relu2":
            active = active * active
        else:
            tl.static_assert(ACTIVATION == "relu")
    result = (active * values).to(out.dtype.element_ty)
    tl.store(out + row * width + columns, result, mask=inside)
    if GROUP > 0:
        grouped = result.to(tl.float32).reshape(BLOCK // GROUP, GROUP)  # elements outside the row are 0
        scale = round_scale(tl.max(tl.abs(grouped), axis=1))
        num_groups = tl.cdiv(width, GROUP)
        group = tl.program_id(1) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
        tl.store(scales + row * num_groups + group, scale, mask=group < num_groups)
        grouped = tl.clamp(grouped / scale[:, None], -448.0, 448.0)
        tl.store(numbers + row * width + columns, to_float8(grouped.reshape(BLOCK)), mask=inside)
