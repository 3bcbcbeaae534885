from __future__ import annotations

import numpy as np
import pytest
import torch

from kernel_cases.kv import CASES, expected, outputs
from ops.attention import AttentionMetadata
from ops.kv import native
from ops.kv.native import store


@pytest.mark.parametrize("page_size", [1, 4])
def test_each_token_lands_at_its_slot_and_nothing_else_changes(page_size) -> None:
    k_pool, v_pool = torch.full((2, 12, 2, page_size, 3), -1.0)
    table = np.arange(12, dtype=np.int32)[::-1].reshape(2, 6).copy()
    inputs = AttentionMetadata.build([2, 0], [3, 1], table, page_size)
    k, v = torch.randn(2, 4, 2, 3)
    store(k, v, k_pool, v_pool, inputs)
    for pool, new in ((k_pool, k), (v_pool, v)):
        stored = pool.transpose(1, 2).flatten(0, 1)  # [slots, K, D]
        torch.testing.assert_close(stored[inputs.slot_mapping], new)
        assert (stored == -1).all(-1).all(-1).sum() == 12 * page_size - 4


def test_values_are_converted_to_the_pools_dtype() -> None:
    pools = torch.zeros((2, 2, 1, 4, 2), dtype=torch.bfloat16)
    inputs = AttentionMetadata.build([0], [1], np.zeros((1, 1), np.int32), 4)
    store(torch.ones(1, 1, 2), torch.ones(1, 1, 2), pools[0], pools[1], inputs)
    assert pools[:, 0, 0, 0].eq(1).all()


@pytest.mark.parametrize("name", CASES)
def test_native_equals_one_token_after_the_other(name) -> None:
    for found, wanted in zip(outputs(native, CASES[name]), expected(CASES[name]), strict=True):
        assert torch.equal(found, wanted)
