"""How the sampling rows of a batch choose their tokens: gathered per step from the request tables."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runtime.batch import Bias, Floats, FreshSlot, Ints, Longs, Penalties, Sampling
from runtime.scheduler.request_tables import RequestTables, is_penalised
from runtime.sequence import Sequence

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFTS = tuple(np.uint64(shift) for shift in (30, 27, 31, 40))


def uniform_numbers(seeds: NDArray[np.uint64], places: Longs) -> Floats:
    """One number in [0, 1) for each (seed, output position), the same in whatever batch it is drawn.

    The SplitMix64 finaliser (Steele, Lea and Flood, 2014) on seed + (place + 1) * golden gamma; the upper 24
    bits are what a float32 holds exactly.
    """
    one, two, three, top = _SHIFTS
    x = seeds + (places.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    x = (x ^ (x >> one)) * _MIX_1
    x = (x ^ (x >> two)) * _MIX_2
    x ^= x >> three
    return (x >> top).astype(np.float32) * np.float32(2.0**-24)


def gather_sampling(tables: RequestTables, rows: Ints, slots: Ints, ends: Longs) -> Sampling:
    """Build the arrays for R sampling rows.

    `rows` and `slots` are [R]; `ends` [R] is the position that each row's new token will have in its
    sequence.
    """
    places = ends - tables.num_prompt[slots]
    bias = penalties = logprobs = None
    special = tables.special[slots]
    if special.any():
        chosen = np.flatnonzero(special)
        sequences = [(int(row), tables.sequences[slots[row]]) for row in chosen]
        held = [(row, sequence) for row, sequence in sequences if sequence is not None]
        bias = _gather_bias(held, places, tables.vocab_size)
        penalties = _gather_penalties(held, tables)
        if any(sequence.request.logprobs is not None for _, sequence in held):
            wanted = {row: sequence.request.logprobs for row, sequence in held}
            logprobs = tuple(wanted.get(row) for row in range(len(rows)))
    return Sampling(
        rows=rows,
        greedy=tables.greedy[slots],
        temperature=tables.temperature[slots],
        top_k=tables.top_k[slots],
        top_p=tables.top_p[slots],
        min_p=tables.min_p[slots],
        uniform=uniform_numbers(tables.seeds[slots], places),
        bias=bias,
        penalties=penalties,
        logprobs=logprobs,
    )


def _gather_bias(held: list[tuple[int, Sequence]], places: Longs, vocab_size: int) -> Bias | None:
    """Logit biases, and -inf on stop ids while an output is shorter than its minimum.

    The length of the output is known even where its last tokens are not, so the minimum is exact with steps
    in flight.
    """
    rows: list[int] = []
    token_ids: list[int] = []
    values: list[float] = []
    for row, sequence in held:
        params = sequence.sampling
        forbidden = sequence.stop_ids if places[row] < params.min_new_tokens else frozenset()
        for token_id, value in params.logit_bias.items():
            if token_id not in forbidden:
                rows.append(row)
                token_ids.append(token_id)
                values.append(value)
        for token_id in forbidden:
            if token_id < vocab_size:
                rows.append(row)
                token_ids.append(token_id)
                values.append(-np.inf)
    if not rows:
        return None
    return Bias(np.array(rows, np.int64), np.array(token_ids, np.int64), np.array(values, np.float32))


def _gather_penalties(held: list[tuple[int, Sequence]], tables: RequestTables) -> Penalties | None:
    penalised = [(row, sequence) for row, sequence in held if is_penalised(sequence)]
    if not penalised:
        return None
    fresh = []
    for _, sequence in penalised:
        if sequence.sequence_index in tables.fresh:
            prompt, output = sequence.ids[: sequence.num_prompt], sequence.ids[sequence.num_prompt :]
            fresh.append(
                FreshSlot(sequence.sequence_index, np.array(prompt, np.int32), np.array(output, np.int32))
            )
            tables.fresh.discard(sequence.sequence_index)
    params = [sequence.sampling for _, sequence in penalised]
    return Penalties(
        rows=np.array([row for row, _ in penalised], np.int64),
        slots=np.array([sequence.sequence_index for _, sequence in penalised], np.int64),
        frequency=np.array([p.frequency_penalty for p in params], np.float32),
        presence=np.array([p.presence_penalty for p in params], np.float32),
        repetition=np.array([p.repetition_penalty for p in params], np.float32),
        fresh=tuple(fresh),
    )
