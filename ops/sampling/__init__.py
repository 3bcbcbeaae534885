"""Sampling of tokens from logits.

A backend file defines three operations:

- `choose` picks one token per row, among the tokens that a grammar allows.
- `penalize` changes the logits of previous tokens.
- `score` returns log-probabilities of requested tokens and of the best tokens.

All implementations guarantee:

- A row's result depends only on that row, bit for bit. Therefore probability mass is summed in integers: the
  weight of a token is floor(exp((logit - largest logit) / temperature) * 2**b) with b = 62 - bits(V - 1). Any
  order of summation returns the same sum, and the sum of V weights fits in 63 bits.
- A token of weight zero is never chosen. (With V = 150,000 its probability is less than 1e-13 of the largest one.)
- Tokens are ranked by logit, the largest first. Equal logits are ranked by lower id.
- No operation waits for a CUDA device.
- A row with a NaN, with +inf or without a finite logit is not sound. This is not an error: see `choose`.

Letters: R rows, V vocabulary, Q penalised or masked rows, C sequences with counts, N best tokens, M
requested token ids.

choose(logits, arrays, host=None, masks=None) -> (ids, sound)
    Pick one token per row of `logits` (float32 [R, V]; `masks` are applied in place).

    `arrays` are on the device of the logits. If this is a GPU, `host` has copies of the arrays on the host. They are
    read to plan the work without waiting for the GPU.

    `masks` (`Masks`) set the logits of forbidden tokens to -inf, before all other operations. A row without an allowed
    token is not sound.

    Returns the ids (int64 [R]) and whether each row is sound (bool [R]). A row that is not sound gets id 0.

    Greedy rows take the largest logit. Other rows apply their limits in this order:

    - `top_n_sigma` keeps the tokens whose logit is at least the largest logit minus this number of standard deviations
      of the row's finite logits (arXiv 2411.07641);
    - `typical_p` keeps the tokens whose surprise, -log(probability), is nearest to the entropy, until their mass
      reaches this share (arXiv 2202.00666). Equal distances are ranked by lower id;
    - `top_k` keeps this number of best tokens;
    - `top_p` keeps the shortest prefix of the ranking whose mass reaches this share of the mass of all
      remaining tokens;
    - `min_p` keeps the tokens whose probability is at least this share of the largest;
    - XTC ("exclude top choices") applies to a row with probability `xtc_probability`; a hash of the uniform number
      decides. If two or more kept tokens have at least the share `xtc_threshold` of the kept mass, XTC drops all of
      them except the least likely one.

    At least one token is kept. The uniform number selects a kept token by the inverse distribution function: in ranked
    order if top_k, top_p or XTC is used, otherwise in order of ids. A backend may support only some of these limits.
    With `fallback.native_for_other_limits`, `native` computes the rows with other limits.

penalize(logits, rows, counted, counts, in_prompt, frequency, presence, repetition) -> None
    Penalise tokens that were generated before and, for repetition, tokens of the prompt. Changes `logits` in place.

    - `logits`: float32 [R, V];
    - `rows`: int64 [Q], the distinct rows to change;
    - `counted`: int64 [Q], index of each of these rows into `counts` and `in_prompt`;
    - `counts`: int32 [C, V], number of times that each token was generated;
    - `in_prompt`: bool [C, V], whether the prompt contains each token;
    - `frequency`, `presence`, `repetition`: float32 [Q], the penalties.

    Subtracts frequency * count, and then presence if the count is not 0. Then, for tokens that were generated or are in
    the prompt, divides positive logits by repetition and multiplies other logits by repetition.

score(logits, temperature, chosen_ids, num_top, requested_ids) -> Scores
    Return the log-softmax of `logits` (float32 [R, V], unchanged) / `temperature` (float32 [R]) at some tokens.

    `chosen_ids` is int64 [R], `requested_ids` is int64 [R, M], and N is the smaller of `num_top` and V. A forbidden
    token has -inf. A row that is not sound has no meaningful values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

# For each limit on the tokens that a row may choose, the value at which it keeps all tokens.
NO_LIMIT: Mapping[str, float] = {
    "top_n_sigma": -1.0,
    "typical_p": 1.0,
    "top_k": 2**30,
    "top_p": 1.0,
    "min_p": 0.0,
    "xtc_probability": 0.0,
}


class SamplingArrays(NamedTuple):
    """Sampling parameters of R rows."""

    greedy: Tensor  # bool [R]; greedy rows ignore the other fields
    temperature: Tensor  # float32 [R], above 0
    top_n_sigma: Tensor  # float32 [R]; 0 or less: no limit
    typical_p: Tensor  # float32 [R], in (0, 1]; 1: no limit
    top_k: Tensor  # int32 [R], at least 1; V or more: no limit
    top_p: Tensor  # float32 [R], in (0, 1]; 1: no limit
    min_p: Tensor  # float32 [R], in [0, 1]; 0: no limit
    xtc_probability: Tensor  # float32 [R], in [0, 1]; 0: no limit
    xtc_threshold: Tensor  # float32 [R], in [0, 1]; without effect if `xtc_probability` is 0
    uniform: Tensor  # float32 [R], random in [0, 1); u stands for the interval [u, u + 2**-24)


class Masks(NamedTuple):
    """Allowed tokens of Q rows, on the device of the logits.

    Token i is allowed if bit i % 32 (0 is the lowest) of word i // 32 is 1. Bits after the vocabulary are ignored.
    """

    rows: Tensor  # int64 [Q], distinct
    bitmask: Tensor  # int32 [Q, at least ceil(V / 32)]


class Scores(NamedTuple):
    """Log-probabilities of R rows. `top` is ranked by logit, the largest first, and equal logits by lower id."""

    chosen: Tensor  # float32 [R]
    top: Tensor  # float32 [R, N]
    top_ids: Tensor  # int64 [R, N]
    requested: Tensor  # float32 [R, M]
