"""Order of the spans of a step, computed on the GPU once per step and read by the kernels of all layers.

The spans of one row are a *run*: they are consecutive, and each span continues from the state that the previous span
wrote. Runs that use the same slot must be computed in order if one of them writes the slot. A *chain* is a list of
spans that one program computes in order; different chains are computed in parallel. A run that shares no written slot
with another run is a chain. All other runs of the step together are one chain.

The host reads no spans, and grids depend only on shapes, so a CUDA graph can capture all launches.
"""

# Pyright cannot check the arguments of kernel launches.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.recurrence import Segments, independent

SHORT = 16  # a chain is long if one of its spans has more tokens than this
SPANS_BLOCK = 64

# Columns of `Links.links`. `tl.constexpr` makes them readable in kernels.
BEFORE = tl.constexpr(0)  # the last earlier span that writes the slot that this span reads, or -1
NEXT = tl.constexpr(1)  # the next span of the chain, or -1
KIND = tl.constexpr(2)  # 1: first span of a short chain; 2: first span of a long chain; 0: any other span
LAST = tl.constexpr(3)  # whether no later span writes the same slot
LONG = tl.constexpr(4)  # whether the span belongs to a long chain
CHAIN = tl.constexpr(5)  # number of the chain
RUN = tl.constexpr(6)  # number of the run, from 1
SHARED = tl.constexpr(7)  # whether the span uses the same slot as a span of another run, and one of the two writes it
COLUMNS = tl.constexpr(8)


@dataclass(frozen=True, eq=False)
class Links:
    """The order of a step's spans, on the device."""

    links: Tensor  # int32 [S, COLUMNS]; not read if `single`
    # int32 [S + T // chunk, 2], for each chunk: its span (-1: unused), and the offset of its first token in the span
    chunks: Tensor
    single: bool  # whether all spans have one token and are independent
    may_be_long: bool  # whether the step may have long chains


def links_of(segments: Segments, num_tokens: int, chunk: int, scratch: int) -> Links:
    """Return the order of the spans, and their chunks of `chunk` tokens. Computed once per step and chunk size.

    `scratch` is the slot of padding rows (see `scratch_slot`), which do not depend on each other.
    """
    if chunk not in segments.plans:
        segments.plans[chunk] = _links(segments, num_tokens, chunk, scratch)
    return segments.plans[chunk]


def _links(segments: Segments, num_tokens: int, chunk: int, scratch: int) -> Links:
    spans, host = segments.spans, segments.host
    if (segments.captured and not segments.chained) or (host is not None and independent(host)):
        return Links(spans, spans, single=True, may_be_long=False)
    num_spans = len(spans)
    links = torch.empty((num_spans, COLUMNS.value), dtype=torch.int32, device=spans.device)
    chunks = torch.empty((num_spans + num_tokens // chunk, 2), dtype=torch.int32, device=spans.device)
    if num_spans:
        _link_kernel[(1,)](
            spans,
            links,
            chunks,
            num_spans,
            len(chunks),
            scratch,
            spans.stride(0),
            spans.stride(1),
            CHUNK=chunk,
            LIMIT=SHORT,
            BLOCK=SPANS_BLOCK,
            num_warps=8,
        )
    may_be_long = not segments.captured and (host is None or bool((host[:, 3] > SHORT).any()))
    return Links(links, chunks, single=False, may_be_long=may_be_long)


@triton.jit
def _field(spans, index, field: tl.constexpr, span_stride, field_stride, num_spans, missing):
    return tl.load(spans + index * span_stride + field * field_stride, mask=index < num_spans, other=missing)


@triton.jit
def _link(links, index, column: tl.constexpr, num_spans):
    return tl.load(links + index * COLUMNS + column, mask=index < num_spans, other=0)


# These arguments vary between steps. Triton would compile further variants for the value 1 and multiples of 16.
@triton.jit(do_not_specialize=["num_spans", "num_chunks", "scratch", "span_stride", "field_stride"])
def _link_kernel(
    spans,  # [num_spans, 4]: slot to read, slot to write, first token, number of tokens
    links,  # [num_spans, COLUMNS]
    chunks,  # [num_chunks, 2]
    num_spans,
    num_chunks,
    scratch,  # slot that padding rows write; -1: no padding rows
    span_stride,
    field_stride,
    CHUNK: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lanes = tl.arange(0, BLOCK)
    for base in range(0, num_chunks, BLOCK):
        tl.store(chunks + (base + lanes) * 2, -1, mask=base + lanes < num_chunks)
        tl.store(chunks + (base + lanes) * 2 + 1, 0, mask=base + lanes < num_chunks)

    num_runs = 0
    for base in range(0, num_spans, BLOCK):  # the columns BEFORE, LAST and RUN
        own = base + lanes
        read = _field(spans, own, 0, span_stride, field_stride, num_spans, -1)
        write = _field(spans, own, 1, span_stride, field_stride, num_spans, -2)
        before = tl.full([BLOCK], -1, tl.int32)
        later = tl.zeros([BLOCK], tl.int32)
        for other in range(0, num_spans, BLOCK):
            theirs = other + lanes
            written = _field(spans, theirs, 1, span_stride, field_stride, num_spans, -3)
            earlier = (written[None, :] == read[:, None]) & (theirs[None, :] < own[:, None])
            before = tl.maximum(before, tl.max(tl.where(earlier, theirs[None, :], -1), axis=1))
            same = (written[None, :] == write[:, None]) & (theirs[None, :] > own[:, None])
            later = tl.maximum(later, tl.max(same.to(tl.int32), axis=1))
        inside = own < num_spans
        begins = (inside & ((before < 0) | (before != own - 1))).to(tl.int32)
        run = num_runs + tl.cumsum(begins, axis=0)
        num_runs += tl.sum(begins, axis=0)
        tl.store(links + own * COLUMNS + BEFORE, before, mask=inside)
        tl.store(links + own * COLUMNS + LAST, 1 - later, mask=inside)
        tl.store(links + own * COLUMNS + RUN, run, mask=inside)
    tl.debug_barrier()

    for base in range(0, num_spans, BLOCK):  # the column SHARED
        own = base + lanes
        read = _field(spans, own, 0, span_stride, field_stride, num_spans, -1)
        write = _field(spans, own, 1, span_stride, field_stride, num_spans, -2)
        write = tl.where(write == scratch, -5 - own, write)  # a slot of its own
        run = _link(links, own, RUN, num_spans)
        shared = tl.zeros([BLOCK], tl.int32)
        for other in range(0, num_spans, BLOCK):
            theirs = other + lanes
            theirs_read = _field(spans, theirs, 0, span_stride, field_stride, num_spans, -4)[None, :]
            theirs_write = _field(spans, theirs, 1, span_stride, field_stride, num_spans, -3)[None, :]
            theirs_write = tl.where(theirs_write == scratch, -5 - theirs[None, :], theirs_write)
            meet = (theirs_write == read[:, None]) | (theirs_write == write[:, None]) | (theirs_read == write[:, None])
            meet = meet & (_link(links, theirs, RUN, num_spans)[None, :] != run[:, None])
            shared = tl.maximum(shared, tl.max(meet.to(tl.int32), axis=1))
        tl.store(links + own * COLUMNS + SHARED, shared, mask=own < num_spans)
    tl.debug_barrier()

    for base in range(0, num_spans, BLOCK):  # the column CHAIN: 0 for all runs that share slots, else the run's number
        own = base + lanes
        run = _link(links, own, RUN, num_spans)
        shared = tl.zeros([BLOCK], tl.int32)
        for other in range(0, num_spans, BLOCK):
            theirs = other + lanes
            same = (_link(links, theirs, RUN, num_spans)[None, :] == run[:, None]) & (theirs < num_spans)[None, :]
            found = tl.where(same, _link(links, theirs, SHARED, num_spans)[None, :], 0)
            shared = tl.maximum(shared, tl.max(found, axis=1))
        tl.store(links + own * COLUMNS + CHAIN, tl.where(shared == 1, 0, run), mask=own < num_spans)
    tl.debug_barrier()

    for base in range(0, num_spans, BLOCK):  # the columns NEXT, KIND and LONG, and the chunks
        own = base + lanes
        chain = _link(links, own, CHAIN, num_spans)
        count = _field(spans, own, 3, span_stride, field_stride, num_spans, 0)
        last = tl.full([BLOCK], 2147483647, tl.int32)
        following = last
        follows, longest = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
        first_chunk = tl.zeros([BLOCK], tl.int32)
        for other in range(0, num_spans, BLOCK):
            theirs = other + lanes
            counts = _field(spans, theirs, 3, span_stride, field_stride, num_spans, 0)
            same = (_link(links, theirs, CHAIN, num_spans)[None, :] == chain[:, None]) & (theirs < num_spans)[None, :]
            is_later, is_earlier = theirs[None, :] > own[:, None], theirs[None, :] < own[:, None]
            following = tl.minimum(following, tl.min(tl.where(same & is_later, theirs[None, :], last[:, None]), axis=1))
            follows = tl.maximum(follows, tl.max((same & is_earlier).to(tl.int32), axis=1))
            longest = tl.maximum(longest, tl.max(tl.where(same, counts[None, :], 0), axis=1))
            num_before = tl.where(is_earlier, ((counts + CHUNK - 1) // CHUNK)[None, :], 0)
            first_chunk += tl.sum(num_before, axis=1)
        inside = own < num_spans
        is_long = (longest > LIMIT).to(tl.int32)
        tl.store(links + own * COLUMNS + NEXT, tl.where(following == last, -1, following), mask=inside)
        tl.store(links + own * COLUMNS + KIND, tl.where(follows == 1, 0, 1 + is_long), mask=inside)
        tl.store(links + own * COLUMNS + LONG, is_long, mask=inside)
        for offset in range(0, tl.max(count, axis=0), CHUNK):
            places = chunks + (first_chunk + offset // CHUNK) * 2
            tl.store(places, own, mask=inside & (offset < count))
            tl.store(places + 1, offset, mask=inside & (offset < count))
