"""The gated delta rule in Triton.

A chain is a list of spans that one program computes in order (`triton_spans.py`). Short chains (decoded tokens, draft
tokens) are computed token by token; each program keeps some columns of one head's state in registers. Long chains are
computed in chunks by two kernels. The first kernel solves the triangular systems of all chunks in parallel (arXiv
2412.06464). The second kernel passes the state from chunk to chunk, with four matrix products per chunk. Products of
16-bit inputs accumulate in float32. Kernels hold states in float32.
"""

# Pyright cannot check the arguments of kernel launches.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.recurrence import Segments
from ops.recurrence.native import EPS
from ops.recurrence.triton_spans import COLUMNS, KIND, LONG, NEXT, Links, links_of
from ops.recurrence.triton_states import (
    chunk_of,
    columns_block,
    is_large,
    log_decay,
    padded,
    precision,
    scratch_slot,
    softplus,
    with_heads,
)


def delta_rule(
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
    """Compute the gated delta rule (see `ops.recurrence`)."""
    q, k, v = with_heads(q), with_heads(k), with_heads(v)
    a, b = (each if each.stride(1) == 1 else each.contiguous() for each in (a, b))
    out, spans = torch.empty(v.shape, dtype=v.dtype, device=v.device), segments.spans
    if not len(v):
        return out
    order = links_of(segments, len(v), chunk_of(q), scratch_slot(pool, segments))
    (groups, size), (heads, out_size) = q.shape[1:], v.shape[1:]
    block = columns_block(out_size)
    shapes = {"HEADS": heads, "RATIO": heads // groups, "D": size, "E": out_size}
    _step_kernel[(len(spans), heads, triton.cdiv(out_size, block))](
        q,
        k,
        v,
        a,
        b,
        rate,
        shift,
        pool,
        out,
        spans,
        order.links,
        scratch_slot(pool, segments),
        spans.stride(0),
        spans.stride(1),
        *(each.stride(0) for each in (q, k, v, a, b)),
        **shapes,
        EPS=EPS,
        D_BLOCK=padded(size),
        E_BLOCK=block,
        SINGLE=order.single,
        num_warps=4,
    )
    if order.may_be_long:
        _in_chunks(q, k, v, (a, b, rate, shift), pool, out, spans, order, shapes)
    return out


def _in_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: tuple[Tensor, Tensor, Tensor, Tensor],
    pool: Tensor,
    out: Tensor,
    spans: Tensor,
    order: Links,
    shapes: dict[str, int],
) -> None:
    """Compute the tokens of long chains. `gates` are a, b, rate and shift."""
    (num_tokens, heads, out_size), size, chunk, block = (
        v.shape,
        q.shape[2],
        chunk_of(q),
        columns_block(v.shape[2], large=is_large(q)),
    )
    values = torch.empty((num_tokens, heads, out_size), dtype=v.dtype, device=v.device)
    keys = torch.empty((num_tokens, heads, size), dtype=v.dtype, device=v.device)
    scores = torch.empty((num_tokens, heads, chunk), dtype=v.dtype, device=v.device)
    factors = torch.empty((3, heads, num_tokens), dtype=torch.float32, device=v.device)
    options: dict[str, Any] = {
        **shapes,
        "D_BLOCK": padded(size),
        "CHUNK": chunk,
        "PRECISION": precision(v.dtype),
    }
    place = (spans, order.links, spans.stride(0), spans.stride(1), num_tokens)
    strides = [each.stride(0) for each in (q, k, v)]
    _prepare_kernel[(len(order.chunks), heads)](
        q,
        k,
        v,
        *gates,
        values,
        keys,
        scores,
        factors,
        order.chunks,
        *place,
        *strides,
        gates[0].stride(0),
        gates[1].stride(0),
        **options,
        EPS=EPS,
        E_BLOCK=padded(out_size),
        num_warps=8,
        num_stages=1,
    )
    _chunk_kernel[(len(spans), heads, triton.cdiv(out_size, block))](
        q,
        k,
        values,
        keys,
        scores,
        factors,
        pool,
        out,
        *place,
        *strides[:2],
        **options,
        E_BLOCK=block,
        num_warps=4,
        num_stages=1 if is_large(q) else 2,
    )


@triton.jit(do_not_specialize=["scratch", "span_stride", "field_stride"])
def _step_kernel(
    q,  # [T, G, D]
    k,  # [T, G, D]
    v,  # [T, HEADS, E]
    a,  # [T, HEADS]
    b,  # [T, HEADS]
    rate,  # [HEADS]
    shift,  # [HEADS]
    pool,  # [N, HEADS, D, E]
    out,  # [T, HEADS, E]
    spans,  # [S, 4]
    links,  # [S, COLUMNS]
    scratch,  # slot of padding rows, which is not written; -1: no padding rows
    span_stride,
    field_stride,
    q_stride,
    k_stride,
    v_stride,
    a_stride,
    b_stride,
    HEADS: tl.constexpr,
    RATIO: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    EPS: tl.constexpr,
    D_BLOCK: tl.constexpr,
    E_BLOCK: tl.constexpr,
    SINGLE: tl.constexpr,
):
    span, head = tl.program_id(0), tl.program_id(1)
    if not SINGLE:  # noqa: SIM102 - a condition at compile time
        if tl.load(links + span * COLUMNS + KIND) != 1:
            return
    rows, columns = tl.arange(0, D_BLOCK), tl.program_id(2) * E_BLOCK + tl.arange(0, E_BLOCK)
    is_row, is_column = rows < D, columns < E
    is_state = is_row[:, None] & is_column[None, :]
    place = (head * D + rows)[:, None] * E + columns[None, :]
    keys = head // RATIO * D + rows
    scale, offset = tl.exp(tl.load(rate + head)), tl.load(shift + head)
    while span >= 0:
        fields = spans + span * span_stride
        read, write = tl.load(fields).to(tl.int64), tl.load(fields + field_stride).to(tl.int64)
        start, count = tl.load(fields + 2 * field_stride).to(tl.int64), tl.load(fields + 3 * field_stride)
        state = tl.load(pool + read * HEADS * D * E + place, mask=is_state, other=0.0).to(tl.float32)
        for step in range(count):
            token = start + step
            key = tl.load(k + token * k_stride + keys, mask=is_row, other=0.0).to(tl.float32)
            query = tl.load(q + token * q_stride + keys, mask=is_row, other=0.0).to(tl.float32)
            value = tl.load(v + token * v_stride + head * E + columns, mask=is_column, other=0.0).to(tl.float32)
            key *= tl.rsqrt(tl.sum(key * key, axis=0) + EPS)
            query *= tl.rsqrt(tl.sum(query * query, axis=0) + EPS) * D**-0.5
            time = softplus(tl.load(a + token * a_stride + head).to(tl.float32) + offset)
            state *= tl.exp(-scale * time)
            beta = tl.sigmoid(tl.load(b + token * b_stride + head).to(tl.float32))
            delta = (value - tl.sum(state * key[:, None], axis=0)) * beta
            state += key[:, None] * delta[None, :]
            result = tl.sum(state * query[:, None], axis=0)
            tl.store(
                out + (token * HEADS + head) * E + columns, result.to(out.dtype.element_ty), mask=is_column
            )  # fmt: skip
        if write != scratch:
            tl.store(pool + write * HEADS * D * E + place, state.to(pool.dtype.element_ty), mask=is_state)
        if SINGLE:
            span = -1
        else:
            tl.debug_barrier()  # the next span may read this state
            span = tl.load(links + span * COLUMNS + NEXT)


@triton.jit(do_not_specialize=["span_stride", "field_stride", "num_tokens"])
def _prepare_kernel(
    q,  # [T, G, D]
    k,  # [T, G, D]
    v,  # [T, HEADS, E]
    a,  # [T, HEADS]
    b,  # [T, HEADS]
    rate,  # [HEADS]
    shift,  # [HEADS]
    values,  # [T, HEADS, E], the tokens' updates if the state before the chunk were 0
    keys,  # [T, HEADS, D]; the tokens' updates are values - keys @ (state before the chunk)
    scores,  # [T, HEADS, CHUNK], weight of each update of the chunk in the token's result
    # [3, HEADS, T]: three factors for each token. Factor 0 multiplies query @ (state before the chunk) in the token's
    # result. Factor 1 multiplies the token's update in the state after the chunk. Factor 2 of the chunk's last token
    # multiplies the state before the chunk in the state after the chunk.
    factors,
    chunks,  # [., 2]
    spans,  # [S, 4]
    links,  # [S, COLUMNS]
    span_stride,
    field_stride,
    num_tokens,
    q_stride,
    k_stride,
    v_stride,
    a_stride,
    b_stride,
    HEADS: tl.constexpr,
    RATIO: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    D_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    EPS: tl.constexpr,
    E_BLOCK: tl.constexpr,
):
    head, span = tl.program_id(1), tl.load(chunks + tl.program_id(0) * 2)
    if span < 0:
        return
    if tl.load(links + span * COLUMNS + LONG) == 0:
        return
    offset = tl.load(chunks + tl.program_id(0) * 2 + 1)
    fields = spans + span * span_stride
    lanes, rows, columns = tl.arange(0, CHUNK), tl.arange(0, D_BLOCK), tl.arange(0, E_BLOCK)
    inside = offset + lanes < tl.load(fields + 3 * field_stride)
    token = (tl.load(fields + 2 * field_stride) + offset + lanes).to(tl.int64)
    is_key, is_value = inside[:, None] & (rows < D)[None, :], inside[:, None] & (columns < E)[None, :]
    part = (head // RATIO * D + rows)[None, :]
    key = tl.load(k + token[:, None] * k_stride + part, mask=is_key, other=0.0)  # [CHUNK, D]
    wide_key = key.to(tl.float32)
    key_scale = tl.rsqrt(tl.sum(wide_key * wide_key, axis=1) + EPS)
    fade = log_decay(a + token * a_stride + head, inside, tl.load(rate + head), tl.load(shift + head))
    total = tl.cumsum(fade, axis=0)  # logarithm of the decay since the chunk began
    beta = tl.sigmoid(tl.load(b + token * b_stride + head, mask=inside, other=0.0).to(tl.float32))
    between = total[:, None] - total[None, :]
    is_earlier = lanes[:, None] > lanes[None, :]
    element = key.dtype
    place = token * HEADS + head
    query = tl.load(q + token[:, None] * q_stride + part, mask=is_key, other=0.0)
    wide_query = query.to(tl.float32)
    query_scale = tl.rsqrt(tl.sum(wide_query * wide_query, axis=1) + EPS) * D**-0.5
    result = tl.dot(query, tl.trans(key), input_precision=PRECISION) * query_scale[:, None] * key_scale[None, :]
    result *= tl.exp(tl.where(lanes[:, None] >= lanes[None, :], between, float("-inf")))
    tl.store(scores + place[:, None] * CHUNK + lanes[None, :], result.to(element), mask=inside[:, None])
    ends = tl.sum(fade, axis=0)
    factor = factors + head * num_tokens + token
    tl.store(factor, query_scale * tl.exp(total), mask=inside)
    tl.store(factor + HEADS * num_tokens, key_scale * tl.exp(ends - total), mask=inside)
    tl.store(factor + 2 * HEADS * num_tokens, tl.exp(total), mask=inside)

    # A token's update depends on the chunk's earlier updates. All updates solve (1 + system) @ updates = known values.
    system = tl.dot(key, tl.trans(key), input_precision=PRECISION) * key_scale[:, None] * key_scale[None, :]
    system *= beta[:, None] * tl.exp(tl.where(is_earlier, between, float("-inf")))
    # Invert 1 + system. Each round doubles the size of the diagonal blocks that are inverted.
    inverse = tl.where(lanes[:, None] == lanes[None, :], 1.0, 0.0)
    inverse -= tl.where(lanes[:, None] // 2 == lanes[None, :] // 2, system, 0.0)
    width = 2
    while width < CHUNK:
        pair = lanes[:, None] // (2 * width) == lanes[None, :] // (2 * width)
        corner = tl.where(pair & (lanes[:, None] // width != lanes[None, :] // width), system, 0.0)
        corner = tl.dot(inverse, corner, input_precision=PRECISION)
        inverse -= tl.dot(corner, inverse, input_precision=PRECISION)
        width *= 2

    weights = (inverse * (beta * tl.exp(total) * key_scale)[None, :]).to(element)
    result = tl.dot(weights, key, input_precision=PRECISION)
    tl.store(keys + place[:, None] * D + rows[None, :], result.to(element), mask=is_key)
    value = tl.load(v + token[:, None] * v_stride + head * E + columns[None, :], mask=is_value, other=0.0)
    result = tl.dot((inverse * beta[None, :]).to(element), value, input_precision=PRECISION)
    tl.store(values + place[:, None] * E + columns[None, :], result.to(element), mask=is_value)


@triton.jit(do_not_specialize=["span_stride", "field_stride", "num_tokens"])
def _chunk_kernel(
    q,  # [T, G, D]
    k,  # [T, G, D]
    values,  # this tensor and the next three: see `_prepare_kernel`
    keys,
    scores,
    factors,
    pool,  # [N, HEADS, D, E]
    out,  # [T, HEADS, E]
    spans,  # [S, 4]
    links,  # [S, COLUMNS]
    span_stride,
    field_stride,
    num_tokens,
    q_stride,
    k_stride,
    HEADS: tl.constexpr,
    RATIO: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    D_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    E_BLOCK: tl.constexpr,
):
    span, head = tl.program_id(0), tl.program_id(1)
    if tl.load(links + span * COLUMNS + KIND) != 2:
        return
    lanes, rows = tl.arange(0, CHUNK), tl.arange(0, D_BLOCK)
    columns = tl.program_id(2) * E_BLOCK + tl.arange(0, E_BLOCK)
    is_row, is_column = rows < D, columns < E
    is_state = is_row[:, None] & is_column[None, :]
    cell = (head * D + rows)[:, None] * E + columns[None, :]
    part = (head // RATIO * D + rows)[None, :]
    plane = HEADS * num_tokens
    while span >= 0:
        fields = spans + span * span_stride
        read, write = tl.load(fields).to(tl.int64), tl.load(fields + field_stride).to(tl.int64)
        start, count = tl.load(fields + 2 * field_stride), tl.load(fields + 3 * field_stride)
        state = tl.load(pool + read * HEADS * D * E + cell, mask=is_state, other=0.0).to(tl.float32)
        for offset in range(0, count, CHUNK):
            inside = offset + lanes < count
            token = (start + offset + lanes).to(tl.int64)
            is_key, is_value = inside[:, None] & is_row[None, :], inside[:, None] & is_column[None, :]
            place = token * HEADS + head
            weight = tl.load(keys + place[:, None] * D + rows[None, :], mask=is_key, other=0.0)
            update = tl.load(values + place[:, None] * E + columns[None, :], mask=is_value, other=0.0)
            query = tl.load(q + token[:, None] * q_stride + part, mask=is_key, other=0.0)
            key = tl.load(k + token[:, None] * k_stride + part, mask=is_key, other=0.0)
            score = tl.load(scores + place[:, None] * CHUNK + lanes[None, :], mask=inside[:, None], other=0.0)
            factor = factors + head * num_tokens + token
            reads = tl.load(factor, mask=inside, other=0.0)
            fades = tl.load(factor + plane, mask=inside, other=0.0)
            final = (start + tl.minimum(offset + CHUNK, count) - 1).to(tl.int64)
            decay = tl.load(factors + 2 * plane + head * num_tokens + final)
            narrow = state.to(key.dtype)
            fresh = update.to(tl.float32) - tl.dot(weight, narrow, input_precision=PRECISION)
            result = tl.dot(query, narrow, input_precision=PRECISION) * reads[:, None]
            result = tl.dot(score, fresh.to(key.dtype), result, input_precision=PRECISION)
            faded = (fresh * fades[:, None]).to(key.dtype)
            state = tl.dot(tl.trans(key), faded, state * decay, input_precision=PRECISION)
            target = out + place[:, None] * E + columns[None, :]
            tl.store(target, result.to(out.dtype.element_ty), mask=is_value)
        tl.store(pool + write * HEADS * D * E + cell, state.to(pool.dtype.element_ty), mask=is_state)
        tl.debug_barrier()  # the next span may read this state
        span = tl.load(links + span * COLUMNS + NEXT)
