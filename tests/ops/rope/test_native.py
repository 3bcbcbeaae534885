"""Rotation against multiplication of complex numbers."""

from __future__ import annotations

import pytest
import torch

from kernel_cases.rope import CASES, FUSED_CASES, LATENT_CASES, agree_fused, agree_latent, expected, outputs
from kernel_comparison import agree
from ops.rope import native
from ops.rope.native import rotate


def table_of(angles: torch.Tensor) -> torch.Tensor:
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [8, 4])
def test_pairs_turn_like_complex_numbers_and_the_rest_passes(interleaved, rotated) -> None:
    angles = torch.rand(20, rotated // 2) * 6
    positions = torch.tensor([7, 0, 19])
    q, k = torch.randn(3, 4, 8), torch.randn(3, 2, 8)
    for x, out in zip((q, k), rotate(q.clone(), k.clone(), table_of(angles), positions, interleaved=interleaved)):
        head = x[..., :rotated]
        first, second = (head[..., ::2], head[..., 1::2]) if interleaved else head.chunk(2, dim=-1)
        turn = torch.polar(torch.ones(3, 1, rotated // 2), angles[positions].unsqueeze(1))
        pairs = torch.complex(first, second) * turn
        parts = (pairs.real, pairs.imag)
        expected = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
        torch.testing.assert_close(out[..., :rotated], expected)
        assert torch.equal(out[..., rotated:], x[..., rotated:])


def test_scores_depend_on_the_distance_alone() -> None:
    table = table_of(torch.outer(torch.arange(64.0), torch.tensor([1.0, 0.1])))
    q, k = torch.randn(1, 1, 4), torch.randn(1, 1, 4)

    def score(at: int, seen: int) -> torch.Tensor:
        turned_q, _ = rotate(q, k, table, torch.tensor([at]))
        _, turned_k = rotate(q, k, table, torch.tensor([seen]))
        return (turned_q * turned_k).sum()

    torch.testing.assert_close(score(9, 4), score(60, 55), atol=1e-5, rtol=1e-5)


def test_dtype_is_kept() -> None:
    q, k = torch.randn(2, 1, 1, 4).bfloat16()
    q, k = rotate(q, k, table_of(torch.zeros(1, 2)), torch.tensor([0]))
    assert q.dtype == k.dtype == torch.bfloat16


@pytest.mark.parametrize("name", CASES)
def test_native_follows_the_formula_in_every_case(name) -> None:
    agree(outputs(native, CASES[name]), expected(CASES[name]))


@pytest.mark.parametrize("name", FUSED_CASES)
def test_norm_rotation_and_store_follow_the_formula(name) -> None:
    agree_fused(native, FUSED_CASES[name])


@pytest.mark.parametrize("name", LATENT_CASES)
def test_latent_vectors_and_keys_follow_the_formula(name) -> None:
    agree_latent(native, LATENT_CASES[name])


@pytest.mark.parametrize("interleaved", [False, True])
def test_what_a_memo_keeps_serves_its_own_table_only(interleaved) -> None:
    tables = [table_of(torch.rand(9, 3) * 6) for _ in range(2)]
    q, k, positions, plan_cache = torch.randn(2, 3, 6), torch.randn(2, 1, 6), torch.tensor([4, 8]), {}
    for table in (*tables, *tables):
        kept = rotate(q, k, table, positions, interleaved=interleaved, plan_cache=plan_cache)
        for ours, plain in zip(kept, rotate(q, k, table, positions, interleaved=interleaved)):
            assert torch.equal(ours, plain)
    assert len(plan_cache) == 2
