"""Runs the real scheduler on a virtual clock.

Steps are not computed; each one advances the clock by its predicted time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import pairwise, repeat

import numpy as np
from numpy.typing import NDArray

from runtime.actors.step_times import StepTimes
from runtime.batch import UNKNOWN, Batch, Ints, Sampling, StepOutput, StepStats
from runtime.config.plan import SchedulerPlan
from runtime.errors import PenstockError
from runtime.kv_cache.prefix_cache import PrefixCache
from runtime.request import Logprobs
from runtime.scheduler.scheduler import Scheduler
from runtime.sequence import Sequence
from runtime.simulation.costs import StepCosts
from runtime.simulation.report import Outcome
from runtime.simulation.traces import LAST_ID, OUTPUT_ID, Arrival

MIN_SKIPPED = 2  # a single step is not skipped
MAX_SKIPPED = 4096  # steps that are skipped at once
GENERATED = [OUTPUT_ID]  # tokens of a row, shared by all rows


class Simulator:
    """Simulates one replica with one policy. Mirrors the loop of `SchedulerActor`."""

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
        """`skips` advances over many equal decode steps at once. It changes only the duration of the simulation."""
        self.scheduler = Scheduler(plan, cache, vocab_size=vocab_size, context_length=context_length)
        self.outcome = Outcome()
        self._costs = costs
        self._depth = plan.micro_batches - 1 if plan.micro_batches > 1 else int(plan.overlap)
        self._target_s = None if plan.target_token_ms is None else plan.target_token_ms / 1000
        self._times = StepTimes()
        self._outputs: dict[tuple[int, int], list[int] | int] = {}  # of sequences that have not ended
        # By sequence index: the length at which the sequence's output ends.
        self._ends = np.zeros(plan.max_running, np.int64)
        self._skips = skips
        self._special = 0  # number of unended sequences whose tokens are known, or that have no output
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
        """Advance over the equal decode steps before the next arrival or the next end of an output.

        The result is the same as that of single steps. Return False, without effect, if at most one step can be
        skipped.
        """
        if not self._skips or self._special or len(self._in_flight) != self._depth:
            return False
        if any(batch.stats.num_prompt_tokens or batch.stats.num_new for batch, _ in self._in_flight):
            return False
        scheduler = self.scheduler
        running = list(scheduler.running)
        if not running:
            return False
        lengths = np.array([len(sequence.ids) for sequence in running])
        indices = np.array([sequence.sequence_index for sequence in running], np.int32)
        until_end = int((self._ends[indices] - lengths).min()) - 1
        if until_end < MIN_SKIPPED:
            return False
        limit = min(until_end, scheduler.num_equal_steps, MAX_SKIPPED)
        if limit < MIN_SKIPPED:
            return False
        num_rows, depth = len(running), self._depth
        # With steps in flight, further positions are computed than tokens are known.
        context = int(lengths.sum()) + num_rows * (depth - 1)
        began_s = max(self._now_s, self._device_free_s)
        before_s = [end_s for _, end_s in self._in_flight] or [began_s]
        steps_s = self._costs.decode_seconds(num_rows, context, limit)
        ends_s = np.add.accumulate(np.concatenate(([before_s[-1]], steps_s)))
        ends_s = np.concatenate((before_s[:-1], ends_s)) if depth else ends_s[1:]
        # The step in which the arrival falls is the last one: the request is added after it.
        num_steps = min(limit, int(np.searchsorted(ends_s, next_arrival_s)) + 1)
        if num_steps < MIN_SKIPPED:
            return False
        scheduler.skip_steps(num_steps, OUTPUT_ID)
        passed_s = ends_s[:num_steps].tolist()
        self._now_s = passed_s[-1]
        self.outcome.decoded(running, num_steps, self._now_s)
        self._note_decodes([began_s if not depth else self._applied_s, *passed_s])
        self._applied_s = self._now_s
        in_flight_s = ends_s[num_steps : num_steps + depth].tolist()
        self._device_free_s = in_flight_s[-1] if depth else self._now_s
        number = self._in_flight[0][0].number + num_steps if depth else 0
        self._in_flight = deque(
            (decode_batch(number + ahead, running, indices, lengths + (num_steps - 1 + ahead)), end_s)
            for ahead, end_s in enumerate(in_flight_s)
        )
        return True

    def _note_decodes(self, times_s: list[float]) -> None:
        """Note decode steps, of which each begins when the step before ends. `times_s` begins with the first start."""
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
        self._special -= isinstance(output, list)  # also for embeddings, whose output is []

    def _note(self, batch: Batch, seconds: float, num_tokens: int) -> None:
        """Pass the scheduler the measurements of a step that `SchedulerActor` would pass."""
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
        """Return the tokens of a step in which only the lengths of outputs are known."""
        if batch.sampling is None:
            return [[] for _ in batch.sequences]
        ends = batch.starts + batch.counts + 1  # length of each sequence after the step
        last = ends >= self._ends[batch.sequence_indices]
        if len(batch.sampling.row_of) == len(batch.sequences):
            tokens = list(repeat(GENERATED, len(batch.sequences)))
            for row in np.flatnonzero(last).tolist():
                tokens[row] = [LAST_ID]
            return tokens
        tokens = [[] for _ in batch.sequences]
        for row in batch.sampling.row_of.tolist():
            tokens[row] = [LAST_ID] if last[row] else GENERATED
        return tokens

    def _known_output(self, batch: Batch) -> StepOutput:
        """Return the tokens of a step in which some outputs are known."""
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
        """End sequences whose known output is complete, because a stop string or an abort ended them."""
        for sequence in batch.sequences:
            output = self._outputs.get((sequence.request.id, sequence.index))
            if isinstance(output, list) and len(sequence.ids) - sequence.num_prompt >= max(len(output), 1):
                self.scheduler.end(sequence)
                self._forget(sequence.request.id, sequence.index)


def decode_batch(number: int, sequences: list[Sequence], indices: Ints, starts: NDArray[np.int64]) -> Batch:
    """Return a batch with one decode row for each sequence. It has no page table, because nothing computes it."""
    rows = np.arange(len(sequences), dtype=np.int32)
    unused = np.zeros(0, np.int32)
    return Batch(
        number=number,
        sequences=tuple(sequences),
        starts=starts.astype(np.int32),
        counts=np.ones_like(rows),
        sequence_indices=indices,
        token_ids=np.full_like(rows, UNKNOWN),
        page_table=np.zeros((len(rows), 0), np.int32),
        sampling=Sampling(rows, rows, unused.astype(np.bool_), unused.astype(np.float32)),
        stats=StepStats(num_decode_rows=len(rows)),
    )


def in_order(arrivals: Iterable[Arrival]) -> Iterator[Arrival]:
    """Yield arrivals sorted by time."""
    yield from sorted(arrivals, key=lambda arrival: arrival.time_s)
