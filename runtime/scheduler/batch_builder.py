"""Choosing the rows of the next step.

There is no prefill and no decode phase: a row computes tokens of its sequence that are not computed yet. Two
kinds of rows differ only in how they are limited. *Decode rows* compute one output token and want at most one
page; they are secured first, if need be by retracting somebody. *Prompt rows* compute known tokens, as many
as the budgets and the free pages allow.

Somebody can always go on. Admission sets aside pages for all known tokens of all who run, so prompts lack
pages only while outputs have grown over them, and then those outputs grow further, or end and return their
pages. Where outputs grow by several tokens a step, they may lack pages too, and somebody is retracted.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from runtime.batch import UNKNOWN, Batch, PromptLogprobs, StepStats
from runtime.config.plan import SchedulerPlan
from runtime.kv_cache.prefix_cache import Duplicates, PrefixCache, reusable_tokens
from runtime.scheduler.budget import NewTokenRatio, PromptBudget
from runtime.scheduler.fast_forward import FastForward
from runtime.scheduler.queue import WaitingQueue
from runtime.scheduler.request_tables import RequestTables, Running
from runtime.sequence import Sequence

MAX_DEFERRED = 16  # waiting sequences looked up in one step only to find that they had better wait


class BatchBuilder:
    """Builds one batch after the other from the running and the waiting sequences."""

    def __init__(
        self,
        plan: SchedulerPlan,
        cache: PrefixCache,
        running: Running,
        waiting: WaitingQueue,
        fast_forward: FastForward,
    ) -> None:
        self.new_token_ratio = NewTokenRatio(plan)
        self.num_retracted = 0  # since the start
        # Of prompts in a step without and with decode rows; None: as many as the plan allows.
        self.enough_tokens: tuple[int | None, int | None] = (None, None)
        self._plan = plan
        self._cache = cache
        self._running = running
        self._waiting = waiting
        self._fast_forward = fast_forward

    def build(self, number: int) -> Batch | None:
        """Choose the rows of the step with this number and give them pages; None when there is nothing to do."""
        if self._plan.priorities and self._waiting.allowed is None:
            self._preempt()
        if self._running.stalled:
            self._running.resume()
        self._fast_forward.append()
        decodes, prompts = self._unfinished()
        step = _StepRows(self._plan.max_micro_batch, self._plan.max_forced)
        if self._plan.mixed:
            self._add_decodes(step, decodes)
            self._add_prompts(step, prompts)
        else:
            self._add_prompts(step, prompts)
            if not step:
                self._add_decodes(step, decodes)
        if step.num_decodes:
            self.new_token_ratio.decay()
        if not step:
            self._make_room(step, prompts)
        if not step:
            return None
        tables = self._running.tables
        batch = step.build(number, tables, self._cache)
        for sequence, duplicates in step.duplicates:  # only now: no other row of this batch may get them
            first, pages = duplicates
            tables.write_pages(sequence.sequence_index, first, sequence.pages[first : first + len(pages)])
            self._cache.replaced(sequence, duplicates)
        if self._cache.kinds:
            self._cache.filled(batch)
        return batch

    def _preempt(self) -> None:
        """Retract who runs for the most urgent who waits, where that is urgent enough and cannot run otherwise.

        The least urgent go first, and of those the newest. Nobody goes where that would not make enough room.
        """
        first = next(iter(self._waiting.ordered()), None)
        if first is None or first.num_pending:
            return
        limit = first.urgency - self._plan.preemption_threshold
        victims = [sequence for sequence in reversed(list(self._running)) if sequence.urgency < limit]
        victims.sort(key=lambda sequence: sequence.urgency)
        if not victims:
            return
        size, estimate = self._cache.page_size, self.new_token_ratio
        self._cache.lock(first)
        lacking = estimate.pages_at_first(first, size) - self._cache.num_available
        self._cache.release(first, keep=False)
        lacking += sum(estimate.pages_ahead(sequence, size) for sequence in self._running)
        num_rows, chosen = self._running.tables.num_free, []
        for victim in victims:
            if lacking <= 0 and num_rows:
                break
            chosen.append(victim)
            num_rows += 1
            lacking -= len(victim.pages) + estimate.pages_ahead(victim, size)
        if lacking <= 0 and num_rows:
            for victim in chosen:
                self._retract(victim)

    def _unfinished(self) -> tuple[list[Sequence], list[Sequence]]:
        """Running sequences with something to compute: by one output token, and by known tokens.

        Of these, those that lack output tokens alone (forced ones) are first: a long prompt would keep them waiting.
        """
        decodes: list[Sequence] = []
        outputs: list[Sequence] = []
        prompts: list[Sequence] = []
        num_decoding = 0
        # In a pipeline only who is in no other micro-batch decodes, so that these need not wait for each other.
        one_at_a_time = self._plan.micro_batches > 1
        # Nor does one whose token may come late, where only its newest step can be taken back.
        one_step_back = any(kind.one_step_back for kind in self._cache.kinds)
        running: Iterable[Sequence] = self._running
        if self._running.stalled:
            running = [sequence for sequence in running if sequence not in self._running.stalled]
        for sequence in running:
            computed = sequence.num_computed
            lacking = len(sequence.ids) + sequence.num_pending - computed
            if lacking == 1 and computed >= sequence.num_prompt:
                if computed + 1 < sequence.max_tokens:  # else its last token is under way
                    num_decoding += 1
                    alone = one_at_a_time or (one_step_back and sequence.constraint is not None)
                    if not (alone and sequence.num_pending):
                        decodes.append(sequence)
            elif lacking:
                (outputs if computed >= sequence.num_prompt else prompts).append(sequence)
        return decodes[: self._micro_batch(num_decoding)], outputs + prompts

    def _micro_batch(self, num_decoding: int) -> int:
        """How many decode rows a step may have: of a pipeline's micro-batch its even share."""
        share = -(-num_decoding // self._plan.micro_batches)
        return min(share, self._plan.max_micro_batch or share)

    def _add_decodes(self, step: _StepRows, decodes: list[Sequence]) -> None:
        size = self._cache.page_size
        at_page_end = [sequence for sequence in decodes if sequence.num_computed % size == 0]
        while len(at_page_end) > self._cache.num_available and self._retract_one():
            step.retracted = True
            decodes = [sequence for sequence in decodes if sequence.sequence_index >= 0]
            at_page_end = [sequence for sequence in at_page_end if sequence.sequence_index >= 0]
        if at_page_end:
            self._running.tables.append_pages(at_page_end, self._cache.allocate(len(at_page_end)))
        step.add_decodes(decodes)

    def _retract_one(self) -> bool:
        """Send the sequence that loses least back to the head of the queue, to be computed again later.

        The lowest urgency decides, then fewest output tokens, the longest prompt, and the latest admission. False
        when only one is left: one sequence alone always fits.
        """
        if len(self._running) < 2:
            return False
        victim = min(
            reversed(list(self._running)),
            key=lambda sequence: (sequence.urgency, sequence.num_output, -sequence.num_prompt),
        )
        self._retract(victim)
        self.new_token_ratio.lift(self._running)
        return True

    def _retract(self, victim: Sequence) -> None:
        self._waiting.put_back(victim)  # first: whatever breaks, it is somewhere
        self._running.leave(victim)
        self.num_retracted += 1

    def _add_prompts(self, step: _StepRows, prompts: list[Sequence]) -> None:
        """Continue cut prompts, then admit waiting sequences, while budgets and pages last."""
        enough = self.enough_tokens[step.num_decodes > 0]
        budget = PromptBudget(self._plan, self._cache.page_size, step.num_decodes, enough)
        for sequence in prompts:
            if sequence.sequence_index < 0 or budget.exhausted or step.full:
                continue
            count = self._affordable(sequence, budget)
            if count:
                self._compute(step, sequence, count, budget)
            if sequence.num_computed < len(sequence.ids):
                step.unfinished.append(sequence)
        if not step.retracted:
            self._admit(step, budget)

    def _make_room(self, step: _StepRows, prompts: list[Sequence]) -> None:
        """Let somebody go on where decode rows retracted each other, or several tokens a step took all pages."""
        if step.retracted:
            self._add_prompts(step, prompts)
        if any(sequence.num_pending for sequence in self._running):
            return  # whoever has a token under way goes on, or ends and frees its pages
        while prompts and not step and self._retract_one():
            step.retracted = True
            self._add_prompts(step, prompts)

    def _affordable(self, sequence: Sequence, budget: PromptBudget) -> int:
        """How many of the next known tokens both the budget and the free pages allow."""
        start = sequence.num_computed
        count = budget.grant(start, len(sequence.ids))
        held = len(sequence.pages) + self._cache.num_available
        count = max(min(count, held * self._cache.page_size - start), 0)
        for kind in self._cache.kinds:
            count = kind.row_end(sequence, start + count) - start
        return count

    def _compute(self, step: _StepRows, sequence: Sequence, count: int, budget: PromptBudget) -> None:
        self._running.extend(sequence, sequence.num_computed + count)
        step.add_prompt(sequence, count)
        budget.spend(count)
        duplicates = self._cache.insert(sequence)  # now: later rows of this very step may use them
        if duplicates is not None:
            step.duplicates.append((sequence, duplicates))

    def _admit(self, step: _StepRows, budget: PromptBudget) -> None:
        running = self._running
        if running.full or not self._waiting or not running.tables.num_free or budget.exhausted:
            return
        size, estimate = self._cache.page_size, self.new_token_ratio
        cache = self._cache
        reserved = cache.demand((sequence, estimate.pages_ahead(sequence, size)) for sequence in running)
        admitted: list[Sequence] = []
        num_deferred = 0
        for sequence in self._waiting.ordered():
            if step.full or not running.tables.num_free or budget.exhausted or num_deferred >= MAX_DEFERRED:
                break
            if sequence.num_pending:  # retracted a moment ago; a step in flight brings its last token
                num_deferred += 1
                continue
            self._cache.lock(sequence)
            if self._is_being_computed(sequence, step.unfinished):
                self._cache.release(sequence, keep=False)
                num_deferred += 1
                continue
            needed = cache.demand([(sequence, estimate.pages_at_first(sequence, size))])
            fits = not running or cache.has_room(reserved, needed)
            count = self._affordable(sequence, budget) if fits else 0
            if not count:
                running.full = not fits
                self._cache.release(sequence, keep=False)
                break
            self._start(step, sequence, count, budget)
            admitted.append(sequence)
            more = cache.demand([(sequence, estimate.pages_ahead(sequence, size))])
            reserved = [before + own for before, own in zip(reserved, more, strict=True)]
            if len(admitted) == self._plan.max_new_sequences:
                break
        for sequence in admitted:
            self._waiting.remove(sequence)

    def _start(self, step: _StepRows, sequence: Sequence, count: int, budget: PromptBudget) -> None:
        """Make a waiting sequence run, with its first row."""
        if sequence.num_cached < 0:
            sequence.num_cached = sequence.num_shared
        step.num_new += 1
        step.num_cached_tokens += sequence.num_shared
        self._running.enter(sequence)
        self._compute(step, sequence, count, budget)
        if sequence.num_computed < len(sequence.ids):
            step.unfinished.append(sequence)

    def _is_being_computed(self, sequence: Sequence, unfinished: list[Sequence]) -> bool:
        """Whether another sequence, cut at the same position, computes this one's next page in its next step."""
        start = sequence.num_shared
        end = start + self._cache.page_size
        if end > reusable_tokens(sequence):
            return False
        return any(
            other.locked_node is sequence.locked_node
            and other.locked_node is not None
            and other.num_shared == start
            # Only the next page is compared: that is enough to be sure to gain by waiting.
            and other.ids[start:end] == sequence.ids[start:end]
            for other in unfinished
        )


class _StepRows:
    """The rows of the step that is being filled.

    Adding a row also advances its sequence: more is computed, and one more token is pending if the row samples.
    """

    __slots__ = (
        "_counts",
        "_embedded",
        "_max_forced",
        "_max_rows",
        "_prompt_logprobs",
        "_sampled",
        "_second_starts",
        "_sequences",
        "_starts",
        "_token_ids",
        "duplicates",
        "num_cached_tokens",
        "num_decodes",
        "num_forced",
        "num_new",
        "num_prompt_tokens",
        "retracted",
        "unfinished",
    )

    def __init__(self, max_rows: int | None, max_forced: int = 0) -> None:
        self._max_rows = max_rows
        self._max_forced = max_forced
        self._sequences: list[Sequence] = []
        self._starts: list[int] = []
        self._counts: list[int] = []
        self._token_ids: list[int] = []
        self._sampled: list[int] = []
        self._embedded: list[int] = []
        self._second_starts: dict[int, int] = {}  # by row
        self._prompt_logprobs: list[PromptLogprobs] = []
        self.duplicates: list[tuple[Sequence, Duplicates]] = []
        self.unfinished: list[Sequence] = []  # cut prompts that go on in the next step
        self.retracted = False
        self.num_new = 0
        self.num_cached_tokens = 0
        self.num_prompt_tokens = 0
        self.num_decodes = 0
        self.num_forced = 0  # rows of up to so many known output tokens

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def full(self) -> bool:
        return self._max_rows is not None and len(self) >= self._max_rows

    def add_decodes(self, sequences: list[Sequence]) -> None:
        """One row for each of these sequences, which lack only their last token, perhaps still pending."""
        first = len(self._sequences)
        starts, token_ids = self._starts, self._token_ids
        for sequence in sequences:
            start = sequence.num_computed
            starts.append(start)
            sequence.num_computed = start + 1
            pending = sequence.num_pending
            token_ids.append(UNKNOWN if pending else sequence.ids[start])
            sequence.num_pending = pending + 1
        self._sequences += sequences
        self._counts += [1] * len(sequences)
        self._sampled += range(first, first + len(sequences))
        self.num_decodes = len(sequences)

    def add_prompt(self, sequence: Sequence, count: int) -> None:
        """The next `count` known tokens; with the last one the row yields what the request wants, if anything."""
        start = sequence.num_computed
        end = start + count
        self._ask_prompt_logprobs(sequence, start, end)
        if sequence.request.wants_embedding:
            if end == len(sequence.ids):
                self._embedded.append(len(self._sequences))
            if sequence.request.second_start is not None:
                self._second_starts[len(self._sequences)] = sequence.request.second_start
        elif end == len(sequence.ids) < sequence.max_tokens:
            self._sampled.append(len(self._sequences))
            sequence.num_pending += 1
        self._sequences.append(sequence)
        self._starts.append(start)
        self._counts.append(count)
        self._token_ids += sequence.ids[start:end]
        if start >= sequence.num_prompt and count <= self._max_forced:
            self.num_forced += 1
        else:
            self.num_prompt_tokens += count
        sequence.num_computed = end

    def _ask_prompt_logprobs(self, sequence: Sequence, start: int, end: int) -> None:
        params = sequence.request.logprobs
        first = max(sequence.next_logprob, start)
        last = min(end, sequence.num_prompt - 1)
        if params is None or first >= last:
            return
        targets = np.array(sequence.ids[first + 1 : last + 1], np.int32)
        offset = len(self._token_ids) + first - start
        self._prompt_logprobs.append(PromptLogprobs(len(self._sequences), offset, targets, params))
        sequence.next_logprob = last

    def build(self, number: int, tables: RequestTables, cache: PrefixCache) -> Batch:
        """The finished batch; it shares no memory with the tables."""
        indices = np.array([sequence.sequence_index for sequence in self._sequences], np.int32)
        starts = np.array(self._starts, np.int32)
        counts = np.array(self._counts, np.int32)
        ends = starts + counts
        width = -(-int(ends.max()) // cache.page_size)
        page_table = tables.pages[indices, :width]
        sampling = None
        if self._sampled:
            rows = np.array(self._sampled, np.int32)
            sampling = tables.sampling.gather(rows, indices[rows], ends[rows].astype(np.int64))
        return Batch(
            number=number,
            sequences=tuple(self._sequences),
            starts=starts,
            counts=counts,
            sequence_indices=indices,
            token_ids=np.array(self._token_ids, np.int32),
            page_table=page_table,
            sampling=sampling,
            prompt_logprobs=tuple(self._prompt_logprobs),
            embedding_rows=np.array(self._embedded, np.int32) if self._embedded else None,
            row_values=tables.values_of(indices),
            kinds={
                kind.name: kind.step_arrays(self._sequences, starts, counts, page_table)
                for kind in cache.kinds
            },
            second_starts=self._seconds(ends) if self._second_starts else None,
            stats=StepStats(
                self.num_new,
                self.num_cached_tokens,
                self.num_prompt_tokens,
                self.num_decodes + self.num_forced,
            ),
        )

    def _seconds(self, ends: np.ndarray) -> np.ndarray:
        """Where each row's second text begins: behind its end where there is none."""
        found = ends.copy()
        found[list(self._second_starts)] = list(self._second_starts.values())
        return found
