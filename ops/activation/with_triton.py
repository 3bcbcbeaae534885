"""Gated activations in Triton. The kernel reads both halves once and rounds the product once."""

# Pyright cannot check the arguments of kernel launches.
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.activation.native import activate, modulate

__all__ = ["activate", "gate", "modulate"]  # torch computes all but `gate`

BLOCK = 1024


def gate(x: Tensor, activation: str) -> Tensor:
    """Return activation(first half) * second half (see `ops.activation`)."""
    x = x.contiguous()
    width = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    num_rows = out.numel() // width
    _gate_kernel[(num_rows, triton.cdiv(width, BLOCK))](x, out, width, ACTIVATION=activation, BLOCK=BLOCK)
    return out


@triton.jit
def _gate_kernel(
    x,  # [rows, 2 * width]
    out,  # [rows, width]
    width,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
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
    tl.store(out + row * width + columns, (active * values).to(out.dtype.element_ty), mask=inside)
