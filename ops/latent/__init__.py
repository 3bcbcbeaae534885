"""Attention over latent vectors (MLA; DeepSeek V2, arXiv 2405.04434), absorbed or with expanded keys and values.

A backend file defines

    prepare_heads(weight [H, O, I]) -> prepared
    join(latent [T, R], k_pe [T, P]) -> [T, 1, R + P]
    attend_latent(q_nope [T, H, N], q_pe [T, H, P], pool, weights, metadata, options, attend) -> [T, H * V]

`join` concatenates a token's latent vector and its rotated key, as the pool [pages, 1, page, R + P] holds them.
A key consists of an unrotated part, computed from the latent vector, and the rotated key that all heads share. `q_nope`
and `q_pe` are the parts of a query for these two. The unrotated part of a head's keys is latent @ weight.T, and the
head's values are latent @ weight.T with another weight (`LatentWeights`). `prepare_heads` converts such weights to the
backend's layout. `attend_latent` computes

- rows of fewer than `expand_from` tokens absorbed: the weight of the keys is applied to the queries, and the weight of
  the values to the result. `attend`, a kernel of `ops.attention`, reads the latent vectors as the keys and values of
  one head;
- longer rows with expanded keys and values: these are computed from the latent vectors for some heads or positions at
  a time, and dropped after use. If `expand_from` is None, all rows are absorbed.

Both methods give the same result except for rounding. All KV of the step is stored before the call.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# Lower bound on `expand_from`. Rows of fewer tokens are always absorbed, so that each token's result is bit-identical
# to its result in a single-token row.
MIN_EXPANDED_TOKENS = 128


class LatentWeights(NamedTuple):
    """The weights that convert latent vectors to keys and values. The three tensors are results of `prepare_heads`."""

    absorbing: Tensor  # [H, R, N]: the keys' weight, transposed
    values: Tensor  # [H, V, R]
    value_dim: int  # V
    expanding: Tensor  # [H, N, R]: the keys' weight; unused if no row is expanded
    expand_from: int | None  # minimum number of tokens of an expanded row; None: no row is expanded


def min_tokens_to_expand(rank: int, nope_dim: int, value_dim: int) -> int | None:
    """Return the minimum number of new tokens of a sequence for which MLA is faster with expanded keys and values.

    Returns None if absorbed MLA is always faster. Let a sequence have C new tokens after S cached tokens, so that a new
    token attends to S + C / 2 positions on average. Let R be the size of a latent vector, P and N the sizes of the
    rotated and the unrotated part of a key, and V the size of a value. One head needs these multiplications:

    - absorbed: C (S + C / 2) (2 R + P) for attention, and C R (N + V) before and after it;
    - expanded: C (S + C / 2) (N + P + V) for attention, and (S + C) R (N + V) for the keys and values.

    With a long context, expansion needs fewer multiplications if C is at least R (N + V) / (2 R - N - V). This is 171
    tokens in DeepSeek V2 and V3, and 399 in GLM-4.7-Flash. In measurements of the C++ kernels, the break-even point is
    at or below this number (tests/bench/lab-notes.md). With a short context, expansion is faster for even fewer tokens,
    but saves little time.
    """
    saved = 2 * rank - nope_dim - value_dim
    return max(MIN_EXPANDED_TOKENS, -(-rank * (nope_dim + value_dim) // saved)) if saved > 0 else None
