"""Check whether a row's attention depends on other rows of its batch."""

from __future__ import annotations

from importlib import import_module

import torch

from kernel_cases.attention import SCALE, Case, step
from ops.attention import AttentionMetadata, AttentionOptions

ROWS = ((70, 1), (5, 1), (900, 1), (0, 40))


def bits_differ(device: str, file: str) -> list[int]:
    """Return those of the first three rows whose results alone differ in any bit from their results in the whole
    batch.
    """
    attend = import_module(f"ops.attention.{file}").make_attend()
    case = Case(ROWS, num_heads=8, head_dim=128, dtype=torch.bfloat16)
    q, k_pool, v_pool, together = step(case)
    q, k_pool, v_pool = (x.to(device) for x in (q, k_pool, v_pool))
    table, size = together.page_table.numpy(), together.page_size
    starts, counts = zip(*ROWS)
    there = AttentionMetadata.build(starts, counts, table, size, device)
    whole = attend(q, k_pool, v_pool, there, AttentionOptions(scale=SCALE))
    differing = []
    for row in range(3):
        alone = AttentionMetadata.build([starts[row]], [1], table[row : row + 1], size, device)
        result = attend(q[row : row + 1], k_pool, v_pool, alone, AttentionOptions(scale=SCALE))
        if not torch.equal(result[0], whole[row]):
            differing.append(row)
    return differing
