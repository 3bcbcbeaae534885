"""The embedding in C++, from plain weights and from packed weights of an LM head: equal to torch bit for bit."""

from __future__ import annotations

import pytest
import torch

from cpp_kernels import DTYPES, backend, drawn
from kernel_cases.embedding import CASES, expected, outputs
from kernel_comparison import agree
from ops.embedding import native


@pytest.mark.parametrize("name", [name for name in CASES if "half" not in name])
def test_plain_weights_are_read_as_ever(name: str) -> None:
    agree(outputs(backend("embedding"), CASES[name]), expected(CASES[name]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(9, 24), (64, 34), (100, 576)])
@pytest.mark.parametrize("first_id", [None, 0, 3, 1000])
@pytest.mark.parametrize("scale", [None, 7.0])
def test_plain_weights_and_panels_give_what_torch_gives(
    dtype, shape: tuple[int, int], first_id: int | None, scale: float | None
) -> None:
    cpp, weight = backend("embedding", 2), drawn(*shape, dtype=dtype)
    packed = backend("matmul", 2).prepare(weight)
    assert cpp.reads(packed)
    high = len(weight) if first_id is None else len(weight) + 6
    ids = torch.randint(0, high, (37,), generator=torch.Generator().manual_seed(1))
    ids[0], ids[1] = 0, high - 1
    wanted = native.embed(ids, weight, first_id, scale=scale)
    strided = torch.stack([ids, ids], dim=1)[:, 0]
    for stored in (weight, packed):
        assert torch.equal(cpp.embed(ids, stored, first_id, scale=scale), wanted)
        assert torch.equal(cpp.embed(strided, stored, first_id, scale=scale), wanted)
        assert cpp.embed(ids[:0], stored, first_id, scale=scale).shape == (0, shape[1])


def test_what_rounds_a_weight_is_not_read() -> None:
    cpp, weight = backend("embedding"), drawn(64, 64)
    assert not cpp.reads(backend("matmul", weight_bits=8).prepare(weight))
    assert not cpp.reads(weight)
