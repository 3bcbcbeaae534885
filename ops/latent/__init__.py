"""Attention over latent vectors (DeepSeek V2, arXiv 2405.04434), absorbed or with expanded keys and values.

A backend file holds

    prepare_heads(weight [H, O, I]) -> prepared
    join(latent [T, R], rotated [T, P]) -> [T, 1, R + P]
    attend_latent(plain [T, H, N], turned [T, H, P], pool, weights, metadata, options, attend) -> [T, H * V]

`join` puts a token's latent vector and rotated key one behind the other, as the pool [pages, 1, page, R + P] holds
them. Of a head's query the N plain numbers meet the latent vector, and the P turned ones the rotated key. Its keys are
latent @ weight.T, and so are its values, with weights of their own (`LatentWeights`). `attend_latent` computes

- rows of fewer than `expand_from` tokens absorbed: the keys' weight is applied to the queries and the values' to what
  was read, so that `attend`, an attention of `ops.attention`, reads the latent vectors as one head's keys and values;
- longer rows, if `expand_from` is a number, with keys and values that are made of the latent vectors for the while, of
  some heads or positions at a time.

Both give the same but for rounding. All KV of the step is stored before the call.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

FEWEST = 128  # tokens of rows that are expanded, however cheap that is: shorter ones keep the bits of single tokens


class LatentWeights(NamedTuple):
    """What makes keys and values of latent vectors, each as `prepare_heads` gives it."""

    absorbing: Tensor  # of [H, R, N]: the keys' weight, turned over
    values: Tensor  # of [H, V, R]
    value_dim: int  # V
    expanding: Tensor  # of [H, N, R]: the keys' weight; anything where nothing is expanded
    expand_from: int | None  # tokens that a row computes in this step; None: nothing is expanded


def fewest_to_expand(rank: int, plain_dim: int, value_dim: int) -> int | None:
    """The tokens of a row from which on keys and values of all that it sees had better be expanded; None: never.

    Multiplications of a head for C tokens that follow S cached ones, of which each sees S + C / 2: absorbed they are
    C (S + C / 2) (2 R + P), and C R (N + V) before and behind that; expanded C (S + C / 2) (N + P + V), and
    (S + C) R (N + V) for the keys and values. Behind much context the second is less from C = R (N + V) / (2 R - N - V)
    on: 171 tokens in DeepSeek V2 and V3, 399 in GLM-4.7-Flash. The times of the kernels in C++ meet there too or before
    (docs/benchmarks.md). Behind little context fewer would do, but what such rows save is little.
    """
    saved = 2 * rank - plain_dim - value_dim
    return max(FEWEST, -(-rank * (plain_dim + value_dim) // saved)) if saved > 0 else None
