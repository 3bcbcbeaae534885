"""Small Triton kernels with faults that the checks of compiled code must report."""

# Pyright cannot check the types of kernels.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportIndexIssue=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def bisect_kernel(logits, out, vocab: tl.constexpr, block: tl.constexpr, passes: tl.constexpr):
    """Find the median of a row. Each pass of the bisection reads the whole row."""
    row, inside = logits + tl.program_id(0) * vocab, tl.arange(0, block)
    low, high = tl.cast(-16.0, tl.float32), tl.cast(16.0, tl.float32)
    for _ in range(passes):
        middle, above = (low + high) / 2, tl.zeros([block], tl.int32)
        for first in range(0, vocab, block):
            above += (tl.load(row + first + inside) > middle).to(tl.int32)
        is_high = tl.sum(above) > vocab // 2
        low, high = tl.where(is_high, middle, low), tl.where(is_high, high, middle)
    tl.store(out + tl.program_id(0), low)


@triton.jit
def fill_registers_kernel(x, out, count: tl.constexpr):
    """Multiply every number with every other one, which needs more registers than a thread has."""
    ids = tl.arange(0, count)
    left, right = tl.load(x + ids), tl.load(x + count + ids)
    total = tl.zeros([count, count], tl.float32)
    for step in range(count):
        total += left[:, None] * right[None, :] * tl.load(x + step)
        left += tl.sum(total, axis=0)
    tl.store(out + ids[:, None] * count + ids[None, :], total)


@triton.jit
def convert_kernel(codes, out, block: tl.constexpr):
    ids = tl.arange(0, block)
    tl.store(out + ids, tl.load(codes + ids).to(tl.int32).to(tl.float32))
