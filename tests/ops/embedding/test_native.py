from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from kernel_cases.embedding import CASES, expected, outputs
from kernel_comparison import agree
from ops.embedding import native


@pytest.mark.parametrize("name", CASES)
def test_native_follows_its_words_in_every_case(name: str) -> None:
    found = outputs(native, CASES[name])
    agree(found, expected(CASES[name]))
    assert [x.dtype for x in found] == [CASES[name].dtype, torch.float32]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_sum_over_parts_is_the_lookup_of_the_whole(num_ranks: int) -> None:
    weight, ids = torch.randn(11, 4), torch.tensor([10, 0, 3, 4, 7])
    edges = [rank * 11 // num_ranks for rank in range(num_ranks + 1)]
    parts = [native.embed(ids, weight[low:high], low) for low, high in pairwise(edges)]
    torch.testing.assert_close(torch.stack(parts).sum(0), weight[ids])
