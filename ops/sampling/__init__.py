"""Sampling of tokens from logits.

A backend file defines three operations:

- `choose` picks one token per row. Masks restrict the choice, for example to the tokens that a grammar allows.
- `penalize` applies penalties to the logits of tokens that the sequence already contains.
- `score` returns log-probabilities of requested tokens and of the tokens with the largest logits.

All implementations guarantee:

- A row's result is bit-identical in every batch. Therefore probability mass is summed in integers, so that the sum
  does not depend on the order of summation. The weight of a token is
  floor(exp((logit - largest logit) / temperature) * 2**b) with b = 62 - (number of bits of V - 1). The sum of V weights
  fits in 63 bits. The *mass* of some tokens is the sum of their weights.
- A token of weight 0 is never chosen. (With V = 150,000 it has less than 1e-13 of the largest probability.)
- Tokens are ranked by logit, the largest first. Equal logits are ranked by lower id.
- No operation waits for a CUDA device.
- A row is *sound* if it has a finite logit and neither NaN nor +inf. Other rows raise no error: see `choose`.

Letters: R rows, V vocabulary, Q penalised or masked rows, C sequences with counts, N best tokens, M
requested token ids.

choose(logits, arrays, host=None, masks=None) -> (ids, sound)
    Pick one token per row of `logits` (float32 [R, V]; `masks` are applied in place).

    `arrays` are on the device of the logits. If this is a GPU, `host` has copies of the arrays on the host. The backend
    selects its kernels by these copies, so that it need not wait for the GPU.

    `masks` (`Masks`) set the logits of forbidden tokens to -inf, before all other operations. A row without an allowed
    token is not sound.

    Returns the ids (int64 [R]) and whether each row is sound (bool [R]). A row that is not sound gets id 0.

    Greedy rows take the largest logit. Other rows apply their limits in this order:

    - `top_n_sigma` keeps the tokens whose logit is at least the largest logit minus this number of standard deviations
      of the row's finite logits (arXiv 2411.07641);
    - `typical_p` ranks tokens by the distance of their surprise, -log(probability), to the entropy, the nearest first
      and equal distances by lower id. It keeps the shortest prefix with this share of the mass (arXiv 2202.00666);
    - `top_k` keeps this number of best tokens;
    - `top_p` keeps the shortest prefix of the ranking that has at least this share of the mass of all tokens that the
      previous limits keep;
    - `min_p` keeps the tokens whose probability is at least this share of the largest probability;
    - XTC ("exclude top choices") applies to a row with probability `xtc_probability`; a hash of the uniform number
      decides. Likely tokens are those with at least the share `xtc_threshold` of the mass of all kept tokens. XTC
      drops all likely tokens except the least likely of them.

    At least one token is kept. The uniform number selects a kept token by the inverse distribution function, in ranked
    order if top_k, top_p or XTC is used, otherwise in order of ids. A backend may support only some of these limits and
    leave rows with other limits to `native` (`fallback.native_for_other_limits`).

penalize(logits, rows, counted, counts, in_prompt, frequency, presence, repetition) -> None
    Penalise generated tokens and, with `repetition`, also tokens of the prompt. Changes `logits` in place.

    - `logits`: float32 [R, V];
    - `rows`: int64 [Q], the rows of `logits` to change, all distinct;
    - `counted`: int64 [Q], index of the row's sequence in `counts` and `in_prompt`;
    - `counts`: int32 [C, V], number of times that each token was generated;
    - `in_prompt`: bool [C, V], whether the prompt contains each token;
    - `frequency`, `presence`, `repetition`: float32 [Q], the penalties.

    Subtracts frequency * count, and then presence if the count is not 0. Then, for tokens that were generated or are in
    the prompt, divides positive logits by repetition and multiplies other logits by repetition.

score(logits, temperature, chosen_ids, num_top, requested_ids) -> Scores
    Return the log-softmax of `logits` (float32 [R, V], unchanged) / `temperature` (float32 [R]) at some tokens.

    `chosen_ids` is int64 [R], `requested_ids` is int64 [R, M], and N is the smaller of `num_top` and V. The result of a
    forbidden token is -inf. The results of a row that is not sound are arbitrary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

# Limit on the tokens that a row may choose -> the value with which the limit keeps all tokens.
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
    uniform: Tensor  # float32 [R], random multiples of 2**-24 in [0, 1)


class Masks(NamedTuple):
    """Allowed tokens of Q rows, on the device of the logits.

    Token i is allowed if bit i % 32 (0 is the lowest) of word i // 32 is 1. Bits from V on are ignored.
    """

    rows: Tensor  # int64 [Q], distinct
    bitmask: Tensor  # int32 [Q, at least ceil(V / 32)]


class Scores(NamedTuple):
    """Log-probabilities of R rows. `top` is ranked by logit, the largest first, and equal logits by lower id."""

    chosen: Tensor  # float32 [R]
    top: Tensor  # float32 [R, N]
    top_ids: Tensor  # int64 [R, N]
    requested: Tensor  # float32 [R, M]
