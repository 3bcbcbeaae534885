"""Recurrent layers in C++ (`ops/cpp/source/recurrence.h`).

The kernels compute token by token, so results do not depend on how a sequence is divided into steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ops.cpp.kernel_launcher import KernelLauncher
from ops.cpp.library import TYPES, address, contiguous_tokens
from ops.cpp.structures import Convolve, Recur
from ops.recurrence import Segments, native

MAX_KEY_DIM = 256


def make(launcher: KernelLauncher) -> Mapping[str, Callable[..., Any]]:
    """Return all operations of `ops.recurrence`. `native` computes unsupported dtypes and head dimensions."""
    operations = (convolve, delta_rule, scan)
    return {operation.__name__: partial(operation, launcher) for operation in operations}


def convolve(
    launcher: KernelLauncher,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pool: Tensor,
    segments: Segments,
    *,
    gates: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Convolve each channel causally and apply silu, or multiply by gates before and after."""
    if x.dtype not in TYPES or pool.dtype != torch.float32 or weight.dtype != x.dtype:
        return native.convolve(x, weight, bias, pool, segments, gates=gates)
    x = contiguous_tokens(x)
    before, after = (None, None) if gates is None else map(contiguous_tokens, gates)
    out = launcher.empty(x.shape, x.dtype)
    operands = Convolve(
        x=address(x),
        weight=address(weight),
        bias=address(bias),
        before=address(before),
        after=address(after),
        pool=address(pool),
        out=address(out),
        spans=address(segments.spans),
        tokens=launcher.tokens(x),
        x_stride=x.stride(0),
        before_stride=0 if before is None else before.stride(0),
        after_stride=0 if after is None else after.stride(0),
        channels=x.shape[1],
        kernel=len(weight),
    )
    launcher.launch("convolve", x.dtype, operands)
    return out


def delta_rule(
    launcher: KernelLauncher,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    rate: Tensor,
    shift: Tensor,
    pool: Tensor,
    segments: Segments,
) -> Tensor:
    """Compute the gated delta rule."""
    if not computes(q, pool):
        return native.delta_rule(q, k, v, a, b, rate, shift, pool, segments)
    b = contiguous_tokens(b)
    operands = Recur(b=address(b), b_stride=b.stride(0), rate=address(rate), shift=address(shift))
    return _recur(launcher, operands, q, k, v, a, pool, segments)


def scan(
    launcher: KernelLauncher,
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    rate: Tensor,
    shift: Tensor,
    skip: Tensor,
    pool: Tensor,
    segments: Segments,
    *,
    low: float,
    high: float,
) -> Tensor:
    """Compute the selective scan of Mamba 2."""
    if not computes(b, pool):
        return native.scan(x, dt, b, c, rate, shift, skip, pool, segments, low=low, high=high)
    operands = Recur(rate=address(rate), shift=address(shift), skip=address(skip), low=low, high=high)
    return _recur(launcher, operands, c, b, x, dt, pool, segments)


def _recur(
    launcher: KernelLauncher,
    operands: Recur,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    pool: Tensor,
    segments: Segments,
) -> Tensor:
    """Set the operands that `delta_rule` and `scan` share, launch the kernel, and return its output."""
    q, k, v, a = contiguous_tokens(q), contiguous_tokens(k), contiguous_tokens(v), contiguous_tokens(a)
    out = launcher.empty(v.shape, v.dtype)
    operands.q, operands.k, operands.v, operands.a = address(q), address(k), address(v), address(a)
    operands.pool, operands.out, operands.spans = address(pool), address(out), address(segments.spans)
    operands.tokens = launcher.tokens(v)
    operands.q_stride, operands.k_stride, operands.v_stride, operands.a_stride = (x.stride(0) for x in (q, k, v, a))
    operands.groups, operands.key_dim = q.shape[1:]
    operands.heads, operands.value_dim = v.shape[1:]
    operands.wide = pool.dtype == torch.float32
    launcher.launch("recur", v.dtype, operands)
    return out


def computes(key: Tensor, pool: Tensor) -> bool:
    """Return whether the C++ kernel supports keys [T, G, D] and a pool with these dtypes and sizes."""
    return key.dtype in TYPES and pool.dtype in TYPES and key.shape[2] <= MAX_KEY_DIM
