"""Rotation in C++."""

from __future__ import annotations

import pytest
import torch

from cpp_kernels import DTYPES, THREADS, backend, drawn
from kernel_cases.rope import (
    CASES,
    FUSED_CASES,
    LATENT_CASES,
    Case,
    FusedCase,
    LatentCase,
    agree_fused,
    agree_latent,
    expected,
    inputs,
    outputs,
)
from kernel_comparison import agree

TYPED = {
    f"{name}, {dtype}": case._replace(dtype=dtype)
    for name, case in CASES.items()
    if case.dtype != torch.float16
    for dtype in DTYPES
}
ODD = {
    "more angles than lanes": Case(3, 1, 128, 128),
    "angles that fill no lanes": Case(2, 1, 80, 80),
    "angles that fill no lanes, interleaved": Case(2, 1, 80, 74, interleaved=True),
    "partial, more than lanes": Case(5, 5, 96, 72, fused=True),
    "many tokens": Case(1, 1, 6, 6, positions=tuple(place % 20 for place in range(131))),
    "no tokens": Case(positions=()),
}


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("case", [*TYPED.values(), *ODD.values()], ids=[*TYPED, *ODD])
def test_kernel_turns_like_complex_numbers(case: Case, num_threads: int) -> None:
    found = outputs(backend("rope", num_threads), case)
    agree(found, expected(case))
    assert {x.dtype for x in found} == {case.dtype}


@pytest.mark.parametrize("case", FUSED_CASES.values(), ids=FUSED_CASES)
def test_norm_rotation_and_store_follow_the_formula(case: FusedCase) -> None:
    if case.case.dtype not in DTYPES:
        pytest.skip("the C++ kernels do not compute in float16")
    agree_fused(backend("rope"), case)


@pytest.mark.parametrize("case", LATENT_CASES.values(), ids=LATENT_CASES)
def test_latent_vectors_and_keys_follow_the_formula(case: LatentCase) -> None:
    if case.dtype not in DTYPES:
        pytest.skip("the C++ kernels do not compute in float16")
    agree_latent(backend("rope"), case)


def test_slices_of_one_tensor_are_turned_in_place_and_nothing_else() -> None:
    case = Case(3, 2, 32, 24)
    q, k, table, positions = inputs(case)
    values = drawn(len(q), 2, 32)
    qkv = torch.cat((q, k, values), dim=1)
    backend("rope").rotate(qkv[:, :3], qkv[:, 3:5], table, positions)
    wanted = [x.float() for x in expected(case)]
    agree([qkv], [torch.cat((*wanted, values), dim=1)])


def test_strides_that_no_kernel_reads_are_copied() -> None:
    case = Case(4, 4, 16, 16)
    q, k, table, positions = inputs(case)
    strange = [x.transpose(0, 2).contiguous().transpose(0, 2) for x in (q, k)]
    agree(backend("rope").rotate(*strange, table, positions), expected(case))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_token_alone_is_the_token_among_others_on_any_threads(dtype: torch.dtype, interleaved: bool) -> None:
    case = Case(5, 3, 40, 40, interleaved, dtype, positions=tuple(range(19)))
    one, two = (outputs(backend("rope", number), case) for number in THREADS)
    for place in range(19):
        q, k, table, positions = inputs(case)
        at = slice(place, place + 1)
        turned = backend("rope").rotate(q[at], k[at], table, positions[at], interleaved=interleaved)
        for alone, some, others in zip(turned, one, two, strict=True):
            assert torch.equal(alone, some[at])
            assert torch.equal(some, others)
