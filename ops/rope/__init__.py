"""Rotary position embedding by table.

A backend file holds `rotate(q, k, table, positions, *, interleaved=False, plan_cache=None) -> (q, k)`:

    q          [T, H, D]
    k          [T, K, D]
    table      [N, R] float32: cosines of the R / 2 angles of each position, then their sines; R <= D
    positions  [T] int64, < N
    plan_cache the step's own (`ops.attention.AttentionMetadata.plan_cache`): what is derived from table and
               positions in the first layer may be kept there for the others

The first R dimensions of each head are rotated, the others pass. Pair i is (i, i + R / 2), or (2i, 2i + 1)
when `interleaved`. The inputs may be overwritten: use what it returns. Source: RoFormer, arXiv 2104.09864.
"""
