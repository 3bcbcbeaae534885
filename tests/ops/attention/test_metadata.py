from __future__ import annotations

import numpy as np

from ops.attention import AttentionMetadata, token_positions


def test_slots_follow_the_page_table() -> None:
    table = np.array([[7, 2], [5, 0]], np.int32)
    inputs = AttentionMetadata.build([3, 0], [2, 3], table, page_size=4)
    assert inputs.slot_mapping.tolist() == [7 * 4 + 3, 2 * 4 + 0, 20, 21, 22]
    assert inputs.query_starts.tolist() == [0, 2, 5]
    assert inputs.starts.tolist() == inputs.starts_host == [3, 0]
    assert inputs.counts.tolist() == inputs.counts_host == [2, 3]


def test_positions_of_a_batch_run_on_from_each_start() -> None:
    assert token_positions([3, 0], [2, 3]).tolist() == [3, 4, 0, 1, 2]
    assert token_positions([], []).tolist() == []
