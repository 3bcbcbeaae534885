from __future__ import annotations

import numpy as np
import pytest
import torch

from ops.attention import AttentionMetadata, AttentionOptions, native, with_onednn

PAGE = 4

Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionMetadata]


def paged(starts: list[int], heads: int, kv_heads: int, head_dim: int, strength: float = 1.0) -> Case:
    """Return (q, k_pool, v_pool, inputs) of single tokens in bfloat16. Unused memory is NaN."""
    generator = torch.Generator().manual_seed(len(starts))
    width = max(starts) // PAGE + 1
    table = np.random.default_rng(0).permutation(len(starts) * width).astype(np.int32).reshape(-1, width)
    pools = torch.randn(2, table.size, kv_heads, PAGE, head_dim, generator=generator)
    for row, start in enumerate(starts):
        last, offset = divmod(start, PAGE)
        pools[:, table[row, last], :, offset + 1 :] = torch.nan
        pools[:, table[row, last + 1 :]] = torch.nan
    q = strength * torch.randn(len(starts), heads, head_dim, generator=generator)
    inputs = AttentionMetadata.build(starts, [1] * len(starts), table, PAGE)
    return q.bfloat16(), pools[0].bfloat16(), pools[1].bfloat16(), inputs


def errors(case: Case, window: int | None = None) -> tuple[float, float]:
    """Return the mean distances from float64 of (the products, torch's attention)."""
    q, k_pool, v_pool, inputs = case
    truth = native.attend(
        q.double(), k_pool.double(), v_pool.double(), inputs, AttentionOptions(scale=0.3, window=window)
    )
    outs = (m.attend(*case, AttentionOptions(scale=0.3, window=window)) for m in (with_onednn, native))
    ours, theirs = ((out.double() - truth).abs().mean().item() for out in outs)
    return ours, theirs


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("heads", [(3, 3), (6, 3), (9, 3), (8, 2)])
@pytest.mark.parametrize("starts", [[12] * 16, [13, 15, 15, 14, 13, 12, 15, 14] * 4, [40, 3, 41, 0, 38, 2] * 6])
def test_products_are_about_as_exact_as_torchs_own_attention(starts, heads, window) -> None:
    ours, theirs = errors(paged(starts, *heads, head_dim=24), window=window)
    assert ours < 1.5 * theirs


def test_large_scores_are_not_rounded_before_the_softmax() -> None:
    ours, theirs = errors(paged([30] * 32, 3, 3, head_dim=16, strength=8))
    assert ours < 1.5 * theirs


@pytest.mark.parametrize(("rows", "capped"), [(10, None), (11, 2.0)])
def test_small_batches_and_capped_scores_are_left_to_native(rows, capped) -> None:
    case = paged([9] * rows, 3, 3, head_dim=8)
    ours, theirs = (m.attend(*case, AttentionOptions(scale=0.3, soft_cap=capped)) for m in (with_onednn, native))
    assert torch.equal(ours, theirs)


def test_scales_of_the_cache_count_in_products_too() -> None:
    case = paged([9] * 16, 3, 3, head_dim=8)
    scaled, plain = (
        with_onednn.attend(*case, AttentionOptions(scale=scale, k_scale=k_scale, v_scale=v_scale))
        for scale, k_scale, v_scale in ((0.1, 3.0, 2.0), (0.1 * 3.0, 1.0, 1.0))
    )
    assert torch.equal(scaled, 2 * plain)


def test_sinks_are_left_to_native() -> None:
    case, sinks = paged([9] * 16, 3, 3, head_dim=8), torch.randn(3)
    ours, theirs = (m.attend(*case, AttentionOptions(scale=0.3, sinks=sinks)) for m in (with_onednn, native))
    assert torch.equal(ours, theirs)
