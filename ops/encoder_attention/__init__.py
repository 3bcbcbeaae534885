"""Attention of encoders: every token of a row sees the whole row, and nothing is cached.

A backend file holds

    attend_texts(q [T, H, D], k [T, H, D], v [T, H, D], metadata, *, scale, reach=None, bias=None) -> [T, H, D]

`metadata` (`ops.attention.AttentionMetadata`) says where the rows begin and end, each a whole text. A token attends to
all tokens of its row, or to those at most `reach` positions before and behind it. Scores are q.k * scale, and `bias`
where there is one: a function that gives what is added in a row of so many tokens, [H, L, L] in the dtype of q.
"""
