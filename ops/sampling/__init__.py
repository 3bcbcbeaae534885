"""Choosing tokens from logits: the contract.

Three operations, each with a plain-torch implementation in `native`:

- `choose` picks one token per row, of those that a grammar allows.
- `penalize` changes logits of tokens that were seen before.
- `score` returns log-probabilities of given and of the best tokens.

What every implementation promises:

- A row's result depends on that row alone, bit for bit. Therefore probability mass is summed in integers:
  the weight of a token is floor(exp((logit - largest logit) / temperature) * 2**b) with b = 62 - bits(V - 1),
  so any order of summation gives the same sum and V weights fit in 63 bits.
- A token of weight zero is never chosen. (At V = 150,000 that is less than 1e-13 of the likeliest.)
- Tokens are ranked by logit, largest first, equal logits by lower id.
- Nothing waits for a CUDA device.
- A row with a NaN, with +inf or without any finite logit is not an error: see `choose`.

Letters: R rows, V vocabulary, Q penalised or masked rows, C sequences whose tokens are counted, N best tokens, M
requested token ids.

choose(logits, arrays, host=None, masks=None) -> (ids, sound)
    Pick one token for each row of `logits` (float32 [R, V]; with `masks` changed in place, else unchanged).

    `arrays` lie where the logits do. Where that is a device, `host` holds `greedy`, `top_k` and `top_p` of
    the same values on the host, to plan the work without waiting.

    `masks` (`Masks`) give -inf to the tokens that some rows must not choose, before everything else. A row without
    any allowed token is not sound.

    Returns the ids (int64 [R]) and whether each row was sound (bool [R]). One that is not gets id 0.

    Greedy rows take the largest logit. Others keep the `top_k` best tokens; of these the shortest run of
    best ones whose mass reaches `top_p` of what was kept; of these the ones whose probability is at least
    `min_p` times the largest. At least one is kept. The uniform number picks among the kept by inverse
    distribution function: in ranked order where top_k or top_p is on, else in order of ids.

penalize(logits, rows, counted, counts, in_prompt, frequency, presence, repetition) -> None
    Penalise tokens that were generated (or, for repetition, in the prompt) before; `logits` in place.

    `logits` is float32 [R, V], `rows` int64 [Q] and distinct, `counted` int64 [Q] the rows' indices into
    `counts` (int32 [C, V], how often each token was generated) and `in_prompt` (bool [C, V]), the
    penalties float32 [Q]. Subtracts frequency * count, then presence where the count is not zero; then
    divides positive and multiplies other logits by repetition where the token was generated or is in the
    prompt.

score(logits, temperature, chosen_ids, num_top, requested_ids) -> Scores
    Log-softmax of `logits` (float32 [R, V], unchanged) / `temperature` (float32 [R]) at some tokens.

    `chosen_ids` is int64 [R], `requested_ids` int64 [R, M]; N is the smaller of `num_top` and V. A forbidden
    token has -inf; a row that is not sound has no meaningful values.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class SamplingArrays(NamedTuple):
    """How each of R rows chooses its token."""

    greedy: Tensor  # bool [R]; the other fields are not looked at
    temperature: Tensor  # float32 [R], above 0
    top_k: Tensor  # int32 [R], at least 1; V or more is off
    top_p: Tensor  # float32 [R], in (0, 1]; 1 is off
    min_p: Tensor  # float32 [R], in [0, 1]; 0 is off
    uniform: Tensor  # float32 [R], in [0, 1), a multiple of 2**-24, of which it is the lower end


class Masks(NamedTuple):
    """Which tokens Q of the rows may choose, where the logits lie.

    Bit i % 32, counted from the lowest, of word i // 32 is 1 where token i is allowed. What lies beyond the vocabulary
    is not looked at.
    """

    rows: Tensor  # int64 [Q], distinct
    bitmask: Tensor  # int32 [Q, at least ceil(V / 32)]


class Scores(NamedTuple):
    """Log-probabilities of R rows. Ranked by logit, largest first, equal logits by lower id."""

    chosen: Tensor  # float32 [R]
    top: Tensor  # float32 [R, N]
    top_ids: Tensor  # int64 [R, N]
    requested: Tensor  # float32 [R, M]
