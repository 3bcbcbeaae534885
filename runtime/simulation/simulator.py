"""Runs the real scheduler with a virtual clock.

Steps are not computed. Each one advances the clock by its predicted time.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np

from runtime.actors.step_times import StepTimes
from runtime.batch import UNKNOWN, Batch, Sampling, StepOutput, StepStats
from runtime.config.plan import SchedulerPlan
from runtime.errors import PenstockError
from runtime.kv_cache.prefix_cache import PrefixCache
from runtime.request import Logprobs
from runtime.scheduler.scheduler import Scheduler
from runtime.sequence import Sequence
from runtime.simulation.costs import StepCosts
from runtime.simulation.report import Outcome
from runtime.simulation.traces import LAST_ID, OUTPUT_ID, Arrival

MAX_SKIPPED = 4096  # maximum number of steps that are skipped at once
NO_FLAGS, NO_NUMBERS = np.zeros(0, np.bool_), np.zeros(0, np.float32)
GENERATED = [OUTPUT_ID]  # the new tokens of a row; one list for all rows


class Simulator:
    """Simulates one replica with one scheduling policy. Works like the loop of `SchedulerActor`."""

    def __init__(
        self,
        plan: SchedulerPlan,
        cache: PrefixCache,
        costs: StepCosts,
        *,
        vocab_size: int,
        context_length: int,
        skips: bool = True,
    ) -> None:
        """Create the simulator. With `skips`, many equal decode steps are advanced at once.

        `skips` changes only how long the simulation takes, not its results.
        """
        self.scheduler = Scheduler(plan, cache, vocab_size=vocab_size, context_length=context_length)
        self.outcome = Outcome()
        self._costs = costs
        self._depth = plan.micro_batches - 1 if plan.micro_batches > 1 else int(plan.overlap)
        self._target_s = None if plan.target_token_ms is None else plan.target_token_ms / 1000
        self._times = StepTimes()
        # Sequence -> its output or the output's length, for sequences that have not ended.
        self._outputs: dict[tuple[int, int], list[int] | int] = {}
        # By sequence index: length of the sequence at which its output ends.
        self._ends = [0] * plan.max_running
        self._skips = skips
        self._special = 0  # number of running or waiting sequences whose output is known, or that have no output
        self._in_flight: deque[tuple[Batch, float]] = deque()  # (batch, time at which it ends)
        self._now_s = self._device_free_s = self._applied_s = 0.0

    def run(self, arrivals: Iterable[Arrival]) -> Outcome:
        """Simulate all requests of a trace. They must be ordered by time."""
        waiting = iter(arrivals)
        coming = next(waiting, None)
        while True:
            while coming is not None and coming.time_s <= self._now_s:
                self._add(coming)
                coming = next(waiting, None)
            if self._skip(math.inf if coming is None else coming.time_s):
                continue
            batch = self.scheduler.fill()
            if batch is not None:
                self._launch(batch)
            if self._in_flight and (batch is None or len(self._in_flight) > self._depth):
                self._finish_oldest()
            elif batch is None:
                if coming is None:
                    break
                self._now_s = max(self._now_s, coming.time_s)
        self.outcome.end_s = self._now_s
        self.outcome.num_retracted = self.scheduler.num_retracted
        return self.outcome

    def _add(self, arrival: Arrival) -> None:
        sequences = arrival.sequences
        try:
            self.scheduler.add(*sequences)
        except PenstockError:
            self.outcome.num_refused += 1
            return
        self.outcome.arrived(sequences[0].request.id, arrival.time_s, sum(each.num_prompt for each in sequences))
        for sequence, output in zip(sequences, arrival.outputs, strict=True):
            self._outputs[sequence.request.id, sequence.index] = output
            self._special += isinstance(output, list)

    def _skip(self, next_arrival_s: float) -> bool:
        """Advance by equal decode steps up to the next arrival or the next end of an output.

        The result is the same as with single steps. Returns False, and does nothing, if no step can be skipped.
        """
        if not self._skips or self._special or len(self._in_flight) != self._depth:
            return False
        for batch, _ in self._in_flight:
            if batch.stats.num_prompt_tokens:
                return False
        limit = min(self.scheduler.num_equal_steps, MAX_SKIPPED)
        if limit < 1:
            return False
        ends, running = self._ends, list(self.scheduler.running)
        num_left = [ends[sequence.sequence_index] - len(sequence.ids) for sequence in running]
        limit = min(limit, *num_left)
        if limit < 1:
            return False
        began_s = max(self._now_s, self._device_free_s)
        before_s = [end_s for _, end_s in self._in_flight]
        context = sum([sequence.num_computed for sequence in running])
        steps_s = self._costs.decode_seconds(len(running), context, limit)
        steps_s[0] += began_s  # now `steps_s` has the times at which the steps end
        ends_s = [*before_s, *np.add.accumulate(steps_s).tolist()]
        # A request that arrives during a step waits until the step ends, so this step is the last one.
        num_steps = min(limit, bisect_left(ends_s, next_arrival_s) + 1)
        self.scheduler.skip_steps(num_steps, OUTPUT_ID)
        self._now_s = ends_s[num_steps - 1]
        self.outcome.decoded(running, num_steps, self._now_s)
        self._note_decodes([self._applied_s if before_s else began_s, *ends_s[:num_steps]])
        self._applied_s = self._now_s
        self._device_free_s = ends_s[num_steps + self._depth - 1]
        number = self._in_flight[0][0].number + num_steps if before_s else 0
        self._in_flight = deque(
            (decode_batch(number + ahead, running, self._depth - ahead), ends_s[num_steps + ahead])
            for ahead in range(self._depth)
        )
        for sequence, left in zip(running, num_left):
            if left == num_steps:
                sequence.ids[-1] = LAST_ID
                if LAST_ID in sequence.stop_ids:
                    self.scheduler.end(sequence)
                    self._forget(sequence.request.id, sequence.index)
        return True

    def _note_decodes(self, times_s: list[float]) -> None:
        """Record consecutive decode steps. `times_s` has the start of the first step, then the end of each step."""
        self._times.note_decodes([end_s - start_s for start_s, end_s in pairwise(times_s)])
        self.scheduler.note_step_time(self._times.decode_s)
        if self._target_s is not None:
            self.scheduler.limit_mixed_steps(self._times.tokens_within(self._target_s))

    def _launch(self, batch: Batch) -> None:
        stats = batch.stats
        if stats.num_new or len(batch.token_ids) > len(batch.sequences):
            for sequence in batch.sequences:
                output = self._outputs.get((sequence.request.id, sequence.index), 0)
                length = len(output) if isinstance(output, list) else output
                self._ends[sequence.sequence_index] = sequence.num_prompt + length
        if stats.num_new:
            self.outcome.admitted(batch, stats.num_cached_tokens)
        began_s = max(self._now_s, self._device_free_s)
        if not self._in_flight:
            self._applied_s = began_s
        self._device_free_s = began_s + self._costs.seconds(batch)
        self._in_flight.append((batch, self._device_free_s))

    def _finish_oldest(self) -> None:
        batch, end_s = self._in_flight.popleft()
        self._now_s = max(self._now_s, end_s)
        if self._special:
            output = self._known_output(batch)
        else:
            output = StepOutput(self._tokens(batch), [])
        deltas = self.scheduler.apply(batch, output)
        self.outcome.applied(deltas, self._now_s)
        for delta in deltas:
            if delta.finish is not None:
                self._forget(delta.request_id, delta.index)
        if self._special:
            self._end_known(batch)
        self._note(batch, self._now_s - self._applied_s, len(deltas))
        self._applied_s = self._now_s

    def _forget(self, request_id: int, index: int) -> None:
        output = self._outputs.pop((request_id, index), None)
        self._special -= isinstance(output, list)  # embeddings count too: their output is []

    def _note(self, batch: Batch, seconds: float, num_tokens: int) -> None:
        """Give the scheduler the measurements of a step that `SchedulerActor` would give it."""
        times, scheduler = self._times, self.scheduler
        times.note(batch, seconds)
        scheduler.note_step_time(times.decode_s)
        scheduler.note_step(batch, num_tokens, seconds)
        if self._target_s is not None:
            scheduler.limit_mixed_steps(times.tokens_within(self._target_s))
        if batch.stats.num_prompt_tokens:
            scheduler.limit_steps(*(times.prompt_limits or (None, None)), scored=times.scored_limits)
            scheduler.note_prompt_time(times.prompt_token_s)

    def _tokens(self, batch: Batch) -> list[list[int]]:
        """Return the new tokens of a step in which only the lengths of the outputs are known."""
        if batch.sampling is None:
            return [[] for _ in batch.sequences]
        lengths = (batch.starts + batch.counts + 1).tolist()  # length of each sequence after the step's token
        ends = self._ends
        tokens = [
            [LAST_ID] if length >= ends[index] else GENERATED
            for length, index in zip(lengths, batch.sequence_indices.tolist())
        ]
        if len(batch.sampling.row_of) < len(tokens):
            sampled = set(batch.sampling.row_of.tolist())
            tokens = [each if row in sampled else [] for row, each in enumerate(tokens)]
        return tokens

    def _known_output(self, batch: Batch) -> StepOutput:
        """Return the new tokens of a step in which the tokens of some outputs are known."""
        tokens = self._tokens(batch)
        sampled = () if batch.sampling is None else batch.sampling.row_of.tolist()
        ends = (batch.starts + batch.counts).tolist()
        for row in sampled:
            sequence = batch.sequences[row]
            output = self._outputs.get((sequence.request.id, sequence.index))
            if isinstance(output, list):
                at = ends[row] - sequence.num_prompt
                tokens[row] = [output[at]] if at < len(output) else [OUTPUT_ID]
        embeddings: list[list[float] | None] | None = None
        if batch.embedding_rows is not None:
            rows = set(batch.embedding_rows.tolist())
            embeddings = [[0.0] if row in rows else None for row in range(len(batch.sequences))]
        scored = [(each.row, Logprobs([(0.0, 0)] * len(each.targets), [], [])) for each in batch.prompt_logprobs]
        return StepOutput(tokens, [], None, scored, embeddings)

    def _end_known(self, batch: Batch) -> None:
        """End sequences whose known output is complete, where a stop string or an abort ended it in the record."""
        for sequence in batch.sequences:
            output = self._outputs.get((sequence.request.id, sequence.index))
            if isinstance(output, list) and len(sequence.ids) - sequence.num_prompt >= max(len(output), 1):
                self.scheduler.end(sequence)
                self._forget(sequence.request.id, sequence.index)


def decode_batch(number: int, sequences: list[Sequence], steps_back: int) -> Batch:
    """Return the batch with decode rows that was launched `steps_back` steps ago; 1 is the last step.

    The batch has no page table and no sampling parameters, because no model computes it.
    """
    starts = np.array([sequence.num_computed - steps_back for sequence in sequences], np.int32)
    rows = np.arange(len(sequences), dtype=np.int32)
    return Batch(
        number=number,
        sequences=tuple(sequences),
        starts=starts,
        counts=np.ones(len(rows), np.int32),
        sequence_indices=np.array([sequence.sequence_index for sequence in sequences], np.int32),
        token_ids=np.full(len(rows), UNKNOWN, np.int32),
        page_table=np.zeros((len(rows), 0), np.int32),
        sampling=Sampling(rows, rows, NO_FLAGS, NO_NUMBERS),
        stats=StepStats(num_decode_rows=len(rows)),
    )


def in_order(arrivals: Iterable[Arrival]) -> Iterator[Arrival]:
    """Yield arrivals sorted by time."""
    yield from sorted(arrivals, key=lambda arrival: arrival.time_s)
