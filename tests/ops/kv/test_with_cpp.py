"""Cache writes in C++, which must preserve every bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cpp_kernels import DTYPES, THREADS, backend, drawn
from kernel_cases.kv import CASES, Case, expected, outputs
from ops.attention import AttentionMetadata

ODD = {
    f"{case}": case
    for dtype in DTYPES
    for case in (
        Case(3, 1, 1, dtype, dtype),
        Case(1, 5, 17, dtype, dtype, fused=True),
        Case(16, 2, 33, dtype, dtype),
        Case(4, 2, 32, dtype, torch.float8_e4m3fn, 2**-8, 0.5, fused=True),
        Case(3, 1, 16, dtype, torch.float8_e5m2, 0.5, 2.0),
    )
}


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("case", [*CASES.values(), *ODD.values()], ids=[*CASES, *ODD])
def test_store_equals_one_token_after_the_other(case: Case, num_threads: int) -> None:
    for found, wanted in zip(outputs(backend("kv", num_threads), case), expected(case), strict=True):
        assert torch.equal(found, wanted)


def places(count: int, page_size: int, num_pages: int) -> AttentionMetadata:
    return AttentionMetadata.build([0], [count], np.arange(num_pages, dtype=np.int32)[None, ::-1], page_size)


@pytest.mark.parametrize("num_threads", THREADS)
def test_many_tokens_land_at_their_slots_and_nothing_else_changes(num_threads: int) -> None:
    k_pool, v_pool = torch.full((2, 30, 3, 4, 5), -9.0)
    k, v = drawn(2, 101, 3, 5)
    inputs = places(101, 4, 30)
    backend("kv", num_threads).store(k, v, k_pool, v_pool, inputs)
    for pool, new in ((k_pool, k), (v_pool, v)):
        stored = pool.transpose(1, 2).flatten(0, 1)  # [slots, K, D]
        assert torch.equal(stored[inputs.slot_mapping], new)
        assert (stored == -9).all(-1).all(-1).sum() == 30 * 4 - 101


@pytest.mark.parametrize("pool_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_float8_is_rounded_as_torch_does(dtype: torch.dtype, pool_dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(pool_dtype).float()
    between = every[every.isfinite()].sort().values
    between = (between[1:] + between[:-1]) / 2  # ties
    few = torch.tensor([1e-9, 3e38, -3e38, torch.inf, -torch.inf, torch.nan])
    numbers = torch.cat([every, between, between * 1.001, torch.randn(800), 1e-3 * torch.randn(400), few]).to(dtype)
    numbers = torch.nn.functional.pad(numbers, (0, -len(numbers) % 64)).view(-1, 2, 32)
    pools = torch.zeros(2, len(numbers), 2, 1, 32).to(pool_dtype)
    backend("kv").store(numbers, -numbers, *pools, places(len(numbers), 1, len(numbers)))
    most = torch.finfo(pool_dtype).max
    for pool, given in zip(pools, (numbers, -numbers), strict=True):
        wanted = given.float().clamp(-most, most).to(pool_dtype)
        assert torch.equal(pool[:, :, 0].flip(0).float().nan_to_num(9e9), wanted.float().nan_to_num(9e9))


def test_strides_that_no_kernel_reads_are_copied() -> None:
    k_pool, v_pool = torch.zeros(2, 3, 2, 4, 8)
    k, v = drawn(2, 8, 2, 7).transpose(1, 3)
    inputs = places(7, 4, 3)
    backend("kv").store(k, v, k_pool, v_pool, inputs)
    for pool, new in ((k_pool, k), (v_pool, v)):
        assert torch.equal(pool.transpose(1, 2).flatten(0, 1)[inputs.slot_mapping], new)


def test_no_tokens_are_stored_without_harm() -> None:
    pools = torch.ones(2, 3, 2, 4, 8)
    backend("kv").store(*torch.empty(2, 0, 2, 8), *pools, places(0, 4, 3))
    assert pools.eq(1).all()
