"""The synchronous part of the scheduler actor: who computes what next, and what came of it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from runtime.batch import Batch, StepOutput
from runtime.config.plan import SchedulerPlan
from runtime.constraint import HostData
from runtime.errors import ContextOverflow, EngineFailure, Overloaded
from runtime.kv_cache.page_events import Event
from runtime.kv_cache.prefix_cache import PrefixCache
from runtime.request import Delta, Finish, LogprobParams, Logprobs
from runtime.scheduler.apply import apply_output, final_delta
from runtime.scheduler.batch_builder import BatchBuilder
from runtime.scheduler.fast_forward import FastForward
from runtime.scheduler.queue import WaitingQueue
from runtime.scheduler.request_tables import Running
from runtime.scheduler.trials import Trials
from runtime.sequence import Sequence

STEP_FAILED = "The step that computed this request failed."


class Load(NamedTuple):
    """How busy the scheduler is."""

    num_waiting: int
    num_running: int
    num_pages: int
    num_used_pages: int
    num_used_tokens: int  # that fit into these
    num_evictable_pages: int
    token_usage: float  # share of all pages that running sequences hold
    new_token_ratio: float
    num_retracted: int  # since the start
    num_forced: int  # forced tokens that took no step of their own, since the start


class Scheduler:
    """Fills steps and applies their results; synchronous, on plain data, owned by one actor.

    The actor calls, over and over, `batch = fill()`, launches it, and `apply(previous, output)`. Any number
    of filled batches may be in flight; they run one after the other, and are applied in that order.
    """

    def __init__(
        self, plan: SchedulerPlan, cache: PrefixCache, *, vocab_size: int, context_length: int
    ) -> None:
        self._cache = cache
        self._max_queued = plan.max_queued
        self._max_queued_tokens = plan.max_queued_tokens
        self._max_tokens = min(context_length, cache.num_tokens)
        self._running = Running(plan.max_running, cache, vocab_size)
        self._waiting = WaitingQueue(plan.policy, cache, priorities=plan.priorities)
        self._fast_forward = FastForward(plan, cache, self._running, vocab_size)
        self._builder = BatchBuilder(plan, cache, self._running, self._waiting, self._fast_forward)
        self._trials = Trials()
        self._num_filled = 0
        self._num_applied = 0

    def limit_steps(self, alone: int | None, beside: int | None) -> None:
        """After how many prompt tokens a step takes no further prompt; None: as many as the plan allows.

        `beside` holds for steps in which others get their next token.
        """
        self._builder.enough_tokens = (alone, beside)

    def note_step_time(self, step_s: float | None) -> None:
        """What a step of single tokens takes lately, from one result to the next; None: not known."""
        self._fast_forward.step_s = step_s

    @property
    def room(self) -> int:
        """How many more sequences may be added; those for which a row is free at the next fill do not queue."""
        entering = 0 if self._running.full else self._running.tables.num_free
        return self._max_queued + entering - len(self._waiting)

    @property
    def least_urgency(self) -> float:
        """Of those that wait and have not run yet: who is more urgent may displace one. Infinite without priorities."""
        return self._waiting.least_urgency

    def add(self, *sequences: Sequence) -> None:
        """Queue the sequences of one request, all or none; `max_tokens` is lowered to what the pool can hold.

        Raises `Overloaded` when the queue is full, and `ContextOverflow` when the prompt cannot fit even alone.
        """
        if not sequences[0].request.follows:
            if self.room <= 0:
                raise Overloaded("The request queue is full.")
            num_tokens = sum(sequence.num_prompt for sequence in sequences)
            if self._waiting.num_tokens and self._waiting.num_tokens + num_tokens > self._max_queued_tokens:
                raise Overloaded("The prompts that wait have too many tokens together.")
        for sequence in sequences:
            self._check_length(sequence)
        for sequence in sequences:
            sequence.max_tokens = min(sequence.max_tokens, self._max_tokens)
            sequence.prompt_logprobs = _first_prompt_logprobs(sequence)
            self._waiting.add(sequence)

    def fill(self) -> Batch | None:
        """The next step's work; None when nothing can be done before a result arrives or a sequence is added.

        With None and no batch in flight there is nothing running and nothing waiting but for `awaited`.
        """
        if not self._running and not self._waiting:
            self._builder.new_token_ratio.reset()
            return None
        batch = self._builder.build(self._num_filled)
        while batch is None and self._trials and self._num_filled == self._num_applied:
            self._trials.skip()
            self._try_next()
            batch = self._builder.build(self._num_filled)
        if batch is not None:
            self._num_filled += 1
        return batch

    def apply(self, batch: Batch, output: StepOutput) -> list[Delta]:
        """Take in the results of the oldest batch in flight; at most one Delta per sequence.

        Rows of sequences that have ended meanwhile are dropped. Raises `EngineFailure` out of order, and `RowFailed`
        with what is known where something broke at one row.
        """
        if batch.number != self._num_applied:
            raise EngineFailure(f"Step {batch.number} was applied when step {self._num_applied} was due.")
        self._num_applied += 1
        deltas = apply_output(batch, output, self._retire, self._running.rewind, self._fast_forward.pays)
        if self._trials and self._trials.passed(self._running.full):
            self._try_next()
        return deltas

    @property
    def awaited(self) -> list[HostData]:
        """The host data without which some sequences are in no step."""
        return [sequence.next_host_data for sequence in self._running.stalled]

    @property
    def awaited_masks(self) -> HostData | None:
        """What comes last of the host data that may say that next tokens are forced; None: nothing is to come.

        Worth a moment's wait before the next `fill`.
        """
        return self._fast_forward.awaited

    def abort(self, sequences: Iterable[Sequence], finish: Finish) -> list[Delta]:
        """End these sequences wherever they are; a final Delta for each that had not ended."""
        deltas = []
        for sequence in sequences:
            if sequence in self:
                self._retire(sequence, finish)
                deltas.append(final_delta(sequence, finish))
        return deltas

    def withdraw(self, sequences: Iterable[Sequence]) -> None:
        """Forget sequences that wait and have never run: another scheduler computes them."""
        for sequence in sequences:
            self._waiting.remove(sequence)
            if sequence.constraint is not None:
                sequence.constraint.release()
        self._running.full = False

    def end(self, sequence: Sequence) -> None:
        """End a sequence whose text reached a stop string, without a Delta; ignored if it has ended."""
        if sequence in self:
            self._retire(sequence, Finish("stop"))

    def fail(self, batches: Iterable[Batch]) -> list[int]:
        """The oldest of these steps failed: find out for whom, and give up that request alone.

        `batches` are all in flight, oldest first; nothing of them will be applied. The prefix tree is emptied, since
        its pages may hold anything. Everybody is computed again, with the tokens that are known, and gets the same
        further ones: the requests of that step first, a half at a time (`Trials`), and a request that fails alone is
        given up. Returns the ids of the requests given up now; no Delta is made for them.
        """
        suspects = self._recompute(batches)
        lost = self._trials.narrow(suspects)
        self._give_up(lost)
        self._try_next()
        return lost

    def give_up_newest(self, batches: Iterable[Batch]) -> list[int]:
        """The oldest of these steps had too little memory: give up its newest request for all others.

        As `fail`, but nobody is tried apart. Returns the ids of the lost requests (none where all of that step had
        ended meanwhile).
        """
        newest = self._recompute(batches)[-1:]
        self._give_up(newest)
        return newest

    def _recompute(self, batches: Iterable[Batch]) -> list[int]:
        """Put everybody back, to be computed again; the ids of the requests in the oldest of these steps, in order."""
        failed = next(iter(batches), None)
        sequences = failed.sequences if failed is not None else ()
        found = {sequence.request.id for sequence in sequences if sequence.finish is None}
        self._start_over()
        for sequence in self:
            sequence.num_pending = sequence.num_void = 0
            _ask_again(sequence)
        return sorted(found)

    def _try_next(self) -> None:
        """Let only the next group of suspects be computed, or everybody when there is none. Who runs is put back."""
        for sequence in reversed(list(self._running)):
            self._waiting.put_back(sequence)
            self._running.leave(sequence)
        self._trials.begin(self)
        self._waiting.allowed = self._trials.allowed

    def rebuild(self, lost: Container[int] = ()) -> None:
        """Something broke in here, in the middle of anything: trust no row, page or tree, and make them anew.

        The requests in `lost` are given up. Nothing that is in flight will be applied; everybody else is computed
        again, with the tokens that are known, and gets the same further ones.
        """
        sequences = list(dict.fromkeys(self))
        self._num_applied = self._num_filled
        self._trials.stop()
        self._waiting.allowed = None
        self._running.rebuild(sequences)
        self._waiting.clear()
        for sequence in sequences:
            if sequence.finish is not None or sequence.request.id in lost:
                sequence.finish = sequence.finish or Finish("abort", message=STEP_FAILED)
                if sequence.constraint is not None:
                    sequence.constraint.release()
                continue
            sequence.num_pending = sequence.num_void = 0
            _ask_again(sequence)
            self._waiting.add(sequence)

    def _give_up(self, request_ids: Container[int]) -> None:
        """End all choices of these requests."""
        for sequence in [sequence for sequence in self if sequence.request.id in request_ids]:
            self._retire(sequence, Finish("abort", message=STEP_FAILED))

    def _start_over(self) -> None:
        """Put everybody who runs back to the head of the queue, with nothing computed and nothing in flight."""
        self._num_applied = self._num_filled
        for sequence in reversed(self._running.reset()):
            self._waiting.put_back(sequence)

    def flush(self) -> bool:
        """Empty the prefix tree; False, and nothing done, while anything is running or waiting."""
        if self._running or self._waiting:
            return False
        self._cache.empty()
        return True

    def take_events(self) -> list[Event]:
        """What became of cached pages since the last time; nothing where nobody asked for it."""
        return [] if self._cache.events is None else self._cache.events.take()

    def prefix_tree(self, limit: int) -> tuple[list[tuple[int, int, int]], int]:
        """The shape of the prefix tree; see `RadixTree.outline`."""
        return self._cache.outline(limit)

    def num_cached(self, sequence: Sequence) -> int:
        """How many of a new sequence's tokens it would find in the prefix tree now; changes nothing."""
        return self._cache.match_length(sequence)

    def __iter__(self) -> Iterator[Sequence]:
        """Over all that run or wait."""
        return chain(self._running, self._waiting)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.sequence_index >= 0 or sequence in self._waiting

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_retracted(self) -> int:
        """Retractions since the start."""
        return self._builder.num_retracted

    @property
    def load(self) -> Load:
        cache = self._cache
        return Load(
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            num_pages=cache.num_pages,
            num_used_pages=cache.num_used,
            num_used_tokens=cache.num_used * cache.page_size,
            num_evictable_pages=cache.num_evictable,
            token_usage=cache.num_used / cache.num_pages,
            new_token_ratio=self._builder.new_token_ratio.value,
            num_retracted=self._builder.num_retracted,
            num_forced=self._fast_forward.num_saved,
        )

    def check(self) -> None:
        """Raise `ValueError` unless every page, row and sequence is accounted for, exactly."""
        self._running.check()
        waiting, running = list(self._waiting), list(self._running)
        if len({*waiting, *running}) != len(waiting) + len(running):
            raise ValueError("A sequence is both waiting and running.")
        for sequence in waiting:
            if (
                sequence.pages
                or sequence.locked_node is not None
                or sequence.sequence_index >= 0
                or sequence.num_computed
            ):
                raise ValueError(f"{sequence!r} waits and still holds something.")
        if any(sequence.finish is not None for sequence in self):
            raise ValueError("A finished sequence is still scheduled.")

    def _retire(self, sequence: Sequence, finish: Finish, trusted: bool = True) -> None:
        sequence.finish = finish
        if finish.kind != "abort":
            self._builder.new_token_ratio.note_end(sequence)
        if sequence.constraint is not None:
            sequence.constraint.release()
        if sequence.sequence_index >= 0:
            self._running.leave(sequence, trusted=trusted)
        else:
            self._waiting.remove(sequence)
            self._running.full = False

    def _check_length(self, sequence: Sequence) -> None:
        num_prompt = sequence.num_prompt
        needed = num_prompt + (sequence.max_tokens > num_prompt)
        if needed > self._max_tokens:
            raise ContextOverflow(
                f"The prompt has {num_prompt} tokens; at most {self._max_tokens} fit, with the output.",
                param="input_ids" if sequence.request.text is None else "text",
            )


def _first_prompt_logprobs(sequence: Sequence) -> Logprobs | None:
    """The entry of the first wanted prompt token: nothing that is computed for the request precedes it."""
    params: LogprobParams | None = sequence.request.logprobs
    if params is None or params.start < 0:
        return None
    return Logprobs(
        chosen=[(None, sequence.ids[params.start])],
        top=[None] if params.top else [],
        requested=[None] if params.token_ids else [],
    )


def _ask_again(sequence: Sequence) -> None:
    """Have the prompt logprobs that were asked for and did not arrive asked for once more."""
    arrived = sequence.prompt_logprobs
    if arrived is not None and sequence.request.logprobs is not None:
        sequence.next_logprob = sequence.request.logprobs.start + len(arrived.chosen) - 1
