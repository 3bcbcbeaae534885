"""Short causal convolutions in Triton.

If all spans of a step are single tokens that do not depend on each other, one launch computes the step and writes the
states. In other steps, each program of a first launch computes a chunk of one span. A program reads inputs before the
span from the batch if they are tokens of an earlier span of the step, otherwise from the pool. It writes new states to
a buffer, because other programs may still read the old states. A second launch copies the buffer to the pool.
"""

# Pyright cannot check the arguments of kernel launches.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.recurrence import Segments
from ops.recurrence.triton_spans import BEFORE, COLUMNS, LAST, links_of
from ops.recurrence.triton_states import scratch_slot

CHUNK = 64  # tokens per program; equal to `triton_states.CHUNK`, so that these kernels can share `Links`
CHANNELS_BLOCK = 64
SINGLE_CHANNELS_BLOCK = 1024


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pool: Tensor,
    segments: Segments,
    *,
    gates: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Convolve each channel causally and apply silu, or multiply by gates before and after (see `ops.recurrence`)."""
    x = _with_rows(x)
    before, after = (None, None) if gates is None else map(_with_rows, gates)
    spans, (num_tokens, channels), kept = segments.spans, x.shape, pool.shape[1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not num_tokens:
        return out
    order = links_of(segments, num_tokens, CHUNK, scratch_slot(pool, segments))
    strides = (x.stride(0), *((0, 0) if before is None or after is None else (before.stride(0), after.stride(0))))
    if order.single:
        block = min(SINGLE_CHANNELS_BLOCK, triton.next_power_of_2(channels))
        _single_kernel[(len(spans), triton.cdiv(channels, block))](
            x,
            weight,
            bias,
            before,
            after,
            pool,
            out,
            spans,
            scratch_slot(pool, segments),
            spans.stride(0),
            spans.stride(1),
            *strides,
            CHANNELS=channels,
            KEPT=kept,
            BLOCK=block,
            num_warps=4,
        )
        return out
    num_chunks, num_spans = len(order.chunks), len(spans)
    tails = torch.empty((num_spans, kept, channels), dtype=torch.float32, device=x.device)
    _chunk_kernel[(num_chunks + num_spans, triton.cdiv(channels, CHANNELS_BLOCK))](
        x,
        weight,
        bias,
        before,
        after,
        pool,
        out,
        tails,
        spans,
        order.links,
        order.chunks,
        num_chunks,
        spans.stride(0),
        spans.stride(1),
        *strides,
        CHANNELS=channels,
        KEPT=kept,
        KEPT_BLOCK=triton.next_power_of_2(kept),
        CHUNK=CHUNK,
        BLOCK=CHANNELS_BLOCK,
        num_warps=4,
    )
    block = min(SINGLE_CHANNELS_BLOCK, triton.next_power_of_2(kept * channels))
    _store_kernel[(num_spans, triton.cdiv(kept * channels, block))](
        tails,
        pool,
        spans,
        order.links,
        spans.stride(0),
        spans.stride(1),
        SIZE=kept * channels,
        BLOCK=block,
        num_warps=4,
    )
    return out


def _with_rows(x: Tensor) -> Tensor:
    """Return x [T, C] with consecutive channels."""
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit
def _activated(total, after, place, mask):
    """Return `total` times the gate at `place` in `after`, or silu(total) if there is no gate."""
    if after is None:
        result = total * tl.sigmoid(total)
    else:
        result = total * tl.load(after + place, mask=mask, other=0.0).to(tl.float32)
    return result


@triton.jit(do_not_specialize=["scratch", "span_stride", "field_stride"])
def _single_kernel(
    x,  # [T, CHANNELS]
    weight,  # [KEPT + 1, CHANNELS]
    bias,  # [CHANNELS], or None
    before,  # [T, CHANNELS], or None
    after,  # [T, CHANNELS], or None
    pool,  # [N, KEPT, CHANNELS]
    out,  # [T, CHANNELS]
    spans,  # [S, 4]
    scratch,  # slot of padding rows, which is not written; -1: no padding rows
    span_stride,
    field_stride,
    x_stride,
    before_stride,
    after_stride,
    CHANNELS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    span = spans + tl.program_id(0) * span_stride
    read, write = tl.load(span).to(tl.int64), tl.load(span + field_stride).to(tl.int64)
    token = tl.load(span + 2 * field_stride).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < CHANNELS
    value = tl.load(x + token * x_stride + channels, mask=inside, other=0.0).to(tl.float32)
    if before is not None:
        value *= tl.load(before + token * before_stride + channels, mask=inside, other=0.0).to(tl.float32)
    total = value * tl.load(weight + KEPT * CHANNELS + channels, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + channels, mask=inside, other=0.0).to(tl.float32)
    kept = inside & (tl.zeros_like(channels) + write != scratch)
    old, new = pool + read * KEPT * CHANNELS + channels, pool + write * KEPT * CHANNELS + channels
    for tap in tl.static_range(KEPT):
        past = tl.load(old + tap * CHANNELS, mask=inside, other=0.0).to(tl.float32)
        total += past * tl.load(weight + tap * CHANNELS + channels, mask=inside, other=0.0).to(tl.float32)
        if tap > 0:  # taps ascend, so each old row is read before it is overwritten (read may equal write)
            tl.store(new + (tap - 1) * CHANNELS, past.to(pool.dtype.element_ty), mask=kept)
    if KEPT > 0:
        tl.store(new + (KEPT - 1) * CHANNELS, value.to(pool.dtype.element_ty), mask=kept)
    result = _activated(total, after, token * after_stride + channels, inside)
    tl.store(out + token * CHANNELS + channels, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _inputs(
    places,  # [R], positions in the span, which may be negative
    rows,  # [R], whether the input at this position is needed
    channels,  # [BLOCK]
    span,
    x,
    before,
    pool,
    spans,
    links,
    span_stride,
    field_stride,
    x_stride,
    before_stride,
    CHANNELS: tl.constexpr,
    KEPT: tl.constexpr,
):
    """Return the convolution's inputs [R, BLOCK] at positions relative to the first token of a span."""
    source = tl.zeros_like(places) + span
    for _ in tl.static_range(KEPT):  # at most KEPT spans back, because each span has at least one token
        earlier = tl.load(links + source * COLUMNS + BEFORE, mask=places < 0, other=-1)
        found = earlier >= 0
        count = tl.load(spans + earlier * span_stride + 3 * field_stride, mask=found, other=0)
        places += count
        source = tl.where(found, earlier, source)
    start = tl.load(spans + source * span_stride + 2 * field_stride)
    slot = tl.load(spans + source * span_stride).to(tl.int64)
    token = (start + places).to(tl.int64)
    inside = (channels < CHANNELS)[None, :] & rows[:, None]
    in_batch = inside & (places >= 0)[:, None]
    value = tl.load(x + token[:, None] * x_stride + channels[None, :], mask=in_batch, other=0.0).to(tl.float32)
    if before is not None:
        gate = before + token[:, None] * before_stride + channels[None, :]
        value *= tl.load(gate, mask=in_batch, other=0.0).to(tl.float32)
    past = pool + (slot * KEPT + KEPT + places)[:, None] * CHANNELS + channels[None, :]
    return value + tl.load(past, mask=inside & (places < 0)[:, None], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_chunks", "span_stride", "field_stride"])
def _chunk_kernel(
    x,  # [T, CHANNELS]
    weight,  # [KEPT + 1, CHANNELS]
    bias,  # [CHANNELS], or None
    before,  # [T, CHANNELS], or None
    after,  # [T, CHANNELS], or None
    pool,  # [N, KEPT, CHANNELS]
    out,  # [T, CHANNELS]
    tails,  # [S, KEPT, CHANNELS], the states after the spans
    spans,  # [S, 4]
    links,  # [S, COLUMNS]
    chunks,  # [num_chunks, 2]
    num_chunks,
    span_stride,
    field_stride,
    x_stride,
    before_stride,
    after_stride,
    CHANNELS: tl.constexpr,
    KEPT: tl.constexpr,
    KEPT_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(0)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if number >= num_chunks:  # this program computes the state after a span
        span = number - num_chunks
        count = tl.load(spans + span * span_stride + 3 * field_stride)
        kept = tl.arange(0, KEPT_BLOCK)
        rows = kept < KEPT
        tail = _inputs(
            tl.where(rows, count + kept - KEPT, 0), rows, channels, span, x, before, pool, spans, links, span_stride,
            field_stride, x_stride, before_stride, CHANNELS, KEPT,
        )  # fmt: skip
        place = tails + (span.to(tl.int64) * KEPT + kept)[:, None] * CHANNELS + channels[None, :]
        tl.store(place, tail, mask=rows[:, None] & (channels < CHANNELS)[None, :])
        return
    span = tl.load(chunks + number * 2)
    if span < 0:
        return
    offset = tl.load(chunks + number * 2 + 1)
    start = tl.load(spans + span * span_stride + 2 * field_stride)
    count = tl.load(spans + span * span_stride + 3 * field_stride)
    places = offset + tl.arange(0, CHUNK)
    rows = places < count
    inside = rows[:, None] & (channels < CHANNELS)[None, :]
    total = tl.zeros([CHUNK, BLOCK], tl.float32)
    if bias is not None:
        total += tl.load(bias + channels, mask=channels < CHANNELS, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(KEPT + 1):
        if offset == 0:
            value = _inputs(
                places + tap - KEPT, rows, channels, span, x, before, pool, spans, links, span_stride, field_stride,
                x_stride, before_stride, CHANNELS, KEPT,
            )  # fmt: skip
        else:  # all inputs are tokens of this span
            source = (start + places + tap - KEPT).to(tl.int64)[:, None]
            value = tl.load(x + source * x_stride + channels[None, :], mask=inside, other=0.0).to(tl.float32)
            if before is not None:
                gate = before + source * before_stride + channels[None, :]
                value *= tl.load(gate, mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(weight + tap * CHANNELS + channels, mask=channels < CHANNELS, other=0.0).to(tl.float32)
        total += value * factor[None, :]
    token = (start + places).to(tl.int64)[:, None]
    result = _activated(total, after, token * after_stride + channels[None, :], inside)
    tl.store(out + token * CHANNELS + channels[None, :], result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["span_stride", "field_stride"])
def _store_kernel(
    tails,  # [S, SIZE]
    pool,  # [N, SIZE]
    spans,  # [S, 4]
    links,  # [S, COLUMNS]
    span_stride,
    field_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    span = tl.program_id(0)
    if tl.load(links + span * COLUMNS + LAST) == 0:  # a later span writes this slot
        return
    write = tl.load(spans + span * span_stride + field_stride).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(tails + span.to(tl.int64) * SIZE + places, mask=places < SIZE)
    tl.store(pool + write * SIZE + places, values.to(pool.dtype.element_ty), mask=places < SIZE)
