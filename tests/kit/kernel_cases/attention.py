"""Test cases of paged attention for every implementation, and a simple dense reference."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ops.attention import AttentionMetadata, AttentionOptions

SINGLE = ((70, 1), (127, 1), (31, 1))
MIXED = ((40, 1), (0, 21), (3, 1), (30, 18), (0, 1))  # (start, count) of each row


class Case(NamedTuple):
    rows: tuple[tuple[int, int], ...] = MIXED
    page_size: int = 16
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    pool_dtype: torch.dtype | None = None  # None: the same as `dtype`
    window: int | None = None
    chunked: bool = False
    soft_cap: float | None = None
    sinks: bool = False
    slopes: bool = False
    k_scale: float = 1.0
    v_scale: float = 1.0


class Step(NamedTuple):
    """The arguments of `attend`."""

    q: Tensor
    k_pool: Tensor
    v_pool: Tensor
    inputs: AttentionMetadata


FP16 = torch.float16
CASES = {
    "mixed rows": Case(),
    "single tokens": Case(SINGLE),
    "one long row": Case(((0, 128),)),
    "pages of one": Case(page_size=1),
    "pages of 32, half precision": Case(page_size=32, dtype=FP16),
    "pages of 64": Case(page_size=64),
    "one kv head for six": Case(num_heads=6, num_kv_heads=1),
    "three heads for each of two, by themselves in a page": Case(num_heads=6, num_kv_heads=2),
    "no sharing": Case(num_heads=3, num_kv_heads=3),
    "window": Case(window=20),
    "window of one": Case(window=1),
    "chunks": Case(window=20, chunked=True),
    "chunks within tiles, sinks": Case(window=3, chunked=True, sinks=True),
    "soft cap": Case(soft_cap=3.0),
    "sinks": Case(sinks=True),
    "sinks, window and soft cap": Case(sinks=True, window=9, soft_cap=2.0),
    "slopes": Case(slopes=True),
    "slopes, single tokens of three heads for each of two": Case(SINGLE, num_heads=6, slopes=True),
    "slopes, window and sinks": Case(slopes=True, window=20, sinks=True),
    "slopes, half precision": Case(slopes=True, dtype=FP16),
    "head dim 80": Case(head_dim=80),
    "head dim 96, half precision": Case(head_dim=96, dtype=FP16),
    "head dim 128": Case(head_dim=128),
    "head dim 256": Case(head_dim=256, rows=((20, 1), (5, 12))),
    "head dim 192": Case(head_dim=192, rows=((20, 1), (5, 12))),
    "fp8 e4m3 with all else": Case(
        page_size=64,
        dtype=FP16,
        pool_dtype=torch.float8_e4m3fn,
        window=20,
        soft_cap=3.0,
        sinks=True,
        k_scale=0.5,
        v_scale=3.0,
    ),
    "fp8 e4m3 with scales": Case(dtype=FP16, pool_dtype=torch.float8_e4m3fn, k_scale=0.5, v_scale=3.0),
    "fp8 e5m2 with scales": Case(dtype=FP16, pool_dtype=torch.float8_e5m2, k_scale=2.0, v_scale=0.3),
}
SCALE = 0.2


def step(case: Case, seed: int = 0) -> Step:
    """Return rows with their own pages in random order. All other memory is NaN."""
    rng = np.random.default_rng(seed)
    size, shape = case.page_size, (case.num_kv_heads, case.head_dim)
    pages_of = [-(-(start + count) // size) for start, count in case.rows]
    pages = iter(rng.permutation(sum(pages_of) + 3).tolist())
    table = np.full((len(case.rows), max(pages_of) + 1), next(pages), np.int32)
    generator = torch.Generator().manual_seed(seed)
    pools = torch.full((2, sum(pages_of) + 3, case.num_kv_heads, size, case.head_dim), torch.nan)
    for row, (start, count) in enumerate(case.rows):
        for position in range(start + count):
            page, offset = divmod(position, size)
            if offset == 0:
                table[row, page] = next(pages)
            for pool in pools:
                pool[table[row, page], :, offset] = torch.randn(shape, generator=generator)
    num_tokens = sum(count for _, count in case.rows)
    q = torch.randn(num_tokens, case.num_heads, case.head_dim, generator=generator).to(case.dtype)
    k_pool, v_pool = pools.to(case.pool_dtype or case.dtype)
    starts, counts = zip(*case.rows)
    return Step(q, k_pool, v_pool, AttentionMetadata.build(starts, counts, table, size))


def options(case: Case) -> AttentionOptions:
    sinks = torch.linspace(-1, 3, case.num_heads) if case.sinks else None
    slopes = torch.logspace(-1, -6, case.num_heads, base=2.0) if case.slopes else None
    return AttentionOptions(SCALE, case.window, case.chunked, case.soft_cap, sinks, slopes, case.k_scale, case.v_scale)


def outputs(backend: ModuleType, case: Case, **more: Any) -> list[Tensor]:
    return [backend.attend(*step(case), options(case), **more)]


def expected(case: Case) -> list[Tensor]:
    return [dense(step(case), options(case))]


def dense(given: Step, options: AttentionOptions) -> Tensor:
    """Compute one softmax per token and head over the visible positions."""
    scale, window, chunked, soft_cap, sinks, slopes, k_scale, v_scale, _ = options
    outs: list[Tensor] = []
    group, size = given.q.shape[1] // given.k_pool.shape[1], given.inputs.page_size
    k_pool, v_pool = given.k_pool.float() * k_scale, given.v_pool.float() * v_scale
    for row, (start, count) in enumerate(zip(given.inputs.starts_host, given.inputs.counts_host)):
        for position in range(start, start + count):
            first = 0 if window is None else max(0, position - window + 1)
            if window is not None and chunked:
                first = position // window * window
            places = [divmod(p, size) for p in range(first, position + 1)]
            seen = [(int(given.inputs.page_table[row, page]), offset) for page, offset in places]
            # Each [S, H, D].
            k, v = (
                torch.stack([pool[page, :, offset] for page, offset in seen]).repeat_interleave(group, dim=1)
                for pool in (k_pool, v_pool)
            )
            scores = (given.q[len(outs)].float() * k).sum(-1) * scale  # [S, H]
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            if slopes is not None:
                scores = scores - torch.arange(len(seen) - 1, -1, -1)[:, None] * slopes
            weights = scores.exp()
            total = weights.sum(0) + (sinks.exp() if sinks is not None else 0)
            outs.append(((weights / total).unsqueeze(-1) * v).sum(0))
    return torch.stack(outs).to(given.q.dtype)
