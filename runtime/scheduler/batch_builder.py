"""Choosing the rows of the next step.

There is no prefill and no decode phase: a row computes tokens of its sequence that are not computed yet. Two
kinds of rows differ only in how they are limited. *Decode rows* compute one output token and want at most one
page; they are secured first, if need be by retracting somebody. *Prompt rows* compute known tokens, as many
as the budgets and the free pages allow.

Somebody can always go on. Admission sets aside pages for all known tokens of all who run, so prompts lack
pages only while outputs have grown over them, and then those outputs grow further, or end and return their
pages.
"""

from __future__ import annotations

from typing import NamedTuple

from runtime.config.plan import SchedulePlan
from runtime.kv_cache.prefix_cache import Duplicates, PrefixCache, reusable_tokens
from runtime.scheduler.budget import NewTokenRatio, PromptBudget, pages_ahead
from runtime.scheduler.preempt import Retraction
from runtime.scheduler.queue import WaitingQueue
from runtime.scheduler.rows import Rows
from runtime.scheduler.running import Running
from runtime.sequence import Sequence

MAX_DEFERRED = 16  # waiting sequences looked up in one step only to find that they had better wait


class FillCounts(NamedTuple):
    """What the last step was made of, for logs and metrics."""

    num_new: int = 0  # sequences that left the queue
    num_cached_tokens: int = 0  # tokens that these found in the prefix tree
    num_prompt_tokens: int = 0
    num_decode_rows: int = 0


class BatchBuilder:
    """Fills one step after the other; between steps it keeps nothing but the collaborators."""

    def __init__(
        self,
        plan: SchedulePlan,
        cache: PrefixCache,
        running: Running,
        waiting: WaitingQueue,
        ratio: NewTokenRatio,
        retraction: Retraction,
    ) -> None:
        self._plan = plan
        self._cache = cache
        self._running = running
        self._waiting = waiting
        self._ratio = ratio
        self._retraction = retraction

    def fill(self) -> tuple[Rows, FillCounts, list[tuple[Sequence, Duplicates]]]:
        """Choose rows and give them pages. The duplicates are to be returned when the batch is built."""
        decodes, prompts = self._unfinished()
        step = _Step(self._plan.max_micro_batch)
        if self._plan.mixed:
            self._add_decodes(step, decodes)
            self._add_prompts(step, prompts)
        else:
            self._add_prompts(step, prompts)
            if not step.rows:
                self._add_decodes(step, decodes)
        if step.num_decodes:
            self._ratio.decay()
        return step.rows, step.counts(), step.duplicates

    def _unfinished(self) -> tuple[list[Sequence], list[Sequence]]:
        """Running sequences with something to compute: by one output token, and by known tokens."""
        decodes: list[Sequence] = []
        prompts: list[Sequence] = []
        num_decoding = 0
        for sequence in self._running:
            computed = sequence.num_computed
            lacking = len(sequence.ids) + sequence.num_pending - computed
            if lacking == 1 and computed >= sequence.num_prompt:
                if computed + 1 < sequence.max_tokens:  # else its last token is under way
                    num_decoding += 1
                    if self._free_to_decode(sequence):
                        decodes.append(sequence)
            elif lacking:
                prompts.append(sequence)
        return decodes[: self._micro_batch(num_decoding)], prompts

    def _free_to_decode(self, sequence: Sequence) -> bool:
        """In a pipeline only who is in no other micro-batch, so that these need not wait for each other."""
        return self._plan.micro_batches == 1 or not sequence.num_pending

    def _micro_batch(self, num_decoding: int) -> int:
        """How many decode rows a step may have: of a pipeline's micro-batch its even share."""
        share = -(-num_decoding // self._plan.micro_batches)
        return min(share, self._plan.max_micro_batch or share)

    def _add_decodes(self, step: _Step, decodes: list[Sequence]) -> None:
        size = self._cache.page_size
        at_page_end = [sequence for sequence in decodes if sequence.num_computed % size == 0]
        while len(at_page_end) > self._cache.num_available and self._retraction.retract_one():
            step.retracted = True
            decodes = [sequence for sequence in decodes if sequence.slot >= 0]
            at_page_end = [sequence for sequence in at_page_end if sequence.slot >= 0]
        if at_page_end:
            self._running.tables.append_pages(at_page_end, self._cache.allocate(len(at_page_end)))
        step.rows.add_decodes(decodes)
        step.num_decodes = len(decodes)

    def _add_prompts(self, step: _Step, prompts: list[Sequence]) -> None:
        """Continue cut prompts, then admit waiting sequences, while budgets and pages last."""
        budget = PromptBudget(self._plan, self._cache.page_size, step.num_decodes)
        for sequence in prompts:
            if sequence.slot < 0 or budget.exhausted or step.full:
                continue
            count = self._affordable(sequence, budget)
            if count:
                self._compute(step, sequence, count, budget)
            if sequence.num_computed < len(sequence.ids):
                step.unfinished.append(sequence)
        if not step.retracted:
            self._admit(step, budget)

    def _affordable(self, sequence: Sequence, budget: PromptBudget) -> int:
        """How many of the next known tokens both the budget and the free pages allow."""
        start = sequence.num_computed
        count = budget.grant(start, len(sequence.ids))
        held = len(sequence.pages) + self._cache.num_available
        return max(min(count, held * self._cache.page_size - start), 0)

    def _compute(self, step: _Step, sequence: Sequence, count: int, budget: PromptBudget) -> None:
        self._running.extend(sequence, sequence.num_computed + count)
        step.rows.add_prompt(sequence, count)
        step.num_prompt_tokens += count
        budget.spend(count)
        duplicates = self._cache.insert(sequence)  # now: later rows of this very step may use them
        if duplicates is not None:
            step.duplicates.append((sequence, duplicates))

    def _admit(self, step: _Step, budget: PromptBudget) -> None:
        running = self._running
        if running.full or not self._waiting or not running.tables.num_free or budget.exhausted:
            return
        size, ratio = self._cache.page_size, self._ratio.value
        reserved = sum(pages_ahead(sequence, ratio, size) for sequence in running)
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
            fits = not running or pages_ahead(sequence, 1.0, size) <= self._cache.num_available - reserved
            count = self._affordable(sequence, budget) if fits else 0
            if not count:
                running.full = not fits
                self._cache.release(sequence, keep=False)
                break
            self._start(step, sequence, count, budget)
            admitted.append(sequence)
            reserved += pages_ahead(sequence, ratio, size)
        for sequence in admitted:
            self._waiting.remove(sequence)

    def _start(self, step: _Step, sequence: Sequence, count: int, budget: PromptBudget) -> None:
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
        """Whether another sequence, cut at the same place, computes this one's next page in its next step."""
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


class _Step:
    """What belongs to one step only."""

    __slots__ = (
        "duplicates",
        "max_rows",
        "num_cached_tokens",
        "num_decodes",
        "num_new",
        "num_prompt_tokens",
        "retracted",
        "rows",
        "unfinished",
    )

    def __init__(self, max_rows: int | None) -> None:
        self.max_rows = max_rows
        self.rows = Rows()
        self.duplicates: list[tuple[Sequence, Duplicates]] = []
        self.unfinished: list[Sequence] = []  # cut prompts that go on in the next step
        self.retracted = False
        self.num_new = 0
        self.num_cached_tokens = 0
        self.num_prompt_tokens = 0
        self.num_decodes = 0

    @property
    def full(self) -> bool:
        return self.max_rows is not None and len(self.rows) >= self.max_rows

    def counts(self) -> FillCounts:
        return FillCounts(self.num_new, self.num_cached_tokens, self.num_prompt_tokens, self.num_decodes)
