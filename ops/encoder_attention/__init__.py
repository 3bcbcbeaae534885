"""Bidirectional attention of encoders: every token attends to its whole row, without a cache.

A backend file defines

    attend_bidirectional(q [T, H, D], k [T, H, D], v [T, H, D], metadata, *, scale, reach=None, bias=None)
        -> [T, H, D]

`metadata` (`ops.attention.AttentionMetadata`) gives the bounds of the rows; each row is a complete text. A token
attends to all tokens of its row or, with `reach`, to those at most `reach` positions away. Scores are q.k * scale. If
`bias` is given, `bias(L)`, [H, L, L] in the dtype of q, is added to the scores of a row of L tokens. `bias` and `reach`
cannot be combined.
"""
