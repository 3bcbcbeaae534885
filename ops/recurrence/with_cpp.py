"""Recurrent layers in C++, token by token: the same bits however a sequence is cut (`ops/cpp/source/recurrence.h`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ops.cpp.kernel_launcher import KernelLauncher
from ops.cpp.library import TYPES, address, in_line
from ops.cpp.structures import Convolve, Recur
from ops.recurrence import Segments, native

MAX_KEY_DIM = 256


def make(launcher: KernelLauncher) -> Mapping[str, Callable[..., Any]]:
    """All of `ops.recurrence`. Pools and heads that the kernels do not take go to `native`."""
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
    """A causal convolution of each channel, through silu or between gates."""
    if x.dtype not in TYPES or pool.dtype != torch.float32 or weight.dtype != x.dtype:
        return native.convolve(x, weight, bias, pool, segments, gates=gates)
    x = in_line(x)
    before, behind = (None, None) if gates is None else map(in_line, gates)
    out = launcher.empty(x.shape, x.dtype)
    operands = Convolve(
        x=address(x),
        weight=address(weight),
        bias=address(bias),
        before=address(before),
        behind=address(behind),
        pool=address(pool),
        out=address(out),
        spans=address(segments.spans),
        tokens=launcher.tokens(x),
        x_stride=x.stride(0),
        before_stride=0 if before is None else before.stride(0),
        behind_stride=0 if behind is None else behind.stride(0),
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
    """The gated delta rule."""
    if not computes(q, pool):
        return native.delta_rule(q, k, v, a, b, rate, shift, pool, segments)
    b = in_line(b)
    written = Recur(b=address(b), b_stride=b.stride(0), rate=address(rate), shift=address(shift))
    return _recur(launcher, written, q, k, v, a, pool, segments)


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
    """The selective scan of Mamba 2."""
    if not computes(b, pool):
        return native.scan(x, dt, b, c, rate, shift, skip, pool, segments, low=low, high=high)
    own = Recur(rate=address(rate), shift=address(shift), skip=address(skip), low=low, high=high)
    return _recur(launcher, own, c, b, x, dt, pool, segments)


def _recur(
    launcher: KernelLauncher,
    own: Recur,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    pool: Tensor,
    segments: Segments,
) -> Tensor:
    """With the operands that both have, beside those of its own."""
    q, k, v, a = in_line(q), in_line(k), in_line(v), in_line(a)
    out = launcher.empty(v.shape, v.dtype)
    own.q, own.k, own.v, own.a = address(q), address(k), address(v), address(a)
    own.pool, own.out, own.spans = address(pool), address(out), address(segments.spans)
    own.tokens = launcher.tokens(v)
    own.q_stride, own.k_stride, own.v_stride, own.a_stride = (x.stride(0) for x in (q, k, v, a))
    own.groups, own.key_dim = q.shape[1:]
    own.heads, own.value_dim = v.shape[1:]
    own.wide = pool.dtype == torch.float32
    launcher.launch("recur", v.dtype, own)
    return out


def computes(key: Tensor, pool: Tensor) -> bool:
    """Whether the C++ kernel takes keys [T, G, D] and states like these."""
    return key.dtype in TYPES and pool.dtype in TYPES and key.shape[2] <= MAX_KEY_DIM
