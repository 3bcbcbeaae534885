"""Test cases of rotary position embedding, for every implementation."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernel_comparison import TOLERANCE, agree
from ops.attention import AttentionMetadata
from ops.rope import HeadNorms, LatentNorm, Rotation, native


class Case(NamedTuple):
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    rotated: int = 8
    interleaved: bool = False
    dtype: torch.dtype = torch.float32
    fused: bool = False  # queries and keys are slices of one tensor
    positions: tuple[int, ...] = (7, 0, 19)
    axis_of_pair: tuple[int, ...] = ()  # position axis of each pair; (): positions have one axis


CASES = {
    "halves": Case(),
    "interleaved": Case(interleaved=True),
    "partial": Case(rotated=4),
    "partial and interleaved": Case(rotated=4, interleaved=True),
    "numbers of heads and angles that are no powers of two": Case(3, 1, 12, 12),
    "half precision": Case(dtype=torch.float16),
    "bfloat16": Case(dtype=torch.bfloat16, interleaved=True),
    "a vector and a half": Case(head_dim=48, rotated=48, dtype=torch.bfloat16, fused=True),
    "a vector and a quarter": Case(head_dim=40, rotated=40),
    "interleaved vectors": Case(head_dim=48, rotated=40, interleaved=True),
    "slices of one tensor": Case(fused=True, rotated=4),
    "one token": Case(positions=(3,)),
    "three axes": Case(axis_of_pair=(0, 0, 1, 2)),
    "three axes by turns, partial": Case(rotated=6, dtype=torch.bfloat16, fused=True, axis_of_pair=(2, 1, 0)),
}


class FusedCase(NamedTuple):
    """A rotation after norms, with a cache write."""

    case: Case = Case()
    normed: bool = True
    unit_offset: bool = False
    page_size: int = 4
    pool_dtype: torch.dtype | None = None  # None: the dtype of the queries
    k_scale: float = 1.0
    v_scale: float = 1.0


EPS = 1e-3
NUM_PAGES = 8
HALF_PRECISION = Case(dtype=torch.float16, fused=True)
FUSED_CASES = {
    "norm and halves": FusedCase(),
    "norm and interleaved": FusedCase(Case(interleaved=True, fused=True)),
    "no norm": FusedCase(Case(fused=True), normed=False),
    "unit offset, pages of one": FusedCase(unit_offset=True, page_size=1),
    "partial": FusedCase(Case(rotated=4, fused=True)),
    "partial and interleaved, no norm": FusedCase(Case(rotated=4, interleaved=True), normed=False),
    "no powers of two": FusedCase(Case(3, 1, 20, 12), page_size=3),
    "half precision": FusedCase(HALF_PRECISION),
    "half precision without norm": FusedCase(HALF_PRECISION, normed=False),
    "bfloat16 into float32": FusedCase(Case(dtype=torch.bfloat16), pool_dtype=torch.float32),
    "more heads than a program has": FusedCase(Case(20, 5, 256, 256, fused=True)),
    "more kv heads than a program has": FusedCase(Case(10, 10, 256, 256), normed=False),
    "three axes": FusedCase(Case(axis_of_pair=(0, 0, 1, 2))),
    # The fp8 cases rotate values that fp8 represents exactly by multiples of 90 degrees, because Triton's interpreter
    # rounds other values to fp8 wrongly (it loses carries).
    "fp8 e4m3 with scales, some too large": FusedCase(
        HALF_PRECISION, normed=False, pool_dtype=torch.float8_e4m3fn, k_scale=2**-8, v_scale=0.5
    ),
    "fp8 e5m2": FusedCase(normed=False, pool_dtype=torch.float8_e5m2, v_scale=2.0),
}


class LatentCase(NamedTuple):
    """Latent vectors, their norm, and the rotation of the keys that heads share."""

    num_heads: int = 4
    rank: int = 16
    rope_dim: int = 8
    rotated: int | None = None  # dimensions; None: all of them
    interleaved: bool = True
    dtype: torch.dtype = torch.float32
    page_size: int = 4
    pool_dtype: torch.dtype | None = None  # None: the dtype of the queries
    num_tokens: int = 3


LATENT_CASES = {
    "interleaved": LatentCase(),
    "halves": LatentCase(interleaved=False),
    "no powers of two": LatentCase(3, 20, 12, page_size=3),
    "a part is rotated": LatentCase(rank=24, rotated=4),
    "half precision": LatentCase(dtype=torch.float16),
    "bfloat16": LatentCase(dtype=torch.bfloat16, interleaved=False),
    "bfloat16 into float32": LatentCase(dtype=torch.bfloat16, pool_dtype=torch.float32),
    "fp8 e4m3": LatentCase(dtype=torch.float16, pool_dtype=torch.float8_e4m3fn),
    "fp8 e5m2, pages of one": LatentCase(pool_dtype=torch.float8_e5m2, page_size=1),
    "DeepSeek-V3": LatentCase(128, 512, 64, dtype=torch.bfloat16),
    "Kimi-K2": LatentCase(64, 512, 64),
    "DeepSeek-V2-Lite": LatentCase(16, 512, 64, dtype=torch.float16),
    "GLM-4.7-Flash": LatentCase(20, 512, 64, dtype=torch.bfloat16, interleaved=False),
    "MiniCPM3": LatentCase(40, 256, 32, interleaved=False),
}


def latent_inputs(case: LatentCase) -> tuple[Tensor, Tensor, Tensor, LatentNorm, Tensor, AttentionMetadata, Rotation]:
    """Return the arguments of `rotate_store_latent`. Queries and keys are slices of larger tensors."""
    generator = torch.Generator().manual_seed(7)
    count, rotated = case.num_tokens, case.rotated or case.rope_dim

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype)

    query, reduced = draw(count, case.num_heads, case.rope_dim + 8), draw(count, 5 + case.rank + case.rope_dim)
    angles = torch.rand(20, rotated // 2, generator=generator) * 6
    table, weight = torch.cat((angles.cos(), angles.sin()), dim=-1), draw(case.rank)
    pool_dtype = case.pool_dtype or case.dtype
    pool = draw(NUM_PAGES, 1, case.page_size, case.rank + case.rope_dim).to(pool_dtype)
    if pool_dtype.itemsize == 1:  # only numbers that fp8 represents exactly, as in the fp8 cases of `FUSED_CASES`
        weight = torch.ones_like(weight)
        reduced, query = (torch.randint(0, 2, x.shape, generator=generator).to(x) * 2 - 1 for x in (reduced, query))
        quarters = torch.arange(20 * rotated // 2).view(20, -1) % 4
        table = torch.cat([torch.tensor(values)[quarters] for values in ((1.0, 0, -1, 0), (0.0, 1, 0, -1))], dim=-1)
    pages = np.arange(NUM_PAGES, dtype=np.int32)[::-1].reshape(2, -1).copy()
    metadata = AttentionMetadata.build([1, 0], [count - 1, 1], pages, case.page_size)
    rotation = Rotation(table, torch.tensor([7, 0, 19])[:count], case.interleaved, None, {})
    _, latent, k_pe = reduced.split((5, case.rank, case.rope_dim), dim=1)
    eps = 0.0 if pool_dtype.itemsize == 1 else EPS
    return query[..., 8:], latent, k_pe, LatentNorm(weight, eps), pool, metadata, rotation


def latent_outputs(backend: Any, case: LatentCase) -> list[Tensor]:
    """Return the rotated queries and the pool (as float32)."""
    q_pe, latent, k_pe, norm, pool, metadata, rotation = latent_inputs(case)
    rotated = backend.rotate_store_latent(q_pe.clone(), latent, k_pe.clone(), norm, pool, metadata, rotation)
    return [rotated, pool.float()]


def latent_expected(case: LatentCase) -> list[Tensor]:
    """Return the results of `latent_outputs`, computed in float64, token by token."""
    q_pe, latent, k_pe, norm, pool, metadata, rotation = latent_inputs(case)
    cos, sin = rotation.table[rotation.positions].double().unsqueeze(1).chunk(2, dim=-1)
    shape = Case(rotated=2 * cos.shape[-1], interleaved=case.interleaved)
    rotated, key_pe = (_turned(x.double(), torch.complex(cos, sin), shape) for x in (q_pe, k_pe.unsqueeze(1)))
    wide = latent.double()
    wide = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.double()
    keys = torch.cat((wide, key_pe.squeeze(1)), dim=-1).to(case.dtype)
    for token, slot in enumerate(metadata.slot_mapping.tolist()):
        pool[slot // case.page_size, 0, slot % case.page_size] = keys[token].to(pool.dtype)
    return [rotated, pool.float()]


def agree_latent(backend: Any, case: LatentCase) -> None:
    """Raise AssertionError unless the results equal the expected ones within the precision of the case's dtype."""
    (found, pool), (wanted, wanted_pool) = latent_outputs(backend, case), latent_expected(case)
    assert found.dtype == case.dtype
    agree([found], [wanted])
    agree([pool], [wanted_pool], TOLERANCE[case.dtype] / TOLERANCE[torch.float32])


def fused_inputs(fused: FusedCase) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Rotation, AttentionMetadata]:
    """Return q, k, v, both pools, the rotation and the metadata of two rows."""
    case, generator = fused.case, torch.Generator().manual_seed(5)
    q, k, table, positions = inputs(case)
    v = torch.randn(k.shape, generator=generator).to(case.dtype)
    weights = torch.randn(2, case.head_dim, generator=generator).to(case.dtype)
    pool_dtype = fused.pool_dtype or case.dtype
    if pool_dtype.itemsize == 1:
        q, k, v = (x.to(pool_dtype).to(case.dtype) for x in (q, k, v))
        quarters = torch.arange(len(table) * case.rotated // 2).view(len(table), -1) % 4
        table = torch.cat([torch.tensor(values)[quarters] for values in ((1.0, 0, -1, 0), (0.0, 1, 0, -1))], dim=-1)
    if case.axis_of_pair:
        table = native.angles(table, axes(case), torch.tensor(case.axis_of_pair, dtype=torch.int32))
    norms = HeadNorms(weights[0], weights[1], EPS, fused.unit_offset) if fused.normed else None
    rotation = Rotation(table, None if case.axis_of_pair else positions, case.interleaved, norms, {})
    shape = (2, NUM_PAGES, case.num_kv_heads, fused.page_size, case.head_dim)
    k_pool, v_pool = torch.randn(shape, generator=generator).to(pool_dtype)
    pages = np.arange(NUM_PAGES, dtype=np.int32)[::-1].reshape(2, -1).copy()
    return q, k, v, k_pool, v_pool, rotation, AttentionMetadata.build([1, 0], [2, 1], pages, fused.page_size)


def fused_outputs(backend: Any, fused: FusedCase) -> list[Tensor]:
    """Return the queries and both pools (as float32) of `rotate_store`, then the results of `norm_rotate`."""
    q, k, v, k_pool, v_pool, rotation, metadata = fused_inputs(fused)
    scales = {"k_scale": fused.k_scale, "v_scale": fused.v_scale}
    rotated = backend.rotate_store(q.clone(), k.clone(), v, k_pool, v_pool, metadata, rotation, **scales)
    return [rotated, k_pool.float(), v_pool.float(), *backend.norm_rotate(q, k, rotation)]


def fused_expected(fused: FusedCase) -> list[Tensor]:
    """Return the results of `fused_outputs`, computed in float64, token by token."""
    q, k, v, k_pool, v_pool, rotation, metadata = fused_inputs(fused)
    case, results = fused.case, []
    lines = rotation.table if rotation.positions is None else rotation.table[rotation.positions]
    cos, sin = lines.double().unsqueeze(1).chunk(2, dim=-1)
    for x, weight in ((q, rotation.norms and rotation.norms.q), (k, rotation.norms and rotation.norms.k)):
        wide = x.double()
        if weight is not None:
            factor = weight.double() + fused.unit_offset
            wide = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + EPS) * factor
            wide = wide.to(case.dtype).double()
        results.append(_turned(wide, torch.complex(cos, sin), case))
    for values, pool, scale in ((results[1].to(case.dtype), k_pool, fused.k_scale), (v, v_pool, fused.v_scale)):
        for token, slot in enumerate(metadata.slot_mapping.tolist()):
            value = values[token].float() / scale
            if pool.dtype.itemsize == 1:
                value = value.clamp(-torch.finfo(pool.dtype).max, torch.finfo(pool.dtype).max)
            pool[slot // fused.page_size, :, slot % fused.page_size] = value.to(pool.dtype)
    return [results[0], k_pool.float(), v_pool.float(), *results]


def agree_fused(backend: Any, fused: FusedCase) -> None:
    """Raise AssertionError unless the results equal the expected ones within the precision of the case's dtype."""
    found = fused_outputs(backend, fused)
    wanted = fused_expected(fused)
    assert {x.dtype for x in (found[0], *found[3:])} == {fused.case.dtype}
    # The pools are returned as float32, but are as precise as the queries.
    slack = TOLERANCE[fused.case.dtype] / TOLERANCE[torch.float32]
    agree([found[0], *found[3:]], [wanted[0], *wanted[3:]])
    agree(found[1:3], wanted[1:3], slack)


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, table and positions."""
    generator = torch.Generator().manual_seed(3)
    heads = case.num_heads + case.num_kv_heads
    both = torch.randn(len(case.positions), heads, case.head_dim, generator=generator).to(case.dtype)
    q, k = both[:, : case.num_heads], both[:, case.num_heads :]
    if not case.fused:
        q, k = q.contiguous(), k.contiguous()
    angles = torch.rand(20, case.rotated // 2, generator=generator) * 6
    return (
        q,
        k,
        torch.cat((angles.cos(), angles.sin()), dim=-1),
        torch.tensor(case.positions, dtype=torch.int64),
    )


def axes(case: Case) -> Tensor:
    """Return the positions on three axes, [3, T]."""
    positions = torch.tensor(case.positions, dtype=torch.int64)
    return torch.stack([positions, (positions * 3 + 1) % 20, (positions * 7 + 2) % 20])


def outputs(backend: ModuleType, case: Case) -> list[Tensor]:
    q, k, table, positions = inputs(case)
    if case.axis_of_pair:
        table = backend.angles(table, axes(case), torch.tensor(case.axis_of_pair, dtype=torch.int32))
        positions = None
    return list(backend.rotate(q, k, table, positions, interleaved=case.interleaved, plan_cache={}))


def expected(case: Case) -> list[Tensor]:
    """Rotate pairs as complex numbers, in float64."""
    q, k, table, positions = inputs(case)
    lines = table[positions]
    if case.axis_of_pair:
        of_axes = table[axes(case)]  # [3, T, R]
        order = case.axis_of_pair * 2  # axis of each cosine, then of each sine
        lines = torch.stack([of_axes[axis, :, place] for place, axis in enumerate(order)], dim=-1)
    cos, sin = lines.double().unsqueeze(1).chunk(2, dim=-1)
    return [_turned(x.double(), torch.complex(cos, sin), case) for x in (q, k)]


def _turned(x: Tensor, turn: Tensor, case: Case) -> Tensor:
    head = x[..., : case.rotated]
    first, second = (head[..., ::2], head[..., 1::2]) if case.interleaved else head.chunk(2, dim=-1)
    pairs = torch.complex(first.contiguous(), second.contiguous()) * turn
    parts = (pairs.real, pairs.imag)
    turned = torch.stack(parts, -1).flatten(-2) if case.interleaved else torch.cat(parts, -1)
    return torch.cat((turned, x[..., case.rotated :]), dim=-1)
