"""Every Triton kernel, compiled for GPUs that are not here from the calls that would launch it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from code_checks import DECODE, FOUR_BITS, WORDS, Wanted, faults, too_few_programs
from compiled_kernels import SHARED_BYTES, buffers, compiling_for, inspect, machine_code
from kernel_cases.sampling import rows
from ops.attention import AttentionMetadata, AttentionOptions
from ops.low_rank import LowRank
from ops.matmul.grouped import E2M1, GroupedWeight, GroupForm
from ops.moe import GroupedMixture, Mixture

# 8B-like shapes, in the dtypes that a served model has.
HEADS, KV_HEADS, DIM, WIDTH, PAGE = 32, 8, 128, 4096, 16
BF16 = torch.bfloat16


def _backend(operation: str) -> Any:
    return import_module(f"ops.{operation}.with_triton")


def _tokens(count: int, heads: int, *, dim: int = DIM, dtype: torch.dtype = BF16) -> Tensor:
    """Some heads out of fused queries, keys and values."""
    return torch.empty(count, HEADS + 2 * KV_HEADS, dim, dtype=dtype)[:, :heads]


def _pools(dtype: torch.dtype = BF16, *, dim: int = DIM, page: int = PAGE) -> Tensor:
    return torch.empty(2, 64, KV_HEADS, page, dim, dtype=dtype)


def _places(counts: list[int], page: int = PAGE, width: int | None = None) -> AttentionMetadata:
    table = np.zeros((len(counts), width or 512 // page), np.int32)
    return AttentionMetadata.build([3] * len(counts), counts, table, page)


def _norm(width: int, dtype: torch.dtype = BF16, count: int = 48) -> None:
    x, residual = torch.empty(2, count, width, dtype=dtype)
    _backend("norm").rms_norm(x, x[0], 1e-5)
    _backend("norm").add_rms_norm(x, residual, x[0], 1e-5, unit_offset=True)


def _norm_round(group: int, dtype: torch.dtype = BF16, width: int = WIDTH) -> None:
    x, residual = torch.empty(2, 48, width, dtype=dtype)
    _backend("norm").add_rms_norm_round(x, residual, x[0], 1e-5, group)


def _gate_round(group: int, dtype: torch.dtype = BF16) -> None:
    _backend("activation").gate_round(torch.empty(48, 2 * 14336, dtype=dtype), "silu", group)


def _layer_norm(width: int, dtype: torch.dtype = BF16) -> None:
    x, residual = torch.empty(2, 48, width, dtype=dtype)
    _backend("norm").layer_norm(x, x[0], None, 1e-5)
    _backend("norm").add_layer_norm(x, residual, x[0], x[1], 1e-5)


def _head_norm() -> None:
    heads = _tokens(48, HEADS)
    _backend("norm").rms_norm(heads, heads[0, 0], 1e-6)


def _rotate(interleaved: bool = False, *, by_token: bool = False) -> None:
    q, k = _tokens(48, HEADS), _tokens(48, KV_HEADS)
    table, positions = torch.empty(4096, DIM), None if by_token else torch.zeros(48, dtype=torch.int64)
    _backend("rope").rotate(q, k, table, positions, interleaved=interleaved)


def _norm_rotate(dtype: torch.dtype = BF16, *, dim: int = DIM, rotated: int = DIM, **options: Any) -> None:
    q, k = _tokens(2, HEADS, dim=dim, dtype=dtype), _tokens(2, KV_HEADS, dim=dim, dtype=dtype)
    _backend("rope").norm_rotate(q, k, _rotation(dim, rotated, dtype, **options))


def _rotate_store(
    dtype: torch.dtype = BF16, pool_dtype: torch.dtype | None = None, *, count: int = 2, normed: bool = True
) -> None:
    q, k = _tokens(count, HEADS, dtype=dtype), _tokens(count, KV_HEADS, dtype=dtype)
    places, rotation = _places([1] * count), _rotation(DIM, DIM, dtype, normed=normed)
    _backend("rope").rotate_store(q, k, k, *_pools(pool_dtype or dtype), places, rotation, k_scale=0.5)


def _rotation(dim: int, rotated: int, dtype: torch.dtype, *, normed: bool = True, interleaved: bool = False) -> Any:
    from ops.rope import HeadNorms, Rotation

    weights = torch.empty(2, dim, dtype=dtype)
    norms = HeadNorms(weights[0], weights[1], 1e-6) if normed else None
    return Rotation(torch.empty(4096, rotated), torch.zeros(2, dtype=torch.int64), interleaved, norms)


def _rotate_store_latent(
    heads: int = 128,
    dtype: torch.dtype = BF16,
    pool_dtype: torch.dtype | None = None,
    *,
    count: int = 2,
    rank: int = 512,
    rope_dim: int = 64,
    interleaved: bool = True,
) -> None:
    from ops.rope import LatentNorm

    q_pe = torch.empty(count, heads, 128 + rope_dim, dtype=dtype)[..., 128:]
    _, latent, k_pe = torch.empty(count, 1536 + rank + rope_dim, dtype=dtype).split((1536, rank, rope_dim), dim=1)
    pool, norm = torch.empty(64, 1, PAGE, rank + rope_dim, dtype=pool_dtype or dtype), LatentNorm(latent[0], 1e-6)
    rotation = _rotation(rope_dim, rope_dim, dtype, normed=False, interleaved=interleaved)
    _backend("rope").rotate_store_latent(q_pe, latent, k_pe, norm, pool, _places([1] * count), rotation)


def _gate(activation: str, dtype: torch.dtype = BF16) -> None:
    _backend("activation").gate(torch.empty(48, 2 * 14336, dtype=dtype), activation)


def _embed(first_id: int | None = None, dtype: torch.dtype = BF16) -> None:
    ids, weight = torch.zeros(48, dtype=torch.int64), torch.empty(1024, WIDTH, dtype=dtype)
    _backend("embedding").embed(ids, weight, first_id)


def _embed_media() -> None:
    ids, weight = torch.zeros(48, dtype=torch.int64), torch.empty(1024, WIDTH, dtype=BF16)
    media = torch.empty(48, WIDTH, dtype=BF16), torch.zeros(48, dtype=torch.bool)
    _backend("embedding").embed(ids, weight, media=media)


def _logits(dtype: torch.dtype = BF16, **options: float) -> None:
    _backend("embedding").as_logits(torch.empty(4, 151_936, dtype=dtype), **options)


def _mix(num_tokens: int, dtype: torch.dtype = BF16, scoring: str = "softmax") -> None:
    """Experts of the shape of Qwen3-30B-A3B."""
    x, logits = torch.empty(num_tokens, 2048, dtype=dtype), torch.empty(num_tokens, 128, dtype=dtype)
    gate_up, down = torch.empty(128, 2 * 768, 2048, dtype=dtype), torch.empty(128, 2048, 768, dtype=dtype)
    weights, experts = _backend("moe").route(logits, 8, renormalise=True, scoring=scoring)
    _backend("moe").mix(x, Mixture(gate_up, down), weights, experts, "silu")


def _store(pool_dtype: torch.dtype) -> None:
    k, v = _tokens(2, KV_HEADS), _tokens(2, KV_HEADS)
    _backend("kv").store(k, v, *_pools(pool_dtype), _places([1, 1]), k_scale=0.5)


def _copy() -> None:
    pages = torch.zeros(3, dtype=torch.int64)
    _backend("kv").copy_pages(*([pool] for pool in _pools()), pages, pages)


def _attend(
    counts: list[int],
    *,
    heads: int = HEADS,
    dim: int = DIM,
    dtype: torch.dtype = BF16,
    pool_dtype: torch.dtype | None = None,
    page: int = PAGE,
    width: int | None = None,
    split_tile_tokens: int | None = None,
    **options: Any,
) -> None:
    q = _tokens(sum(counts), HEADS, dim=dim, dtype=dtype)[:, :heads]
    pools = _pools(pool_dtype or dtype, dim=dim, page=page)
    attend = _backend("attention").make_attend(split_tile_tokens=split_tile_tokens)
    attend(q, *pools, _places(counts, page, width), AttentionOptions(scale=dim**-0.5, **options))


def _attend_latent(counts: list[int], *, heads: int = 16, dtype: torch.dtype = BF16) -> None:
    """DeepSeek's latent vectors: values are in the memory of the keys."""
    q, pool = torch.empty(sum(counts), heads, 576, dtype=dtype), torch.empty(64, 1, PAGE, 576, dtype=dtype)
    _backend("attention").attend(q, pool, pool, _places(counts), AttentionOptions(scale=0.1))


def _choose() -> None:
    _backend("sampling").choose(torch.empty(4, 151_936), rows(4))


def _penalize() -> None:
    logits, counts = torch.empty(4, 151_936), torch.empty(2, 151_936, dtype=torch.int32)
    rows, penalty = torch.zeros(2, dtype=torch.int64), torch.ones(2)
    _backend("sampling").penalize(logits, rows, rows, counts, counts > 0, penalty, penalty, penalty)


def _mask() -> None:
    rows, bitmask = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 4748, dtype=torch.int32)
    _backend("sampling").apply_bitmask(torch.empty(4, 151_936), rows, bitmask)


def _score(num_top: int = 5) -> None:
    ids = torch.zeros(4, dtype=torch.int64)
    _backend("sampling").score(torch.zeros(4, 32_000), torch.ones(4), ids, num_top, ids[:, None])


def _sort(count: int) -> None:
    from ops.moe.triton_sort import sort_pairs

    sort_pairs(torch.zeros(count, 1, dtype=torch.int32), 128)


def _product(rows: int, *, bits: int = 4, dtype: torch.dtype = BF16, nvfp4: bool = False) -> None:
    backend, x = _backend("matmul"), torch.empty(rows, WIDTH, dtype=dtype)
    codes, scales = torch.zeros(1024, WIDTH, dtype=torch.uint8), torch.zeros(1024, WIDTH // 32)
    weight = GroupedWeight(codes, scales, scales)
    if nvfp4:
        weight = GroupedWeight(codes, torch.ones(1024, WIDTH // 16), table=E2M1)
    packed = backend.prepare_grouped(weight, dtype) if bits == 4 else backend.prepare(codes.to(dtype), bits=8)
    backend.linear(x, packed, x.new_empty(1024))


def _float8(rows: int, group: int, *, rounded_rows: bool = True) -> None:
    """A product that torch does not compute: its output has a width that torch does not take."""
    from ops.matmul import triton_float8

    codes, scales = torch.empty(1032, WIDTH, dtype=torch.float8_e4m3fn), torch.empty(1032, WIDTH // group)
    x = torch.empty(rows, WIDTH, dtype=BF16)
    triton_float8.product(x, codes, scales, x.new_empty(1032), BF16, rounded_rows=rounded_rows)


def _mix_float8(num_tokens: int, group: int | None) -> None:
    """Experts of the shape of Qwen3-30B-A3B in float8."""
    x, chosen = torch.empty(num_tokens, 2048, dtype=BF16), torch.zeros(num_tokens, 8, dtype=torch.int32)

    def weight(out_size: int, in_size: int) -> GroupedWeight:
        codes, groups = torch.empty(128, out_size, in_size, dtype=torch.uint8), in_size // (group or in_size)
        return GroupedWeight(codes, torch.empty(128, out_size, groups), bits=8, floating=True)

    mixture = GroupedMixture(weight(2 * 768, 2048), weight(2048, 768))
    packed = _backend("moe").prepare_grouped_experts(mixture, BF16)
    _backend("moe").mix(x, packed, torch.empty(num_tokens, 8), chosen, "silu")


def _mix_four_bits(num_tokens: int, form: GroupForm, dtype: torch.dtype = BF16, size: int = 2880) -> None:
    """Experts of the shape of gpt-oss, with biases, but only four of them."""
    x, chosen = torch.empty(num_tokens, size, dtype=dtype), torch.zeros(num_tokens, 4, dtype=torch.int32)

    def weight(out_size: int) -> GroupedWeight:
        codes, scales = torch.zeros(4, out_size, size, dtype=torch.uint8), torch.ones(4, out_size, size // form.group)
        return GroupedWeight(codes, scales, scales if form.shifted else None, form.table, powers=form.powers)

    mixture = GroupedMixture(weight(2 * size), weight(size), x.new_empty(4, 2 * size), x.new_empty(4, size))
    packed = _backend("moe").prepare_grouped_experts(mixture, dtype)
    _backend("moe").mix(x, packed, torch.empty(num_tokens, 4), chosen, "clamped_swiglu")


MXFP4, NVFP4 = GroupForm(32, table=E2M1, shifted=False, powers=True), GroupForm(16, table=E2M1, shifted=False)


def _add_low_rank(
    num_tokens: int, rank: int, sizes: tuple[int, ...] = (WIDTH, 1024, 1024), *, dtype: torch.dtype = BF16
) -> None:
    x, y = torch.empty(num_tokens, WIDTH, dtype=dtype), torch.empty(num_tokens, sum(sizes), dtype=dtype)
    a, b = torch.empty(8, len(sizes), rank, WIDTH, dtype=dtype), torch.empty(8, rank, sum(sizes), dtype=dtype)
    ranks, ends = torch.zeros(8, dtype=torch.int32), torch.tensor(sizes).cumsum(0)
    slots = torch.zeros(num_tokens, dtype=torch.int32)
    _backend("low_rank").add_low_rank(y, x, LowRank(a, b, ranks, ends), slots)


def _spans(count: int, *, single: bool) -> Any:
    from ops.recurrence import Segments

    if single:
        return Segments(torch.zeros(4, count, dtype=torch.int32).t(), captured=True)
    return Segments(torch.zeros(count, 4, dtype=torch.int32))


def _delta_rule(
    *, single: bool, dtype: torch.dtype = BF16, dim: int = DIM, num_tokens: int = 48, num_spans: int = 8
) -> None:
    """A gated delta net of the shape of Qwen3-Next."""
    mixed = torch.empty(num_tokens, 64 * dim, dtype=dtype)
    q, k, v = (part.unflatten(1, (-1, dim)) for part in mixed.split((16 * dim, 16 * dim, 32 * dim), dim=1))
    b, a = torch.empty(num_tokens, 64, dtype=dtype).chunk(2, dim=1)
    numbers, pool = torch.empty(32), torch.empty(9, 32, dim, dim)
    _backend("recurrence").delta_rule(q, k, v, a, b, numbers, numbers, pool, _spans(num_spans, single=single))


def _scan(
    *,
    single: bool,
    dtype: torch.dtype = BF16,
    groups: int = 1,
    state: int = 128,
    pool_dtype: torch.dtype = torch.float32,
    num_tokens: int = 48,
    num_spans: int = 8,
) -> None:
    """A Mamba 2 layer of the shape of Granite 4."""
    mixed = torch.empty(num_tokens, 128 * 64 + 2 * groups * state, dtype=dtype)
    x, b, c = mixed.split((128 * 64, groups * state, groups * state), dim=1)
    b, c = (part.unflatten(1, (groups, state)) for part in (b, c))
    numbers, dt = torch.empty(128), torch.empty(num_tokens, 16_768, dtype=dtype)[:, -128:]
    pool, spans = torch.empty(9, 128, state, 64, dtype=pool_dtype), _spans(num_spans, single=single)
    x = x.unflatten(1, (128, 64))
    _backend("recurrence").scan(x, dt, b, c, numbers, numbers, numbers, pool, spans, low=0.0, high=float("inf"))


def _convolve(
    *,
    single: bool,
    gated: bool = False,
    dtype: torch.dtype = BF16,
    num_tokens: int = 48,
    num_spans: int = 8,
) -> None:
    """A convolution of the shape of Qwen3-Next, or of LFM2 with gates."""
    channels, kernel = (2048, 3) if gated else (8192, 4)
    before, after, x = torch.empty(num_tokens, 3 * channels, dtype=dtype).chunk(3, dim=1)
    weight, pool = torch.empty(kernel, channels, dtype=dtype), torch.empty(9, kernel - 1, channels)
    spans = _spans(num_spans, single=single)
    _backend("recurrence").convolve(x, weight, None, pool, spans, gates=(before, after) if gated else None)


ONE_EACH, CHUNK, BOTH = [1, 1, 1], [100, 30], [1, 100]

# name -> the call; those whose name ends in "e4m3" need a GPU that has that type.
CALLS: Mapping[str, Callable[[], None]] = {
    "norm of a 4096 row": lambda: _norm(WIDTH),
    "norm of heads": _head_norm,
    "layer norm of a 4096 row": lambda: _layer_norm(WIDTH),
    "rotate halves": _rotate,
    "norm and rotate": _norm_rotate,
    "norm, rotate and store": _rotate_store,
    "rotate and store": lambda: _rotate_store(normed=False),
    "norm, rotate and store fp8 e4m3": lambda: _rotate_store(pool_dtype=torch.float8_e4m3fn),
    "norm, rotate and store latent vectors": _rotate_store_latent,
    "norm, rotate and store latent vectors fp8 e4m3": lambda: _rotate_store_latent(64, pool_dtype=torch.float8_e4m3fn),
    "norm and float8 rows e4m3": lambda: _norm_round(WIDTH),
    "norm and float8 blocks e4m3": lambda: _norm_round(128),
    "gate and float8 rows e4m3": lambda: _gate_round(14336),
    "gate and float8 blocks e4m3": lambda: _gate_round(128),
    "gate silu": lambda: _gate("silu"),
    "embed": _embed,
    "embed beside vectors": _embed_media,
    "rotate by angles of tokens": lambda: _rotate(by_token=True),
    "logits": _logits,
    "product of 4 bits": lambda: _product(4),
    "product in nvfp4": lambda: _product(4, nvfp4=True),
    "product of 8 bits": lambda: _product(4, bits=8),
    "product of few rows in float8 e4m3": lambda: _float8(4, WIDTH),
    "product of many rows and blocks in float8 e4m3": lambda: _float8(512, 128),
    "experts of few tokens in float8 e4m3": lambda: _mix_float8(4, 128),
    "experts of few tokens in mxfp4": lambda: _mix_four_bits(4, MXFP4, size=960),
    "experts of few tokens": lambda: _mix(4),
    "experts of many tokens": lambda: _mix(4096),
    "low-rank additions": lambda: _add_low_rank(16, 16),
    "store bf16": lambda: _store(BF16),
    "store fp8 e4m3": lambda: _store(torch.float8_e4m3fn),
    "copy pages": _copy,
    "choose": _choose,
    "penalize": _penalize,
    "bitmask": _mask,
    "score": _score,
    "decode": lambda: _attend(ONE_EACH),
    "prefill": lambda: _attend(CHUNK),
    "attend with window, soft cap and sinks": lambda: _attend(
        BOTH, window=128, soft_cap=30.0, sinks=torch.empty(HEADS)
    ),
    "attend with slopes": lambda: _attend(BOTH, slopes=torch.empty(HEADS)),
    "attend fp8 e4m3": lambda: _attend(BOTH, pool_dtype=torch.float8_e4m3fn, k_scale=0.5),
    "attend to latent vectors": lambda: _attend_latent(BOTH),
    "attend with head dim 256": lambda: _attend(BOTH, dim=256),
    "delta rule of single tokens": lambda: _delta_rule(single=True),
    "scan of single tokens": lambda: _scan(single=True),
    "convolution of single tokens": lambda: _convolve(single=True),
}
# Further types and shapes, for the slow pass.
MORE_CALLS: Mapping[str, Callable[[], None]] = {
    "norm of an fp16 row of 3584": lambda: _norm(3584, torch.float16),
    "layer norm of an fp16 row of 8192": lambda: _layer_norm(8192, torch.float16),
    "norm of an fp32 row of 16384": lambda: _norm(16384, torch.float32),
    "rotate interleaved": lambda: _rotate(interleaved=True),
    "norm and rotate a part, interleaved": lambda: _norm_rotate(dim=96, rotated=48, interleaved=True),
    "norm and rotate heads of 256 in fp32": lambda: _norm_rotate(torch.float32, dim=256, rotated=256),
    "norm, rotate and store in fp16": lambda: _rotate_store(torch.float16),
    "rotate and store fp8 e5m2": lambda: _rotate_store(pool_dtype=torch.float8_e5m2, normed=False),
    "norm, rotate and store latent vectors in fp16": lambda: _rotate_store_latent(16, torch.float16),
    "norm, rotate and store latent vectors in fp32": lambda: _rotate_store_latent(20, torch.float32, interleaved=False),
    "norm, rotate and store latent vectors of 256": lambda: _rotate_store_latent(40, rank=256, rope_dim=32),
    "norm of 8192 and float8 rows in fp16 e4m3": lambda: _norm_round(8192, torch.float16, 8192),
    "norm and float8 blocks in fp32 e4m3": lambda: _norm_round(128, torch.float32),
    "gate and float8 rows in fp16 e4m3": lambda: _gate_round(14336, torch.float16),
    "gate and float8 blocks in fp32 e4m3": lambda: _gate_round(128, torch.float32),
    "gate gelu": lambda: _gate("gelu"),
    "gate gelu_tanh": lambda: _gate("gelu_tanh", torch.float16),
    "gate relu": lambda: _gate("relu", torch.float32),
    "embed a later part in fp32": lambda: _embed(4096, torch.float32),
    "logits with a scale and a soft cap": lambda: _logits(torch.float32, scale=0.5, soft_cap=30.0),
    "product of many rows and 4 bits": lambda: _product(512),
    "product of many rows in nvfp4 and fp16": lambda: _product(512, dtype=torch.float16, nvfp4=True),
    "product of many rows and 8 bits in fp16": lambda: _product(512, bits=8, dtype=torch.float16),
    "product of 4 bits in fp32": lambda: _product(4, dtype=torch.float32),
    "product of few rows and blocks in float8 e4m3": lambda: _float8(20, 128),
    "product of some rows in float8 e4m3": lambda: _float8(48, WIDTH),
    "experts of many tokens in float8 e4m3": lambda: _mix_float8(4096, None),
    "experts of many tokens in mxfp4": lambda: _mix_four_bits(4096, MXFP4, size=960),
    "experts of some tokens in nvfp4": lambda: _mix_four_bits(64, NVFP4, size=960),
    "experts of few tokens in 4-bit integers with zeros": lambda: _mix_four_bits(4, GroupForm(128), size=1024),
    "experts in 4 bits and fp32": lambda: _mix_four_bits(4, GroupForm(32), torch.float32, size=960),
    "experts of some tokens in fp16": lambda: _mix(1024, torch.float16, "sigmoid"),
    "experts in fp32": lambda: _mix(64, torch.float32),
    "low-rank additions of rank 64": lambda: _add_low_rank(16, 64, (WIDTH,)),
    "low-rank additions of rank 13": lambda: _add_low_rank(16, 13),
    "low-rank additions of rank 128": lambda: _add_low_rank(16, 128, (14_336, 14_336)),
    "low-rank additions in fp16": lambda: _add_low_rank(16, 128, dtype=torch.float16),
    "low-rank additions in fp32": lambda: _add_low_rank(16, 128, dtype=torch.float32),
    "store fp8 e5m2": lambda: _store(torch.float8_e5m2),
    "attend fp8 e5m2": lambda: _attend(BOTH, pool_dtype=torch.float8_e5m2),
    "attend fp16 with head dim 64": lambda: _attend(BOTH, dim=64, dtype=torch.float16),
    "attend fp32": lambda: _attend(BOTH, dtype=torch.float32),
    "attend fp32 with head dim 256": lambda: _attend(BOTH, dim=256, dtype=torch.float32),
    "attend to latent vectors with 128 heads": lambda: _attend_latent(BOTH, heads=128),
    "attend with head dim 512": lambda: _attend(BOTH, dim=512),
    "attend with head dim 80": lambda: _attend(BOTH, dim=80),
    "attend with head dim 96, pages of 1": lambda: _attend(BOTH, dim=96, page=1),
    "attend with head dim 192": lambda: _attend(BOTH, dim=192),
    "attend with pages of 64": lambda: _attend(BOTH, page=64),
    "attend without sharing": lambda: _attend(BOTH, heads=KV_HEADS),
    "decode with a split tile": lambda: _attend(ONE_EACH, split_tile_tokens=256),
    "delta rule": lambda: _delta_rule(single=False),
    "delta rule in fp16": lambda: _delta_rule(single=False, dtype=torch.float16),
    "delta rule in fp32": lambda: _delta_rule(single=False, dtype=torch.float32),
    "delta rule with keys of 256": lambda: _delta_rule(single=False, dim=256),
    "scan": lambda: _scan(single=False),
    "scan of 8 groups with bf16 states": lambda: _scan(single=False, groups=8, pool_dtype=BF16),
    "scan with states of 256 rows": lambda: _scan(single=False, state=256),
    "scan in fp32": lambda: _scan(single=False, dtype=torch.float32),
    "convolution": lambda: _convolve(single=False),
    "convolution between gates in fp32": lambda: _convolve(single=False, gated=True, dtype=torch.float32),
}
# name -> calls of steps that differ in size alone.
SIZES: Mapping[str, tuple[Callable[[], None], ...]] = {
    "norm": tuple(lambda count=count: _norm(WIDTH, count=count) for count in (1, 16, 48, 7)),
    "norm, rotate and store": tuple(lambda count=count: _rotate_store(count=count) for count in (1, 16, 7)),
    "norm, rotate and store latent vectors": tuple(
        lambda count=count: _rotate_store_latent(count=count) for count in (1, 16, 7)
    ),
    "decode": tuple(
        lambda rows=rows, width=width: _attend([1] * rows, width=width)
        for rows, width in ((1, 1), (16, 16), (3, 32), (5, 7))
    ),
    "prefill": tuple(
        lambda counts=counts, width=width: _attend(counts, width=width)
        for counts, width in (([100], 7), ([5] * 16, 1), ([100, 30], 16))
    ),
    "low-rank additions": tuple(lambda count=count: _add_low_rank(count, 16) for count in (1, 7, 16, 48, 600)),
    "score": tuple(lambda num_top=num_top: _score(num_top) for num_top in (4, 5, 6)),
    "sort": tuple(lambda count=count: _sort(count) for count in (1, 16, 7)),
    "sort of many pairs": tuple(lambda count=count: _sort(count) for count in (1025, 8192, 65_536)),
    "recurrent prompts": tuple(
        lambda sizes=sizes: _convolve(single=False, num_tokens=sizes[0], num_spans=sizes[1])
        for sizes in ((33, 1), (64, 16), (100, 7))
    ),
}


pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this process interprets kernels")

# Per thread. On sm_80 the prefill tile that suits its successors is a few registers too large.
MAX_SPILLED_BYTES = {80: 96, 90: 0, 100: 0}


# Bytes that float32 kernels for prompts of recurrent layers may spill. Each float32 product takes three instructions.
# Models are usually served in 16 bits.
SPILLED_IN_FLOAT32 = {"delta rule in fp32": 640, "scan in fp32": 640}


def check(call: Callable[[], None], capability: int, folder: Path, spilled_bytes: int = 0) -> None:
    with compiling_for(capability) as kernels:
        call()
    assert kernels
    for kernel in (inspect(kernel, folder) for kernel in kernels):
        assert kernel.spilled_bytes <= max(spilled_bytes, MAX_SPILLED_BYTES[capability]), kernel
        assert kernel.shared_bytes <= SHARED_BYTES[capability], kernel


def runs_on(name: str, capability: int) -> bool:
    return capability >= 89 or not name.endswith("e4m3")


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("name", CALLS)
def test_kernels_compile_within_their_limits(name: str, capability: int, tmp_path: Path) -> None:
    if not runs_on(name, capability):
        with compiling_for(capability), pytest.raises(Exception, match="fp8e4nv"):
            CALLS[name]()
        return
    check(CALLS[name], capability, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("name", MORE_CALLS)
def test_further_types_and_shapes_compile_within_their_limits(name: str, capability: int, tmp_path: Path) -> None:
    if not runs_on(name, capability):
        pytest.skip("this GPU has no such type")
    check(MORE_CALLS[name], capability, tmp_path, SPILLED_IN_FLOAT32.get(name, 0))


@pytest.mark.parametrize("name", SIZES)
def test_nothing_is_compiled_anew_for_a_step_of_another_size(name: str) -> None:
    """It would hold the steps of everybody up for seconds."""
    found = []
    for call in SIZES[name]:
        with compiling_for(90) as kernels:
            call()
        found.append({id(kernel) for kernel in kernels})
    assert all(found)
    assert all(of_a_size == found[0] for of_a_size in found)


def test_a_call_that_launches_nothing_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        check(lambda: None, 90, tmp_path)


def test_norm_rotation_and_store_take_few_registers_and_wide_loads(tmp_path: Path) -> None:
    with compiling_for(90) as kernels:
        _rotate_store(count=64)
    assert len(kernels) == 1
    code, found = machine_code(kernels[0], tmp_path), inspect(kernels[0], tmp_path)
    assert 8 * 128 * found.registers <= 2**16  # eight blocks per multiprocessor
    assert found.shared_bytes <= 1024
    loads = [line for line in code if "LDG" in line]
    assert sum("128" in line for line in loads) >= 5  # halves of queries and of keys, and values


def test_latent_vectors_and_keys_are_stored_in_one_launch_of_few_registers(tmp_path: Path) -> None:
    for heads in (16, 20, 64, 128):  # DeepSeek-V2-Lite, GLM-4.7-Flash, Kimi-K2, DeepSeek-V3
        with compiling_for(90) as kernels:
            _rotate_store_latent(heads)
        [kernel] = kernels
        found = inspect(kernel, tmp_path)
        assert found.spilled_bytes == 0
        assert 10 * 128 * found.registers <= 2**16  # ten blocks per multiprocessor
        assert found.shared_bytes <= 1024


def test_rounding_after_norms_and_gates_takes_few_registers(tmp_path: Path) -> None:
    for call in (lambda: _norm_round(WIDTH), lambda: _norm_round(128), lambda: _gate_round(14336)):
        with compiling_for(90) as kernels:
            call()
        [kernel] = kernels
        found = inspect(kernel, tmp_path)
        threads = 32 * kernel.metadata.num_warps
        blocks = max(1, 768 // threads)  # per multiprocessor
        assert blocks * threads * found.registers <= 2**16, found
        assert found.shared_bytes <= 48 * 1024, found
        assert any("LDG" in line and "128" in line for line in machine_code(kernel, tmp_path))


def test_decode_loads_the_next_keys_during_products(tmp_path: Path) -> None:
    with compiling_for(90) as kernels:
        CALLS["decode"]()
    assert not faults(kernels[0], DECODE, tmp_path)


def test_decode_with_a_float8_cache_converts_pairs_in_three_blocks(tmp_path: Path) -> None:
    with compiling_for(90) as kernels:
        _attend(ONE_EACH, pool_dtype=torch.float8_e4m3fn)
    assert not faults(kernels[0], Wanted(blocks=3, wide_copies=True), tmp_path)
    code = machine_code(kernels[0], tmp_path)
    assert not any("HADD2.F32" in line for line in code)  # a conversion of single numbers through float32


def test_one_row_with_a_long_context_has_programs_for_all_multiprocessors() -> None:
    with compiling_for(90) as kernels:
        _attend([1], width=32_768 // PAGE)
    assert not too_few_programs(kernels.grids[0])


def test_decode_of_latent_vectors_loads_the_next_ones_during_products(tmp_path: Path) -> None:
    with compiling_for(90) as kernels:
        _attend_latent(ONE_EACH)
    decode = inspect(kernels[0], tmp_path)
    assert buffers(kernels[0], "32x512xbf16") >= 2
    assert 2 * decode.shared_bytes <= SHARED_BYTES[90]


def test_prefill_multiplies_on_hopper_units_from_several_buffers(tmp_path: Path) -> None:
    with compiling_for(90) as kernels:
        CALLS["prefill"]()
    assert not faults(kernels[0], Wanted({"64x128xbf16": 2}, units="HGMMA"), tmp_path)


def test_few_rows_in_float8_are_multiplied_while_the_next_codes_arrive(tmp_path: Path) -> None:
    with compiling_for(90) as kernels:
        _float8(4, WIDTH)
    product = next(each for each in kernels if each.metadata.name == "_product_kernel")
    assert not faults(product, Wanted({"32x256xi8": 2}, blocks=4, wide_copies=True), tmp_path)


def test_many_rows_in_float8_are_multiplied_by_hopper_units_of_8_bits(tmp_path: Path) -> None:
    with compiling_for(90) as kernels:
        _float8(512, 128)
        _mix_float8(4096, 128)
    products = [each for each in kernels if each.metadata.name in ("_product_kernel", "_grouped_kernel")]
    assert len(products) == 3
    for product in products:
        assert any(line.lstrip().startswith("QGMMA") for line in machine_code(product, tmp_path))


@pytest.mark.parametrize("capability", [80, 86])
def test_older_gpus_convert_float8_without_having_that_type(capability: int, tmp_path: Path) -> None:
    with compiling_for(capability) as kernels:
        _float8(4, 128, rounded_rows=False)
        _float8(512, WIDTH, rounded_rows=False)
    for kernel in kernels:
        assert inspect(kernel, tmp_path).spilled_bytes == 0


@pytest.mark.parametrize("nvfp4", [False, True])
def test_few_rows_and_4_bits_take_few_instructions_while_the_next_codes_arrive(nvfp4: bool, tmp_path: Path) -> None:
    with compiling_for(90) as kernels:
        _product(4, nvfp4=nvfp4)
    place = next(place for place, each in enumerate(kernels) if each.metadata.name == "_product_kernel")
    assert not faults(kernels[place], WORDS if nvfp4 else FOUR_BITS, tmp_path)
    assert not too_few_programs(kernels.grids[place])


def test_experts_of_4_bits_read_128_bits_at_a_time_and_multiply_while_the_next_codes_arrive(tmp_path: Path) -> None:
    with compiling_for(90) as kernels:
        _mix_four_bits(4, MXFP4, size=960)
        _mix_four_bits(4096, MXFP4, size=960)
    wanted = Wanted(
        {"128x8xi32": 2}, 2, wide_copies=True, units="HGMMA", no_conversions=True, elements=32, per_element=7.2
    )
    few, few_down, many, many_down = (each for each in kernels if each.metadata.name == "_grouped_kernel")
    for product in (few, few_down):
        assert not faults(product, WORDS, tmp_path)
    for product in (many, many_down):
        assert not faults(product, wanted, tmp_path)


def test_float8_fits_into_the_small_shared_memory_of_ada(tmp_path: Path) -> None:
    with compiling_for(89) as kernels:
        for rows in (4, 48, 512):
            _float8(rows, 128)
        _mix_float8(4096, 128)
    for found in (inspect(kernel, tmp_path) for kernel in kernels):
        assert found.shared_bytes <= 99 * 1024, found
        assert found.spilled_bytes <= 64, found  # a tile that suits Hopper is a few registers too large


def test_sampling_spends_few_instructions_on_a_logit(tmp_path: Path) -> None:
    """Kernels that read all logits, without the one that searches the list. A thread has 8 logits per iteration."""
    with compiling_for(90) as kernels:
        _choose()
    *over_logits, last = kernels
    assert sum(len(machine_code(kernel, tmp_path)) for kernel in over_logits) <= 8 * 400
    for kernel in over_logits:
        assert 2 * 256 * inspect(kernel, tmp_path).registers <= 2**16  # two blocks per multiprocessor
    assert last.metadata.name == "_draw_kernel"


def test_single_tokens_read_states_in_wide_loads_from_several_blocks(tmp_path: Path) -> None:
    with compiling_for(90) as kernels:
        _delta_rule(single=True)
        _scan(single=True)
    for kernel in kernels:
        loads = [line for line in machine_code(kernel, tmp_path) if "LDG" in line]
        assert sum(".128" in line for line in loads) == 8  # a thread has 32 numbers of the state
        assert 5 * 128 * inspect(kernel, tmp_path).registers <= 2**16  # five blocks per multiprocessor


def test_recurrent_prompts_multiply_on_hopper_units_while_the_next_chunk_arrives(tmp_path: Path) -> None:
    with compiling_for(90) as kernels:
        _delta_rule(single=False)
        _scan(single=False)
    chunked = [kernel for kernel in kernels if kernel.metadata.name == "_chunk_kernel"]
    assert len(chunked) == 2
    for kernel in chunked:
        code, found = machine_code(kernel, tmp_path), inspect(kernel, tmp_path)
        assert any(line.lstrip().startswith("HGMMA") for line in code)
        assert any("LDGSTS" in line and "128" in line for line in code)
        assert buffers(kernel, "64x128xbf16") >= 2
        assert found.spilled_bytes == 0
        assert found.shared_bytes <= SHARED_BYTES[90]
