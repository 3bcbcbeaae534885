"""The scheduler: builds batches from running and waiting sequences, and applies their results."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from runtime.batch import Batch, PageCopy, StepOutput
from runtime.config.plan import SchedulerPlan
from runtime.constraint import HostData, SequenceConstraint
from runtime.errors import ContextOverflow, EngineFailure, Overloaded
from runtime.kv_cache.host_tier import TierCounts
from runtime.kv_cache.page_events import Event
from runtime.kv_cache.prefix_cache import PrefixCache
from runtime.kv_cache.storage_tier import StorageCounts
from runtime.request import Delta, DraftCounts, Finish, LogprobParams, Logprobs
from runtime.scheduler.adapter_slots import AdapterSlots
from runtime.scheduler.apply import Effects, apply_output, final_delta
from runtime.scheduler.batch_builder import BatchBuilder
from runtime.scheduler.decode_runs import DecodeRuns
from runtime.scheduler.drafting import Drafting
from runtime.scheduler.fast_forward import FastForward
from runtime.scheduler.owner_shares import OwnerShares
from runtime.scheduler.queue import WaitingQueue
from runtime.scheduler.request_tables import Running
from runtime.scheduler.trials import Trials
from runtime.sequence import Sequence
from runtime.speculative.corpus import CorpusIndex

STEP_FAILED = "The step that computed this request failed."


class Load(NamedTuple):
    """Current load of the scheduler, and its counters."""

    num_waiting: int
    num_running: int
    num_pages: int
    num_used_pages: int
    num_used_tokens: int  # tokens that fit into the used pages
    num_evictable_pages: int
    token_usage: float  # share of all pages that running sequences use, from 0 to 1
    window_usage: float  # share of the sliding-window pages that running sequences use; 0 if there are none
    new_token_ratio: float
    num_retracted: int  # retractions since the start
    num_recomputed: int  # tokens recomputed after retractions, since the start
    num_swapped_out: int  # pages copied to the host for retracted sequences, since the start
    num_swapped_in: int  # pages copied back from the host, since the start
    num_forced: int  # forced tokens that saved a step each, since the start
    drafts: DraftCounts = DraftCounts()  # proposed and accepted draft tokens, since the start
    num_adapter_slots: int = 0  # adapter slots with running sequences
    num_adapter_evictions: int = 0  # adapters replaced in their slot, since the start
    num_pinned_pages: int = 0  # pages of pinned prefixes
    tier: TierCounts = TierCounts()  # pages of the host tier
    storage: StorageCounts = StorageCounts()  # pages of the storage tier


class Scheduler:
    """Builds batches and applies their results. It is synchronous, works on plain data and is owned by one actor.

    The actor repeatedly calls `batch = fill()`, launches the batch, and calls `apply(previous, output)` with the oldest
    batch in flight. Any number of batches may be in flight. They run and are applied in the order in which they were
    built.
    """

    def __init__(self, plan: SchedulerPlan, cache: PrefixCache, *, vocab_size: int, context_length: int) -> None:
        self._cache = cache
        self._max_queued = plan.max_queued
        self._max_queued_tokens = plan.max_queued_tokens
        self._max_tokens = min(context_length, cache.num_tokens)
        adapters = AdapterSlots(plan.adapter_slots, first_in_first_out=plan.adapters_fifo)
        owners = OwnerShares(plan.owner_weights)
        self._running = Running(plan.max_running, cache, vocab_size, adapters, owners)
        self._waiting = WaitingQueue(plan.policy, cache, priorities=plan.priorities, running=owners)
        self._fast_forward = FastForward(plan, cache, self._running, vocab_size)
        self._drafting = Drafting(plan, cache, self._running)
        self._builder = BatchBuilder(plan, cache, self._running, self._waiting, self._fast_forward, self._drafting)
        self._decode_runs = DecodeRuns(plan, cache, self._running, self._waiting, self._builder.new_token_ratio)
        running = self._running
        self._effects = Effects(self._retire, running.stall, running.rewind, self._drafting.note, running.take_branch)
        self._trials = Trials()
        self._num_filled = 0
        self._num_applied = 0
        # Prompt tokens for `num_tokens_ahead`; None: not counted since the last `fill`.
        self._num_tokens_running: int | None = None
        self.storage = cache.storage

    def limit_steps(self, prefill: int | None, mixed: int | None, *, scored: tuple[int, int] | None = None) -> None:
        """Set the number of prompt tokens after which a prefill-only or a mixed step accepts no further prompt.

        None means that only the plan limits the step. `scored` has the limits on prompt tokens with log-probabilities.
        These limits cut prompts. If `scored` is None, they do not change.
        """
        self._builder.scored_limits = scored or self._builder.scored_limits
        self._builder.prompt_limits = (prefill, mixed)

    def limit_mixed_steps(self, num_tokens: int | None) -> None:
        """Set the maximum number of prompt tokens of a mixed step; longer prompts are cut. None: no limit."""
        self._builder.mixed_limit = num_tokens

    def use_corpora(self, index: CorpusIndex | None) -> None:
        """Propose draft tokens from these corpora too, from the next step on. None: use no corpora."""
        self._drafting.corpora.index = index

    def note_step_time(self, step_s: float | None) -> None:
        """Set the average time of a decode step in seconds, or None if it is unknown."""
        self._fast_forward.step_s = step_s

    def note_step(self, batch: Batch, num_tokens: int, seconds: float, late_s: float = 0.0) -> None:
        """Record an applied step: its number of new tokens and its time in seconds.

        Before its launch, the device was idle for `late_s` seconds while sequences were running.
        """
        self._drafting.note_step(batch, num_tokens, seconds + late_s)

    def note_prompt_time(self, token_s: float | None) -> None:
        """Set the average time in seconds to compute one prompt token. None keeps the current value."""
        if self._cache.tier is not None and token_s is not None:
            self._cache.tier.compute_s = token_s * self._cache.page_size

    @property
    def queue_space(self) -> int:
        """Number of further sequences that the queue accepts.

        Free rows are counted too, because such sequences start at once.
        """
        entering = 0 if self._running.full else self._running.tables.num_free
        return self._max_queued + entering - len(self._waiting)

    def num_tokens_ahead(self, urgency: float) -> int:
        """Return the number of prompt tokens that are computed before a new sequence with this urgency.

        The running sequences are counted at the first call after each `fill`.
        """
        if self._num_tokens_running is None:
            self._num_tokens_running = sum(max(0, len(each.ids) - each.num_computed - 1) for each in self._running)
        return self._num_tokens_running + self._waiting.num_tokens_from(urgency)

    @property
    def least_urgency(self) -> float:
        """Lowest urgency of the sequences that have not run yet.

        Infinity if there is no such sequence, or if priorities are off.
        """
        return self._waiting.least_urgency

    def add(self, *sequences: Sequence) -> None:
        """Queue all sequences of one request. Limits their `max_tokens` to the capacity of the KV pool.

        Raises `Overloaded` if the queue is full, and `ContextOverflow` if the prompt does not fit into the pool; no
        sequence is then queued.
        """
        if not sequences[0].request.follows:
            if self.queue_space <= 0:
                raise Overloaded("The request queue is full.")
            num_tokens = sum(sequence.num_prompt for sequence in sequences)
            if self._waiting.num_tokens and self._waiting.num_tokens + num_tokens > self._max_queued_tokens:
                raise Overloaded("The waiting prompts have too many tokens in total.")
        for sequence in sequences:
            self._check_length(sequence)
        for sequence in sequences:
            sequence.max_tokens = min(sequence.max_tokens, self._max_tokens)
            sequence.prompt_logprobs = _first_prompt_logprobs(sequence)
            self._drafting.start(sequence)
            self._waiting.add(sequence)
            self._cache.want(sequence)

    def fill(self) -> Batch | None:
        """Build the batch of the next step.

        Returns None if nothing can be computed until a result arrives or a sequence is added. If it returns None while
        no batch is in flight, all sequences wait for the host data in `awaited`.
        """
        self._num_tokens_running = None
        if not self._running and not self._waiting:
            self._builder.new_token_ratio.reset()
            return None
        batch = self._builder.build(self._num_filled)
        while batch is None and self._trials and self._num_filled == self._num_applied:
            self._trials.skip()
            self._try_next()
            batch = self._builder.build(self._num_filled)
        if batch is not None:
            if self.storage is not None:
                self.storage.filled(self._num_filled)
            self._num_filled += 1
        return batch

    def apply(self, batch: Batch, output: StepOutput) -> list[Delta]:
        """Apply the results of the oldest batch in flight. Return at most one Delta per sequence.

        Rows of sequences that have ended are ignored. Raises `EngineFailure` if the batch is not the oldest, and
        `RowFailed` if a row cannot be applied.
        """
        if batch.number != self._num_applied:
            raise EngineFailure(f"Step {batch.number} was applied when step {self._num_applied} was due.")
        self._num_applied += 1
        deltas = apply_output(batch, output, self._effects, self._fast_forward.pays)
        if self.storage is not None:
            self.storage.applied(batch.number)
        if self._trials and self._trials.passed(self._running.full):
            self._try_next()
        return deltas

    @property
    def num_equal_steps(self) -> int:
        """Lower bound on the number of next steps that have the same decode rows, if no token ends a sequence.

        0 if it is unknown. No sequence starts, ends or is retracted before these steps have ended.
        """
        if self._trials:
            return 0
        return self._decode_runs.length(self._num_filled - self._num_applied)

    def skip_steps(self, num_steps: int, token_id: int) -> None:
        """Advance by `num_steps` equal steps, each of which samples `token_id` in every row. For simulations.

        The scheduler is then in the same state as after `num_steps` calls of `fill` and `apply`, but no batches and
        Deltas are created. The number of steps in flight does not change, and their step numbers rise by `num_steps`.
        `num_steps` must be at most `num_equal_steps`, and the token must end no sequence.
        """
        self._decode_runs.advance(num_steps, token_id)
        self._num_filled += num_steps
        self._num_applied += num_steps

    @property
    def running(self) -> Iterable[Sequence]:
        """The running sequences, in order of admission."""
        return self._running

    @property
    def awaited(self) -> list[HostData]:
        """The host data (such as grammar masks) for which stalled sequences wait."""
        return [sequence.next_host_data for sequence in self._running.stalled]

    @property
    def constraints(self) -> Iterable[SequenceConstraint]:
        """The constraints of the running sequences."""
        return self._running.constrained.values()

    @property
    def awaited_masks(self) -> HostData | None:
        """The newest host data that has not arrived yet and may force tokens, or None.

        Waiting a short time for this data before the next `fill` can save steps.
        """
        return self._fast_forward.awaited

    def abort(self, sequences: Iterable[Sequence], finish: Finish) -> list[Delta]:
        """End these running or waiting sequences. Return a final Delta for each sequence that had not ended."""
        deltas = []
        for sequence in sequences:
            if sequence in self:
                self._retire(sequence, finish)
                deltas.append(final_delta(sequence, finish))
        return deltas

    def withdraw(self, sequences: Iterable[Sequence]) -> None:
        """Remove waiting sequences that have not run yet, so that another scheduler can compute them."""
        for sequence in sequences:
            self._waiting.remove(sequence)
            if sequence.constraint is not None:
                sequence.constraint.release()
        self._running.full = False

    def end(self, sequence: Sequence) -> None:
        """End a sequence whose text contains a stop string.

        Returns no Delta, because the detokenizer has ended the output. Does nothing if the sequence has already ended.
        """
        if sequence in self:
            self._retire(sequence, Finish("stop"))

    def fail(self, batches: Iterable[Batch]) -> list[int]:
        """Recover from a failed step, and fail only the request that caused the failure.

        `batches` are all batches in flight, oldest first. The oldest one failed, and none of them will be applied. The
        prefix tree is emptied, because its pages may be corrupt. All running sequences are recomputed from their known
        tokens and produce the same further tokens. The requests of the failed step are recomputed first, in smaller and
        smaller groups (`Trials`), and a request that fails alone is ended. Returns the ids of the requests that this
        call ends; no Deltas are created for them.
        """
        suspects = self._recompute(batches)
        lost = self._trials.narrow(suspects)
        self._give_up(lost)
        self._try_next()
        return lost

    def give_up_newest(self, batches: Iterable[Batch]) -> list[int]:
        """Recover from a step that ran out of memory, by ending its newest request.

        `batches` are all batches in flight; the oldest one failed. The running sequences of all other requests are
        recomputed. Returns a list with the id of the ended request. The list is empty if all requests of the failed
        step had already ended.
        """
        newest = self._recompute(batches)[-1:]
        self._give_up(newest)
        return newest

    def recompute(self) -> None:
        """Empty the prefix tree, and recompute all running sequences from their known tokens.

        Called after the model's weights changed. No step may be in flight.
        """
        self._recompute(())

    def _recompute(self, batches: Iterable[Batch]) -> list[int]:
        """Put all running sequences back into the queue.

        Returns the ids of the oldest batch's unfinished requests, in ascending order.
        """
        failed = next(iter(batches), None)
        sequences = failed.sequences if failed is not None else ()
        request_ids = {sequence.request.id for sequence in sequences if sequence.finish is None}
        self._start_over()
        for sequence in self:
            sequence.num_pending = sequence.num_superseded = sequence.num_drafted = 0
            _request_missing_logprobs(sequence)
        return sorted(request_ids)

    def _try_next(self) -> None:
        """Put all running sequences back into the queue.

        Then allow only the sequences of the next trial group to run, or all sequences if no group is left.
        """
        for sequence in reversed(list(self._running)):
            self._waiting.put_back(sequence)
            self._running.leave(sequence)
        self._trials.begin(self)
        self._waiting.allowed = self._trials.allowed

    def rebuild(self, lost: Container[int] = ()) -> None:
        """Rebuild rows, pages and the prefix tree after an exception that may have left them inconsistent.

        The requests in `lost` are ended. No batch in flight will be applied. All other sequences are recomputed from
        their known tokens and produce the same further tokens.
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
            sequence.num_pending = sequence.num_superseded = sequence.num_drafted = 0
            _request_missing_logprobs(sequence)
            self._waiting.add(sequence)

    def _give_up(self, request_ids: Container[int]) -> None:
        """End all sequences of these requests."""
        for sequence in [sequence for sequence in self if sequence.request.id in request_ids]:
            self._retire(sequence, Finish("abort", message=STEP_FAILED))

    def _start_over(self) -> None:
        """Put all running sequences back at the head of the queue, with no computed token and no step in flight."""
        self._num_applied = self._num_filled
        for sequence in reversed(self._running.reset()):
            self._waiting.put_back(sequence)

    def flush(self) -> bool:
        """Empty the prefix tree. Return False, and do nothing, while sequences run or wait."""
        if self._running or self._waiting:
            return False
        self._cache.empty()
        return True

    def take_copies(self) -> tuple[PageCopy, ...]:
        """Return and clear the page copies that are queued for the next batch.

        The caller must perform the copies before the next forward pass. If no sequence runs, or if other servers wait
        for pages, the copies of all pages that must still be copied to the host tier are included.
        """
        if self._cache.tier is not None and self._writes_all:
            self._cache.tier.write_all()
        return self._cache.take_copies()

    @property
    def has_copies(self) -> bool:
        """Whether `take_copies` would return at least one copy."""
        return bool(self._cache.copies) or (
            self._cache.tier is not None and self._writes_all and self._cache.tier.num_waiting > 0
        )

    @property
    def _writes_all(self) -> bool:
        """Whether pages are copied to the host tier at once, although a step may be delayed by this."""
        return not self._running or (self.storage is not None and self.storage.is_awaited)

    def forget_adapter(self, adapter_id: int) -> None:
        """Empty the slot of an adapter, unless a sequence uses it."""
        self._running.adapters.forget(adapter_id)

    def take_events(self) -> list[Event]:
        """Return and clear the events of cached pages. Returns an empty list if events are off."""
        return [] if self._cache.events is None else self._cache.events.take()

    def prefix_tree(self, limit: int) -> tuple[list[tuple[int, int, int]], int]:
        """Return the shape of the prefix tree, with at most `limit` nodes; see `RadixTree.outline`."""
        return self._cache.outline(limit)

    def prefix_tree_ids(self, limit: int, num_ids: int) -> list[list[int]]:
        """Return the first keys of each node of the prefix tree: token ids, or larger numbers for media tokens."""
        return self._cache.outline_ids(limit, num_ids)

    def touch(self, ids: list[int], namespace: Hashable) -> int:
        """Mark the cached prefix of these tokens as most recently used. Return its number of tokens."""
        return self._cache.touch(ids, namespace)

    def num_cached(self, sequence: Sequence) -> int:
        """Return how many tokens of a new sequence are in the prefix tree or the host tier, without changing them."""
        return self._cache.num_cached(sequence)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over all running and waiting sequences."""
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
        """Number of retractions since the start."""
        return self._builder.retraction.num_retracted

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
            window_usage=cache.usage("windowed"),
            new_token_ratio=self._builder.new_token_ratio.value,
            num_retracted=self._builder.retraction.num_retracted,
            num_recomputed=self._builder.num_recomputed,
            num_swapped_out=0 if cache.host is None else cache.host.num_swapped_out,
            num_swapped_in=0 if cache.host is None else cache.host.num_swapped_in,
            num_forced=self._fast_forward.num_saved,
            drafts=self._drafting.counts,
            num_adapter_slots=self._running.adapters.num_used,
            num_adapter_evictions=self._running.adapters.num_evictions,
            storage=StorageCounts() if self.storage is None else self.storage.counts,
            num_pinned_pages=cache.pins.num_pages,
            tier=TierCounts() if cache.tier is None else cache.tier.counts,
        )

    def check(self) -> None:
        """Raise `ValueError` unless every page, row and sequence is accounted for."""
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
                raise ValueError(f"{sequence!r} waits but still has pages, a lock, a row or computed tokens.")
        if self._cache.host is not None and not self._cache.host.holders <= set(waiting):
            raise ValueError("A sequence that does not wait has pages in host memory.")
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
            if trusted and not sequence.index and finish.kind != "abort":
                self._cache.pin(sequence)
        else:
            self._waiting.remove(sequence)
            self._cache.forget_swapped(sequence)
            self._running.full = False

    def _check_length(self, sequence: Sequence) -> None:
        num_prompt = sequence.num_prompt
        needed = num_prompt + (sequence.max_tokens > num_prompt)
        if needed > self._max_tokens:
            raise ContextOverflow(
                f"The prompt has {num_prompt} tokens; at most {self._max_tokens} fit, including the output.",
                param="input_ids" if sequence.request.text is None else "text",
            )


def _first_prompt_logprobs(sequence: Sequence) -> Logprobs | None:
    """Return the log-probability entry of the first requested prompt token, or None if the request wants none.

    If it is the first token of the prompt, its values are None, because no position predicts it.
    """
    params: LogprobParams | None = sequence.request.logprobs
    if params is None or params.start < 0:
        return None
    return Logprobs(
        chosen=[(None, sequence.ids[params.start])],
        top=[None] if params.top else [],
        requested=[None] if params.token_ids else [],
    )


def _request_missing_logprobs(sequence: Sequence) -> None:
    """Request again the prompt log-probabilities that had not arrived before the recomputation."""
    arrived = sequence.prompt_logprobs
    if arrived is not None and sequence.request.logprobs is not None:
        sequence.next_logprob = sequence.request.logprobs.start + len(arrived.chosen) - 1
