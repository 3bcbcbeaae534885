"""The pure core of the scheduler actor: who computes what next, and what came of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from runtime.batch import Batch, StepOutput
from runtime.config.plan import SchedulePlan
from runtime.errors import ContextOverflow, EngineFailure, InvalidRequest, Overloaded
from runtime.kv_cache.prefix_cache import PrefixCache
from runtime.request import Delta, Finish, LogprobParams, Logprobs
from runtime.scheduler.apply import apply_tokens, final_delta
from runtime.scheduler.batch_builder import BatchBuilder, FillCounts
from runtime.scheduler.budget import NewTokenRatio
from runtime.scheduler.preempt import Retraction
from runtime.scheduler.queue import WaitingQueue
from runtime.scheduler.running import Running
from runtime.sequence import Sequence

STEP_FAILED = "The step that computed this request failed."


class Load(NamedTuple):
    """How busy the schedule is."""

    num_waiting: int
    num_running: int
    num_pages: int
    num_used_pages: int
    num_evictable_pages: int
    token_usage: float  # share of all pages that running sequences hold
    new_token_ratio: float
    num_retracted: int  # since the start


class Scheduler:
    """Fills steps and applies their results; synchronous, on plain data, owned by one actor.

    The actor calls, over and over, `batch = fill()`, launches it, and `apply(previous, tokens)`. Any number
    of filled batches may be in flight; they run one after the other, and are applied in that order.
    """

    def __init__(
        self, plan: SchedulePlan, cache: PrefixCache, *, vocab_size: int, context_length: int
    ) -> None:
        self._cache = cache
        self._vocab_size = vocab_size
        self._max_queued = plan.max_queued
        self._max_tokens = min(context_length, cache.num_tokens)
        self._running = Running(plan.max_running, cache, vocab_size)
        self._waiting = WaitingQueue(plan.policy, cache)
        self._ratio = NewTokenRatio(plan)
        self._retraction = Retraction(self._running, self._waiting, self._ratio)
        self._filler = BatchBuilder(plan, cache, self._running, self._waiting, self._ratio, self._retraction)
        self._choices: dict[int, list[Sequence]] = {}  # by request id, those not finished
        self._num_filled = 0
        self._num_applied = 0
        self.last_fill = FillCounts()

    def add(self, *sequences: Sequence) -> None:
        """Queue the sequences of one request, all or none; `max_tokens` is lowered to what can be held.

        Raises `Overloaded` when the queue is full, `ContextOverflow` when a prompt cannot fit even alone, and
        `InvalidRequest` for token ids outside the vocabulary or logprobs behind the prompt.
        """
        # Who finds a free slot at the next fill does not queue.
        entering = 0 if self._running.full else self._running.tables.num_free
        if len(self._waiting) >= self._max_queued + entering:
            raise Overloaded("The request queue is full.")
        for sequence in sequences:
            self._validate(sequence)
        for sequence in sequences:
            sequence.max_tokens = min(sequence.max_tokens, self._max_tokens)
            sequence.prompt_logprobs = _first_prompt_logprobs(sequence)
            self._waiting.add(sequence)
            self._choices.setdefault(sequence.request.id, []).append(sequence)

    def fill(self) -> Batch | None:
        """The next step's work; None when nothing can be done before a result arrives or a sequence is added.

        With None and no batch in flight there is nothing running and nothing waiting.
        """
        if not self._choices:
            self._ratio.reset()
            return None
        rows, counts, duplicates = self._filler.fill()
        if not rows:
            return None
        self.last_fill = counts
        tables = self._running.tables
        batch = rows.build(self._num_filled, tables, self._cache.page_size)
        self._num_filled += 1
        for sequence, (
            first,
            pages,
        ) in duplicates:  # only now: no other row of this batch may get these pages
            tables.write_pages(sequence.slot, first, sequence.pages[first : first + len(pages)])
            self._cache.give(pages)
        return batch

    def apply(self, batch: Batch, output: StepOutput) -> list[Delta]:
        """Take in the results of the oldest batch in flight; at most one Delta per sequence.

        Rows of sequences that have ended meanwhile are dropped. Raises `EngineFailure` out of order.
        """
        if batch.number != self._num_applied:
            raise EngineFailure(f"Step {batch.number} was applied when step {self._num_applied} was due.")
        self._num_applied += 1
        return apply_tokens(batch, output, self._retire)

    def abort(self, request_id: int, finish: Finish) -> list[Delta]:
        """End every choice of a request, wherever it is; a final Delta for each. Unknown ids are ignored."""
        deltas = []
        for sequence in list(self._choices.get(request_id, ())):
            self._retire(sequence, finish)
            deltas.append(final_delta(sequence, finish))
        return deltas

    def finish_early(self, request_id: int, index: int) -> None:
        """End one choice whose text reached a stop string, without a Delta; ignored if it has ended."""
        for sequence in self._choices.get(request_id, ()):
            if sequence.index == index:
                self._retire(sequence, Finish("stop"))
                return

    def fail(self, batches: Iterable[Batch]) -> list[int]:
        """A step failed: give up its requests, and have everybody else computed again from the start.

        `batches` are all in flight; nothing of them will be applied. The prefix tree is emptied, since its
        pages may hold anything. Returns the ids of the lost requests; no Delta is made for them.
        """
        lost = {
            sequence.request.id
            for batch in batches
            for sequence in batch.sequences
            if sequence.finish is None
        }
        lost |= {
            request_id
            for request_id, choices in self._choices.items()
            if any(sequence.num_pending for sequence in choices)
        }
        self._start_over()
        for request_id in lost:
            self.abort(request_id, Finish("abort", message=STEP_FAILED))
        return sorted(lost)

    def give_up_newest(self, batches: Iterable[Batch]) -> list[int]:
        """The oldest of these steps had too little memory: give up its newest request for all others.

        `batches` are all in flight, oldest first; nothing of them will be applied. Everybody else is computed
        again, with the tokens that are known, and gets the same further ones. Returns the ids of the lost
        requests (none where all of that step had ended meanwhile); no Delta is made for them.
        """
        failed = next(iter(batches))
        lost = {sequence.request.id for sequence in failed.sequences if sequence.finish is None}
        self._start_over()
        for choices in self._choices.values():
            for sequence in choices:
                sequence.num_pending = 0
                _ask_again(sequence)
        newest = [max(lost)] if lost else []
        for request_id in newest:
            self.abort(request_id, Finish("abort", message=STEP_FAILED))
        return newest

    def _start_over(self) -> None:
        """Put everybody who runs back to the head of the queue, with nothing computed and nothing in flight."""
        self._num_applied = self._num_filled
        for sequence in reversed(self._running.reset()):
            self._waiting.put_back(sequence)

    def flush(self) -> bool:
        """Empty the prefix tree; False, and nothing done, while anything is running or waiting."""
        if self._choices:
            return False
        self._cache.empty()
        return True

    def num_cached(self, sequence: Sequence) -> int:
        """How many of a new sequence's tokens it would find in the prefix tree now; changes nothing."""
        return self._cache.measure(sequence)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_retracted(self) -> int:
        """Retractions since the start."""
        return self._retraction.count

    @property
    def load(self) -> Load:
        cache = self._cache
        return Load(
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            num_pages=cache.num_pages,
            num_used_pages=cache.num_used,
            num_evictable_pages=cache.num_evictable,
            token_usage=cache.num_used / cache.num_pages,
            new_token_ratio=self._ratio.value,
            num_retracted=self._retraction.count,
        )

    def check(self) -> None:
        """Raise `ValueError` unless every page, slot and sequence is accounted for, exactly."""
        self._running.check()
        waiting, running = list(self._waiting), list(self._running)
        alive = [sequence for choices in self._choices.values() for sequence in choices]
        if {*waiting, *running} != set(alive) or len(waiting) + len(running) != len(alive):
            raise ValueError("A sequence is lost, or both waiting and running.")
        for sequence in waiting:
            if sequence.pages or sequence.lock is not None or sequence.slot >= 0 or sequence.num_computed:
                raise ValueError(f"{sequence!r} waits and still holds something.")
        if any(sequence.finish is not None for sequence in alive):
            raise ValueError("A finished sequence is still scheduled.")

    def _retire(self, sequence: Sequence, finish: Finish, trusted: bool = True) -> None:
        sequence.finish = finish
        if sequence.slot >= 0:
            self._running.leave(sequence, trusted=trusted)
        else:
            self._waiting.remove(sequence)
            self._running.full = False
        choices = self._choices[sequence.request.id]
        choices.remove(sequence)
        if not choices:
            del self._choices[sequence.request.id]

    def _validate(self, sequence: Sequence) -> None:
        num_prompt = sequence.num_prompt
        if not num_prompt:
            raise InvalidRequest("The prompt has no tokens.", param="input_ids")
        if min(sequence.ids) < 0 or max(sequence.ids) >= self._vocab_size:
            raise InvalidRequest(f"Token ids must be in [0, {self._vocab_size}).", param="input_ids")
        needed = num_prompt + (sequence.sampling.max_new_tokens != 0)
        if needed > min(sequence.max_tokens, self._max_tokens):
            raise ContextOverflow(
                f"The prompt has {num_prompt} tokens; at most {self._max_tokens} fit, with the output.",
                param="input_ids" if sequence.request.text is None else "text",
            )
        for token_id in sequence.sampling.logit_bias:
            if not 0 <= token_id < self._vocab_size:
                raise InvalidRequest(
                    f"logit_bias names token {token_id}, which is not in the vocabulary.", param="logit_bias"
                )
        logprobs = sequence.request.logprobs
        if logprobs is not None and logprobs.start >= num_prompt:
            raise InvalidRequest(
                f"logprob_start_len must be before the end of the prompt ({num_prompt} tokens).",
                param="logprob_start_len",
            )


def _first_prompt_logprobs(sequence: Sequence) -> Logprobs | None:
    """The entry of the first wanted prompt token: nothing that is computed for the request precedes it."""
    params: LogprobParams | None = sequence.request.logprobs
    if params is None or params.start < 0:
        return None
    return Logprobs(
        chosen=[(None, sequence.ids[params.start])],
        top=[None] if params.top else [],
        picked=[None] if params.token_ids else [],
    )


def _ask_again(sequence: Sequence) -> None:
    """Have the prompt logprobs that were asked for and did not arrive asked for once more."""
    arrived = sequence.prompt_logprobs
    if arrived is not None and sequence.request.logprobs is not None:
        sequence.next_logprob = sequence.request.logprobs.start + len(arrived.chosen) - 1
