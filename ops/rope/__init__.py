"""Rotary position embedding with a table of cosines and sines.

A backend file defines

    rotate(q, k, table, positions, *, interleaved=False, plan_cache=None) -> (q, k)
    angles(table, positions [3, T], axis_of_pair int32 [R / 2]) -> float32 [T, R]

    q          [T, H, D]
    k          [T, K, D]
    table      [N, R] float32: for each position the cosines of R / 2 angles, then their sines; R <= D
    positions  [T] int64, < N; None: row t of the table belongs to token t, as in the result of `angles`
    plan_cache `AttentionMetadata.plan_cache` of the step, in which the first layer may store factors for later
               layers; None: do not store any

`rotate` rotates the first R dimensions of each head and leaves the other dimensions unchanged. Pair i has the
dimensions (i, i + R / 2), or (2i, 2i + 1) if `interleaved`. It may overwrite its inputs; use the returned tensors.
Source: RoFormer, arXiv 2104.09864.

`angles` supports positions with three axes (time, height, width): it returns each token's row of the table, in which
pair i depends on the token's position on axis `axis_of_pair[i]`. Source: Qwen2-VL, arXiv 2409.12191.
"""
