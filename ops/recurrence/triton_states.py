"""Shared parts of the Triton kernels that update states: decay gates, tile sizes and precision."""

# Pyright cannot check the arguments of kernel launches.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.recurrence import Segments

CHUNK = 64  # tokens per chunk of 16-bit inputs
SMALL_CHUNK = 16  # tokens per chunk of float32 inputs and of large states, whose tiles take more memory
LARGE_STATE = 128  # states with more rows than this are large, and have chunks of SMALL_CHUNK tokens
COLUMNS_BLOCK = 32  # columns of a state per program


def with_heads(x: Tensor) -> Tensor:
    """Return x [T, H, D] with contiguous heads, copied if necessary. The stride between tokens is arbitrary."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def padded(size: int) -> int:
    """Return the size of the smallest tile that holds `size` elements and that `tl.dot` supports."""
    return max(16, triton.next_power_of_2(size))


def columns_block(size: int, *, large: bool = False) -> int:
    return min(COLUMNS_BLOCK // 2 if large else COLUMNS_BLOCK, padded(size))


def chunk_of(keys: Tensor) -> int:
    """Return the number of tokens per chunk for keys [T, G, D]."""
    return SMALL_CHUNK if is_large(keys) else CHUNK


def is_large(keys: Tensor) -> bool:
    return keys.dtype.itemsize == 4 or keys.shape[2] > LARGE_STATE


def precision(dtype: torch.dtype) -> str:
    """Return the `input_precision` of `tl.dot`: for float32 "tf32x3", which is about as precise as float32."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def scratch_slot(pool: Tensor, segments: Segments) -> int:
    """Return the slot of a graph's padding rows, which kernels do not write; -1 if no graph captures the step."""
    return len(pool) - 1 if segments.captured else -1


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)). The relative error is small even for results close to 0."""
    grown = tl.exp(tl.minimum(x, 20.0))
    above = 1.0 + grown
    exact = tl.where(above == 1.0, grown, tl.log(above) * (grown / tl.where(above == 1.0, 1.0, above - 1.0)))
    return tl.where(x > 20.0, x, exact)


@triton.jit
def log_decay(gates, inside, rate, shift):
    """Return the logarithm of each token's decay, or 0 where `inside` is false. `gates` are pointers to `a`."""
    time = softplus(tl.load(gates, mask=inside, other=0.0).to(tl.float32) + shift)
    return tl.where(inside, -tl.exp(rate) * time, 0.0)
