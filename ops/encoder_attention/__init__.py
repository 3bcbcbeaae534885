"""Attention of encoders: every token of a row sees the whole row, and nothing is cached.

A backend file holds

    attend_rows(q [T, H, D], k [T, H, D], v [T, H, D], counts, *, scale, reach=None, bias=None) -> [T, H, D]

`counts` are the lengths of the rows, which lie one after the other, as numbers on the host. A token attends to all
tokens of its row, or to those at most `reach` positions before and behind it. Scores are q.k * scale, and `bias` where
there is one: a function that gives what is added in a row of so many tokens, [H, L, L] in the dtype of q.
"""
