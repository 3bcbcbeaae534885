"""Attention of encoders in C++: that of torch, the same bits beside any other texts and on any number of threads."""

from __future__ import annotations

import pytest
import torch

from cpp_kernels import DTYPES, LESSER, backend, drawn
from ops.attention import AttentionMetadata
from ops.encoder_attention import native

LENGTHS = (300, 1, 17, 128, 700)


def metadata(lengths: tuple[int, ...]) -> AttentionMetadata:
    pages = torch.zeros(len(lengths), max(lengths), dtype=torch.int32)
    return AttentionMetadata.build([0] * len(lengths), lengths, pages.numpy(), 1)


def compare(dtype: torch.dtype, head_dim: int, reach: int | None, *march: str) -> None:
    qkv = drawn(sum(LENGTHS), 6, head_dim, dtype=dtype)
    q, k, v = qkv.split(2, dim=1)  # tokens are further apart than their heads need
    options = {"scale": head_dim**-0.5, "reach": reach}
    found = backend("encoder_attention", 2, *march).attend_bidirectional(q, k, v, metadata(LENGTHS), **options)
    wide = native.attend_bidirectional(q.double(), k.double(), v.double(), metadata(LENGTHS), **options)
    assert (found.double() - wide).norm() < (2e-6 if dtype == torch.float32 else 1e-2) * wide.norm()
    first = 0
    for length in LENGTHS:
        part = slice(first, first + length)
        alone = backend("encoder_attention", 1, *march)
        own = alone.attend_bidirectional(q[part], k[part], v[part], metadata((length,)), **options)
        assert torch.equal(own, found[part])
        first += length


@pytest.mark.parametrize("reach", [None, 0, 5, 64])
@pytest.mark.parametrize("head_dim", [16, 32, 96])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_text_attends_to_itself(dtype: torch.dtype, head_dim: int, reach: int | None) -> None:
    compare(dtype, head_dim, reach)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("processor", LESSER)
def test_lesser_processors_follow(processor: str, dtype: torch.dtype) -> None:
    compare(dtype, 48, 64, *LESSER[processor])
