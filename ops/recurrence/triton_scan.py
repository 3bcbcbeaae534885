"""The selective scan of Mamba 2 in Triton.

A chain is a list of spans that one program computes in order (`triton_spans.py`). Short chains (decoded tokens, draft
tokens) are computed token by token; each program keeps some columns of one head's state in registers. Long chains are
computed in chunks: matrix products compute a chunk's results and the state for the next chunk (arXiv 2405.21060).
Products of 16-bit inputs accumulate in float32. Kernels hold states in float32.
"""

# Pyright cannot check the arguments of kernel launches.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.recurrence import Segments
from ops.recurrence.triton_spans import COLUMNS, KIND, NEXT, links_of
from ops.recurrence.triton_states import (
    chunk_of,
    columns_block,
    is_large,
    padded,
    precision,
    scratch_slot,
    softplus,
    with_heads,
)

MAX_TIME = 3e38  # replaces an infinite upper bound of the time step


def scan(
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
    """Compute the selective scan of Mamba 2 (see `ops.recurrence`)."""
    x, b, c = with_heads(x), with_heads(b), with_heads(c)
    dt = dt if dt.stride(1) == 1 else dt.contiguous()
    out, spans = torch.empty(x.shape, dtype=x.dtype, device=x.device), segments.spans
    if not len(x):
        return out
    order = links_of(segments, len(x), chunk_of(b), scratch_slot(pool, segments))
    (groups, state_size), (heads, size) = b.shape[1:], x.shape[1:]
    operands = (x, dt, b, c, rate, shift, skip, pool, out, spans, order.links, low, min(high, MAX_TIME))
    strides = (spans.stride(0), spans.stride(1), *(each.stride(0) for each in (x, dt, b, c)))
    shapes = {"HEADS": heads, "RATIO": heads // groups, "N": state_size, "P": size, "N_BLOCK": padded(state_size)}
    block = columns_block(size)
    _step_kernel[(len(spans), heads, triton.cdiv(size, block))](
        *operands,
        scratch_slot(pool, segments),
        *strides,
        **shapes,
        P_BLOCK=block,
        SINGLE=order.single,
        num_warps=4,
    )
    if order.may_be_long:
        block = columns_block(size, large=is_large(b))
        _chunk_kernel[(len(spans), heads, triton.cdiv(size, block))](
            *operands,
            *strides,
            **shapes,
            P_BLOCK=block,
            CHUNK=chunk_of(b),
            PRECISION=precision(x.dtype),
            num_warps=8,
            num_stages=1 if is_large(b) else 2,
        )
    return out


@triton.jit
def _times(dt, inside, shift, low, high):
    """Return the time step of each token, or 0 where `inside` is false. `dt` are pointers to the tokens' values."""
    time = softplus(tl.load(dt, mask=inside, other=0.0).to(tl.float32) + shift)
    return tl.where(inside, tl.minimum(tl.maximum(time, low), high), 0.0)


@triton.jit(do_not_specialize=["span_stride", "field_stride", "low", "high", "scratch"])
def _step_kernel(
    x,  # [T, HEADS, P]
    dt,  # [T, HEADS]
    b,  # [T, G, N]
    c,  # [T, G, N]
    rate,  # [HEADS]
    shift,  # [HEADS]
    skip,  # [HEADS]
    pool,  # [L, HEADS, N, P]
    out,  # [T, HEADS, P]
    spans,  # [S, 4]
    links,  # [S, COLUMNS]
    low,
    high,
    scratch,  # slot of padding rows, which is not written; -1: no padding rows
    span_stride,
    field_stride,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    HEADS: tl.constexpr,
    RATIO: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    N_BLOCK: tl.constexpr,
    P_BLOCK: tl.constexpr,
    SINGLE: tl.constexpr,
):
    span, head = tl.program_id(0), tl.program_id(1)
    if not SINGLE:  # noqa: SIM102 - a condition at compile time
        if tl.load(links + span * COLUMNS + KIND) != 1:
            return
    rows, columns = tl.arange(0, N_BLOCK), tl.program_id(2) * P_BLOCK + tl.arange(0, P_BLOCK)
    is_row, is_column = rows < N, columns < P
    is_state = is_row[:, None] & is_column[None, :]
    place = (head * N + rows)[:, None] * P + columns[None, :]
    shared = head // RATIO * N + rows
    scale, offset = tl.exp(tl.load(rate + head)), tl.load(shift + head)
    passed = tl.load(skip + head)
    while span >= 0:
        fields = spans + span * span_stride
        read, write = tl.load(fields).to(tl.int64), tl.load(fields + field_stride).to(tl.int64)
        start, count = tl.load(fields + 2 * field_stride).to(tl.int64), tl.load(fields + 3 * field_stride)
        state = tl.load(pool + read * HEADS * N * P + place, mask=is_state, other=0.0).to(tl.float32)
        for step in range(count):
            token = start + step
            key = tl.load(b + token * b_stride + shared, mask=is_row, other=0.0).to(tl.float32)
            query = tl.load(c + token * c_stride + shared, mask=is_row, other=0.0).to(tl.float32)
            value = tl.load(x + token * x_stride + head * P + columns, mask=is_column, other=0.0).to(tl.float32)
            time = _times(dt + token * dt_stride + head, True, offset, low, high)
            state = state * tl.exp(-scale * time) + key[:, None] * (value * time)[None, :]
            result = tl.sum(state * query[:, None], axis=0) + passed * value
            target = out + (token * HEADS + head) * P + columns
            tl.store(target, result.to(out.dtype.element_ty), mask=is_column)
        if write != scratch:
            tl.store(pool + write * HEADS * N * P + place, state.to(pool.dtype.element_ty), mask=is_state)
        if SINGLE:
            span = -1
        else:
            tl.debug_barrier()  # the next span may read this state
            span = tl.load(links + span * COLUMNS + NEXT)


@triton.jit(do_not_specialize=["span_stride", "field_stride", "low", "high"])
def _chunk_kernel(
    x,  # [T, HEADS, P]
    dt,  # [T, HEADS]
    b,  # [T, G, N]
    c,  # [T, G, N]
    rate,  # [HEADS]
    shift,  # [HEADS]
    skip,  # [HEADS]
    pool,  # [L, HEADS, N, P]
    out,  # [T, HEADS, P]
    spans,  # [S, 4]
    links,  # [S, COLUMNS]
    low,
    high,
    span_stride,
    field_stride,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    HEADS: tl.constexpr,
    RATIO: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    N_BLOCK: tl.constexpr,
    P_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    span, head = tl.program_id(0), tl.program_id(1)
    if tl.load(links + span * COLUMNS + KIND) != 2:
        return
    lanes, rows = tl.arange(0, CHUNK), tl.arange(0, N_BLOCK)
    columns = tl.program_id(2) * P_BLOCK + tl.arange(0, P_BLOCK)
    is_row, is_column = rows < N, columns < P
    is_state = is_row[:, None] & is_column[None, :]
    place = (head * N + rows)[:, None] * P + columns[None, :]
    shared = (head // RATIO * N + rows)[None, :]
    scale, offset = tl.exp(tl.load(rate + head)), tl.load(shift + head)
    passed = tl.load(skip + head)
    while span >= 0:
        fields = spans + span * span_stride
        read, write = tl.load(fields).to(tl.int64), tl.load(fields + field_stride).to(tl.int64)
        start, count = tl.load(fields + 2 * field_stride), tl.load(fields + 3 * field_stride)
        state = tl.load(pool + read * HEADS * N * P + place, mask=is_state, other=0.0).to(tl.float32)
        for base in range(0, count, CHUNK):
            inside = base + lanes < count
            token = (start + base + lanes).to(tl.int64)
            is_key, is_value = inside[:, None] & is_row[None, :], inside[:, None] & is_column[None, :]
            key = tl.load(b + token[:, None] * b_stride + shared, mask=is_key, other=0.0)
            query = tl.load(c + token[:, None] * c_stride + shared, mask=is_key, other=0.0)
            value = tl.load(
                x + token[:, None] * x_stride + head * P + columns[None, :], mask=is_value, other=0.0
            )  # fmt: skip
            time = _times(dt + token * dt_stride + head, inside, offset, low, high)
            fade = -scale * time
            total = tl.cumsum(fade, axis=0)  # logarithm of the decay since the chunk began
            ends = tl.sum(fade, axis=0)
            between = tl.where(lanes[:, None] >= lanes[None, :], total[:, None] - total[None, :], float("-inf"))
            score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * tl.exp(between) * time[None, :]
            result = tl.dot(query, state.to(key.dtype), input_precision=PRECISION) * tl.exp(total)[:, None]
            result = tl.dot(score.to(key.dtype), value, result, input_precision=PRECISION)
            wide = value.to(tl.float32)
            weighted = (wide * (time * tl.exp(ends - total))[:, None]).to(key.dtype)
            state = tl.dot(tl.trans(key), weighted, state * tl.exp(ends), input_precision=PRECISION)
            target = out + (token * HEADS + head)[:, None] * P + columns[None, :]
            tl.store(target, (result + passed * wide).to(out.dtype.element_ty), mask=is_value)
        tl.store(pool + write * HEADS * N * P + place, state.to(pool.dtype.element_ty), mask=is_state)
        tl.debug_barrier()  # the next span may read this state
        span = tl.load(links + span * COLUMNS + NEXT)
