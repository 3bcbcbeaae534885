"""Sampling parameters of the running sequences, in tables from which every step gathers its rows."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from runtime.batch import Bias, Draws, FreshSequence, Ints, Longs, Penalties, Sampling, uniform_numbers
from runtime.constraint import DraftData, HostData
from runtime.sampling_params import ROW_ARRAYS
from runtime.sequence import Sequence

NO_DRAFT_DATA: Mapping[int, DraftData] = MappingProxyType({})


class SamplingTables:
    """Sampling parameters by sequence index. A sequence's row is written when it starts, and gathered in every step."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._greedy = np.zeros(num_rows, np.bool_)
        self._seeds = np.zeros(num_rows, np.uint64)
        self._num_prompt = np.zeros(num_rows, np.int64)
        self._params = {name: np.full(num_rows, array.neutral, array.dtype) for name, array in ROW_ARRAYS.items()}
        # Number of sequences with a value other than the neutral one, for each array.
        self._num_users = dict.fromkeys(ROW_ARRAYS, 0)
        # For each row: whether the sequence has biases, penalties or log-probabilities.
        self._is_special = np.zeros(num_rows, np.bool_)
        # Sequence index -> sequence with biases, penalties or log-probabilities.
        self._special: dict[int, Sequence] = {}
        self._is_constrained = np.zeros(num_rows, np.bool_)
        self._constrained: dict[int, Sequence] = {}
        # Indices of sequences with penalties whose token counts must be initialised on the device.
        self._fresh: set[int] = set()

    def enter(self, sequence: Sequence) -> None:
        """Write the row of a sequence at its new index."""
        index, params = sequence.sequence_index, sequence.sampling
        self._greedy[index] = params.greedy
        self._seeds[index] = sequence.seed & 0xFFFF_FFFF_FFFF_FFFF
        self._num_prompt[index] = sequence.num_prompt
        for name, value in params.non_neutral_values():
            self._params[name][index] = value
            self._num_users[name] += 1
        penalised = is_penalised(sequence)
        if is_special(sequence):
            self._is_special[index] = True
            self._special[index] = sequence
        if sequence.constraint is not None:
            self._is_constrained[index] = True
            self._constrained[index] = sequence
        if penalised:
            self._fresh.add(index)

    def leave(self, sequence: Sequence) -> None:
        """Reset the row of a sequence. Call it before the sequence loses its `sequence_index`."""
        index = sequence.sequence_index
        for name, _ in sequence.sampling.non_neutral_values():
            self._params[name][index] = ROW_ARRAYS[name].neutral
            self._num_users[name] -= 1
        self._is_special[index] = False
        self._special.pop(index, None)
        self._is_constrained[index] = False
        self._constrained.pop(index, None)
        self._fresh.discard(index)

    def recount(self, sequence: Sequence) -> None:
        """Make the next step count the tokens of a sequence with penalties again.

        Called after forced tokens were appended without sampling.
        """
        if sequence.sequence_index in self._special and is_penalised(sequence):
            self._fresh.add(sequence.sequence_index)

    def gather(
        self,
        positions: Ints,
        row_of: Ints,
        indices: Ints,
        ends: Longs,
        *,
        ends_known: bool = True,
        draft_data: Mapping[int, DraftData] = NO_DRAFT_DATA,
    ) -> Sampling:
        """Build the sampling arrays for the N sampled positions of a batch.

        `row_of` [N] are the batch rows of the positions, and `indices` [N] their sequence indices. `ends` [N] are the
        positions that the new tokens will have in their sequences; if not `ends_known`, they are upper bounds.
        `draft_data` has, by row, the data of rows with both a constraint and draft tokens.
        """
        output_positions = ends - self._num_prompt.take(indices)
        bias = penalties = logprobs = None
        special = self._is_special.take(indices) if self._special else None
        if special is not None and special.any():
            special_rows = [(row, self._special[int(indices[row])]) for row in np.flatnonzero(special).tolist()]
            bias = _gather_bias(special_rows, output_positions, self._vocab_size)
            penalties = self._gather_penalties(special_rows)
            if any(sequence.request.logprobs is not None for _, sequence in special_rows):
                params = {row: sequence.request.logprobs for row, sequence in special_rows}
                logprobs = tuple(params.get(row) for row in range(len(row_of)))
        return Sampling(
            positions=positions,
            row_of=row_of,
            greedy=self._greedy.take(indices),
            uniform=uniform_numbers(self._seeds.take(indices), output_positions),
            draws=None if ends_known else Draws(self._seeds.take(indices), output_positions),
            params={name: self._params[name].take(indices) for name, users in self._num_users.items() if users},
            bias=bias,
            penalties=penalties,
            logprobs=logprobs,
            host_data=(
                self._gather_host_data(row_of, indices, output_positions, draft_data) if self._constrained else {}
            ),
            draft_data=draft_data,
        )

    def _gather_host_data(
        self, row_of: Ints, indices: Ints, positions: Longs, draft_data: Mapping[int, DraftData]
    ) -> dict[int, HostData]:
        """Return the host data of the sampled positions with a constraint, by index of the sampled position."""
        found = np.flatnonzero(self._is_constrained.take(indices))
        rows, after_drafts = row_of[found].tolist() if draft_data else (), iter(())
        host_data = {}
        previous = -1
        constrained = zip(found.tolist(), indices[found].tolist(), positions[found].tolist())
        for number, (place, index, num_output) in enumerate(constrained):
            if rows and rows[number] in draft_data:
                if rows[number] == previous:
                    host_data[place] = next(after_drafts)
                    continue
                previous = rows[number]
                after_drafts = iter(draft_data[previous].after)
            sequence = self._constrained[index]
            if sequence.constraint is not None:
                host_data[place] = sequence.constraint.data_after(num_output, sequence.ids, sequence.num_prompt)
        return host_data

    def _gather_penalties(self, special_rows: list[tuple[int, Sequence]]) -> Penalties | None:
        penalised = [(row, sequence) for row, sequence in special_rows if is_penalised(sequence)]
        if not penalised:
            return None
        fresh = []
        for _, sequence in penalised:
            if sequence.sequence_index in self._fresh:
                prompt, output = sequence.ids[: sequence.num_prompt], sequence.ids[sequence.num_prompt :]
                fresh.append(
                    FreshSequence(sequence.sequence_index, np.array(prompt, np.int32), np.array(output, np.int32))
                )
                self._fresh.discard(sequence.sequence_index)
        return Penalties(
            rows=np.array([row for row, _ in penalised], np.int64),
            sequence_indices=np.array([sequence.sequence_index for _, sequence in penalised], np.int64),
            fresh=tuple(fresh),
        )


def is_penalised(sequence: Sequence) -> bool:
    params = sequence.sampling
    return bool(params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0)


def is_special(sequence: Sequence) -> bool:
    """Return whether a sequence has biases, penalties, banned ids or a minimum length, or wants log-probabilities.

    Other sequences need only the arrays of `ROW_ARRAYS`.
    """
    return (
        is_penalised(sequence)
        or forbids_ends(sequence)
        or sequence.request.logprobs is not None
        or bool(sequence.sampling.logit_bias or sequence.banned_ids)
    )


def forbids_ends(sequence: Sequence) -> bool:
    """Return whether stop ids must be banned for `min_new_tokens`. With a grammar, the grammar enforces the minimum."""
    return sequence.sampling.min_new_tokens > 0 and bool(sequence.stop_ids) and sequence.request.grammar is None


def _gather_bias(special_rows: list[tuple[int, Sequence]], positions: Longs, vocab_size: int) -> Bias | None:
    """Return logit biases: -inf for banned ids, and for stop ids until the output has its minimum length.

    The minimum is exact, because the output length is known even while the last tokens are pending.
    """
    rows: list[int] = []
    token_ids: list[int] = []
    values: list[float] = []
    for row, sequence in special_rows:
        params = sequence.sampling
        too_short = positions[row] < params.min_new_tokens and forbids_ends(sequence)
        forbidden = sequence.banned_ids | sequence.stop_ids if too_short else sequence.banned_ids
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
