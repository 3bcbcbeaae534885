"""Builds the batch of the next step.

There is no prefill or decode phase: every row computes tokens of its sequence that are not computed yet. There are two
kinds of rows. *Decode rows* compute one output token and need at most one new page. They get their pages first, and a
sequence is retracted if pages are missing. *Prompt rows* compute as many known tokens as the budgets and the free pages
allow.

At least one running sequence always has enough pages to continue. Admission reserves pages for all known tokens of all
running sequences. Prompts therefore lack pages only if outputs became longer than expected. These prompts then wait
until other sequences end and free pages. If decode rows lack pages too, a sequence is retracted.
"""

from __future__ import annotations

from collections.abc import Iterable

from runtime.batch import Batch
from runtime.config.plan import SchedulerPlan
from runtime.kv_cache.prefix_cache import NONE_HELD, PrefixCache, reusable_tokens
from runtime.scheduler.budget import SCORED_TOKENS, NewTokenRatio, PromptBudget
from runtime.scheduler.drafting import Drafting
from runtime.scheduler.fast_forward import FastForward
from runtime.scheduler.queue import WaitingQueue
from runtime.scheduler.request_tables import Running
from runtime.scheduler.retraction import Retraction
from runtime.scheduler.step_rows import StepRows
from runtime.sequence import Sequence

MAX_DEFERRED = 16  # maximum number of waiting sequences that one step may look up in the prefix tree and then defer
MAX_WITHOUT_SLOT = 256  # maximum number of waiting sequences that one step may skip because their adapters have no slot


class BatchBuilder:
    """Builds batches from the running and the waiting sequences."""

    def __init__(
        self,
        plan: SchedulerPlan,
        cache: PrefixCache,
        running: Running,
        waiting: WaitingQueue,
        fast_forward: FastForward,
        drafting: Drafting,
    ) -> None:
        self.new_token_ratio = NewTokenRatio(plan)
        self.retraction = Retraction(plan, cache, running, waiting, self.new_token_ratio)
        self.num_recomputed = 0  # tokens recomputed after retractions, since the start
        # Numbers of prompt tokens after which a step accepts no further prompt: in a prefill-only step, and in a mixed
        # step. None: only the plan limits the step.
        self.prompt_limits: tuple[int | None, int | None] = (None, None)
        # Maximum number of prompt tokens of a mixed step; a longer prompt is cut. None: no limit.
        self.mixed_limit: int | None = None
        # Limits on prompt tokens with log-probabilities: in a prefill-only step, and in a mixed step.
        self.scored_limits: tuple[int, int] = SCORED_TOKENS
        self._plan = plan
        self._cache = cache
        self._running = running
        self._waiting = waiting
        self._fast_forward = fast_forward
        self._drafting = drafting
        # With pipeline parallelism, a sequence is in only one step in flight at a time, so the micro-batches are
        # independent.
        self._one_at_a_time = plan.micro_batches > 1
        # A sequence with a constraint is also in only one step at a time if a cache kind can rewind only its last row.
        self._one_step_back = any(kind.steps_back is not None for kind in cache.kinds)

    def build(self, number: int) -> Batch | None:
        """Build batch `number` and allocate its pages. Return None if no row can be computed."""
        self._cache.begin_step()
        if self._waiting and self._waiting.allowed is None:
            if self._plan.priorities:
                self.retraction.preempt()
            self.retraction.share()
        if self._running.stalled:
            self._running.resume()
        self._fast_forward.append()
        decodes, prompts, followers = self._unfinished()
        step = StepRows(self._plan.max_micro_batch, self._plan.max_forced)
        if self._plan.mixed:
            self._add_decodes(step, decodes)
            self._add_prompts(step, prompts)
        else:
            self._add_prompts(step, prompts)
            if not step:
                self._add_decodes(step, decodes)
        if followers and self._may_add_followers(step):
            self._add_followers(step, followers)
        if step.num_decodes:
            self.new_token_ratio.decay()
        if not step:
            self._unblock(step, prompts)
        if not step:
            return None
        tables = self._running.tables
        read = not self._drafting.by_model or self._drafting.reads(step.sequences, step.num_drafted)
        batch = step.build(number, tables, self._cache, self._running.adapters, read_by_drafter=read)
        for sequence, duplicates in step.duplicates:
            first, pages = duplicates
            tables.write_pages(sequence.sequence_index, first, sequence.pages[first : first + len(pages)])
            self._cache.replaced(sequence, duplicates)
        if self._cache.kinds:
            self._cache.filled(batch)
        return batch

    def _unfinished(self) -> tuple[list[Sequence], list[Sequence], list[Sequence]]:
        """Return three lists of running sequences: decodes, prompts and followers.

        Decodes: only the KV of the last output token is missing. Prompts: the KV of more tokens is missing. The list
        begins with sequences whose prompt is computed and whose KV is missing for several output tokens (usually forced
        ones), so that they do not wait for real prompts. Followers: they have draft tokens in flight, so only the
        device knows where their next row begins (`Batch.unknown_starts`).
        """
        followers: list[Sequence] = []
        decodes: list[Sequence] = []
        outputs: list[Sequence] = []
        prompts: list[Sequence] = []
        running: Iterable[Sequence] = self._running
        if self._running.stalled:
            running = [sequence for sequence in running if sequence not in self._running.stalled]
        if self._drafting.enabled:
            followers = [each for each in running if each.num_drafted and self._drafting.may_follow(each)]
            running = [sequence for sequence in running if not sequence.num_drafted]
        for sequence in running:
            computed = sequence.num_computed
            lacking = len(sequence.ids) + sequence.num_pending - computed
            if lacking == 1 and computed >= sequence.num_prompt:
                # Otherwise the pending token is the last one, and its KV is not needed.
                if computed + 1 < sequence.max_tokens:
                    decodes.append(sequence)
            elif lacking:
                (outputs if computed >= sequence.num_prompt else prompts).append(sequence)
        num_decoding = len(decodes)
        if self._one_at_a_time or self._one_step_back:
            decodes = [each for each in decodes if not (each.num_pending and self._is_alone(each))]
        return decodes[: self._micro_batch(num_decoding)], outputs + prompts, followers

    def _is_alone(self, sequence: Sequence) -> bool:
        """Return whether the sequence may be in only one step in flight at a time."""
        return self._one_at_a_time or sequence.constraint is not None

    def _micro_batch(self, num_decoding: int) -> int:
        """Return the maximum number of decode rows in a step.

        Pipeline parallelism divides the decode rows evenly among the micro-batches.
        """
        share = -(-num_decoding // self._plan.micro_batches)
        return min(share, self._plan.max_micro_batch or share)

    def _add_decodes(self, step: StepRows, decodes: list[Sequence]) -> None:
        size = self._cache.page_size
        at_page_end = [sequence for sequence in decodes if sequence.num_computed % size == 0]
        while len(at_page_end) > self._cache.num_available and self.retraction.retract_one():
            step.retracted = True
            decodes = [sequence for sequence in decodes if sequence.sequence_index >= 0]
            at_page_end = [sequence for sequence in at_page_end if sequence.sequence_index >= 0]
        if at_page_end:
            self._running.tables.append_pages(at_page_end, self._cache.allocate(len(at_page_end)))
        if self._drafting.enabled and (proposed := self._drafting.propose(decodes)):
            decodes = [sequence for sequence in decodes if sequence not in proposed]
            self._drafting.branch(proposed)
            step.add_drafts(proposed)
        step.add_decodes(decodes)

    def _may_add_followers(self, step: StepRows) -> bool:
        """Return whether sequences with draft tokens in flight get a row in this step.

        Without a draft model, such a row has no draft tokens of its own. A step with only such rows does not pay: the
        sequences gain more by waiting for the result, after which they can have draft tokens again.
        """
        if not step:
            return self._drafting.by_model
        return bool(step.num_decodes) or self._plan.mixed

    def _add_followers(self, step: StepRows, followers: list[Sequence]) -> None:
        """Add a row for each sequence in `followers`, which have draft tokens in flight.

        If a draft model runs, it may propose further tokens for the row.
        """
        found = []
        for sequence in followers:
            # A sequence without an index was retracted after `followers` was built, to free pages for another row.
            if step.full or sequence.sequence_index < 0:
                continue
            end = sequence.num_computed + 1
            if self._drafting.extend(sequence, end) == end:
                found.append(sequence)
        if self._drafting.by_model and (proposed := self._drafting.propose(found, step.num_drafted)):
            found = [sequence for sequence in found if sequence not in proposed]
            step.add_drafts(proposed, starts_known=False)
        step.add_decodes(found, starts_known=False)

    def _add_prompts(self, step: StepRows, prompts: list[Sequence]) -> None:
        """Continue partly computed prompts, then admit waiting sequences, within the budgets and the free pages."""
        if not prompts and not self._waiting:
            return
        limit = self.prompt_limits[step.num_decodes > 0]
        num_decoding = step.num_decodes + step.num_drafted
        scored_limit = self.scored_limits[step.num_decodes > 0]
        hard_limit = self.mixed_limit if num_decoding else None
        budget = PromptBudget(self._plan, self._cache.page_size, num_decoding, limit, scored_limit, hard_limit)
        for sequence in prompts:
            if sequence.sequence_index < 0 or budget.exhausted or step.full:
                continue
            count = self._affordable(sequence, sequence.num_computed, budget)
            if count:
                self._compute(step, sequence, count, budget)
            if sequence.num_computed < len(sequence.ids):
                step.unfinished.append(sequence)
        if not step.retracted:
            self._admit(step, budget)

    def _unblock(self, step: StepRows, prompts: list[Sequence]) -> None:
        """Add prompt rows to a step without rows.

        Retracts sequences if necessary, so that at least one sequence advances.
        """
        if step.retracted:
            self._add_prompts(step, prompts)
        if any(sequence.num_pending for sequence in self._running):
            return  # wait instead of retracting: a sequence with a pending token may end and free its pages
        while prompts and not step and self.retraction.retract_one():
            step.retracted = True
            self._add_prompts(step, prompts)

    def _affordable(self, sequence: Sequence, start: int, budget: PromptBudget) -> int:
        """Return for how many known tokens from position `start` on the budget and the free pages suffice."""
        count = budget.grant(start, len(sequence.ids))
        num_pages = len(sequence.pages) + self._cache.num_available
        count = max(min(count, num_pages * self._cache.page_size - start), 0)
        if count and sequence.request.logprobs is not None:
            count = budget.grant_scored(sequence, start, count)
        for kind in self._cache.kinds:
            count = kind.row_end(sequence, start + count) - start
        if count and sequence.media is not None and sequence.media.mutual:
            return self._with_whole_spans(sequence, start, count)
        return count

    def _with_whole_spans(self, sequence: Sequence, start: int, count: int) -> int:
        """Return a number of tokens, at most `count`, that does not cut a span whose tokens attend to each other.

        A span at the beginning of the row is computed as a whole, even if it is longer than the budget.
        """
        end = start + count
        if sequence.media is None or (span := sequence.media.span_around(end)) is None:
            return count
        if span.start > start:
            return span.start - start
        num_pages = len(sequence.pages) + self._cache.num_available
        return span.end - start if span.end <= num_pages * self._cache.page_size else 0

    def _compute(self, step: StepRows, sequence: Sequence, count: int, budget: PromptBudget) -> None:
        self._running.extend(sequence, sequence.num_computed + count)
        if sequence.request.logprobs is not None:
            budget.spend_scored(sequence, sequence.num_computed, count)
        step.add_prompt(sequence, count)
        budget.spend(count)
        duplicates = self._cache.insert(sequence)  # before later rows are added, so that they can share these pages
        if duplicates is not None:
            step.duplicates.append((sequence, duplicates))

    def _admit(self, step: StepRows, budget: PromptBudget) -> None:
        running = self._running
        if running.full or not self._waiting or not running.tables.num_free or budget.exhausted:
            return
        size, estimate = self._cache.page_size, self.new_token_ratio
        cache = self._cache
        reserved = cache.demand((sequence, estimate.pages_ahead(sequence, size)) for sequence in running)
        admitted: list[Sequence] = []
        num_deferred = num_without_slot = 0
        running.adapters.begin_admission()
        held = cache.held if self._waiting.allowed is None else NONE_HELD
        for sequence in self._waiting.ordered():
            if step.full or not running.tables.num_free or budget.exhausted or num_deferred >= MAX_DEFERRED:
                break
            if sequence.num_pending:  # just retracted: a step in flight still samples its last token
                num_deferred += 1
                continue
            if held and sequence in held:
                continue
            if not running.adapters.can_enter(sequence):
                num_without_slot += 1
                if num_without_slot == MAX_WITHOUT_SLOT:
                    break
                continue
            self._cache.lock(sequence)
            start = cache.num_restorable(sequence)
            if start == sequence.num_computed and self._is_being_computed(sequence, step.unfinished):
                self._cache.release(sequence, keep=False)
                num_deferred += 1
                continue
            needed = cache.demand([(sequence, estimate.pages_at_first(sequence, size))])
            fits = not running or cache.can_allocate(reserved, needed)
            count = self._affordable(sequence, start, budget) if fits else 0
            if not count:
                running.full = not fits
                self._cache.release(sequence, keep=False)
                # The prompt has too many log-probabilities for this step.
                if fits and budget.grant(start, len(sequence.ids)):
                    num_deferred += 1
                    continue
                break
            self._start(step, sequence, count, budget)
            admitted.append(sequence)
            more = cache.demand([(sequence, estimate.pages_ahead(sequence, size))])
            reserved = [pages + added for pages, added in zip(reserved, more, strict=True)]
            if len(admitted) == self._plan.max_new_sequences:
                break
        for sequence in admitted:
            self._waiting.remove(sequence)

    def _start(self, step: StepRows, sequence: Sequence, count: int, budget: PromptBudget) -> None:
        """Start a waiting sequence and add its first row."""
        num_cached = sequence.num_shared
        self._cache.restore(sequence)
        if sequence.num_cached < 0:
            num_cached = sequence.num_cached = sequence.num_computed
        step.num_new += 1
        step.num_cached_tokens += num_cached
        if sequence.num_retracted:
            self.num_recomputed += max(0, sequence.num_retracted - sequence.num_computed)
            sequence.num_retracted = 0
        self._running.enter(sequence)
        self._compute(step, sequence, count, budget)
        if sequence.num_computed < len(sequence.ids):
            step.unfinished.append(sequence)

    def _is_being_computed(self, sequence: Sequence, unfinished: list[Sequence]) -> bool:
        """Return whether an unfinished prompt computes the page that this sequence needs next.

        The prompt must share the same cached prefix and begin its own pages at the same position.
        """
        start = sequence.num_shared
        end = start + self._cache.page_size
        if end > reusable_tokens(sequence):
            return False
        return any(
            other.locked_node is sequence.locked_node
            and other.locked_node is not None
            and other.num_shared == start
            # One equal page is enough for waiting to pay off, so later pages are not compared.
            and other.keys[start:end] == sequence.keys[start:end]
            for other in unfinished
        )
