"""What stands around latent attention, in C++ as in torch."""

from __future__ import annotations

import pytest
import torch

from cpp_kernels import DTYPES, backend, drawn
from ops.latent import native


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_heads_have_products_of_their_own(dtype: torch.dtype, tokens: int) -> None:
    heads, plain_dim, turned_dim, rank, value_dim = 3, 24, 8, 40, 36
    cpp = backend("latent", 2)
    query = drawn(tokens, heads, plain_dim + turned_dim, dtype=dtype)
    plain, turned = query.split((plain_dim, turned_dim), dim=-1)
    keys, values = drawn(heads, rank, plain_dim, dtype=dtype), drawn(heads, value_dim, rank, dtype=dtype)
    latent = drawn(tokens, rank + 7 + turned_dim, dtype=dtype)
    parts = (latent[:, :rank], latent[:, -turned_dim:])

    def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
        assert ours.shape == theirs.shape
        assert (ours.double() - theirs.double()).norm() < (
            1e-6 if dtype == torch.float32 else 5e-3
        ) * theirs.norm()

    read = cpp.absorb(plain, turned, cpp.prepare_heads(keys))
    close(read, native.absorb(plain.double(), turned, native.prepare_heads(keys.double())))
    given = cpp.expand(read, cpp.prepare_heads(values), value_dim)
    close(given, native.expand(read.double(), native.prepare_heads(values.double()), value_dim))
    assert torch.equal(cpp.join(*parts), native.join(*parts))
