"""Builds the batch of the next step.

There is no prefill or decode phase: every row computes tokens of its sequence that are not computed yet. There are two
kinds of rows, which differ only in their limits. *Decode rows* compute one output token and need at most one page. They
get their pages first, if necessary by retracting a sequence. *Prompt rows* compute as many known tokens as the budgets
and the free pages allow.

At least one running sequence always has enough pages to continue. Admission reserves pages for all known tokens of all
running sequences, so prompts lack pages only after outputs have used them. The prompts then wait until outputs end and
free pages. If outputs lack pages too, a sequence is retracted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from runtime.batch import UNKNOWN, Batch, Branches, Drafts, Ints, MediaSpan, PromptLogprobs, StepStats
from runtime.config.plan import SchedulerPlan
from runtime.constraint import DraftData
from runtime.kv_cache.prefix_cache import NONE_HELD, Duplicates, PrefixCache, reusable_tokens
from runtime.media_source import PromptMedia
from runtime.scheduler.adapter_slots import AdapterSlots
from runtime.scheduler.branches import Branch, page_copies
from runtime.scheduler.budget import SCORED_TOKENS, NewTokenRatio, PromptBudget
from runtime.scheduler.drafting import Drafting
from runtime.scheduler.fast_forward import FastForward
from runtime.scheduler.queue import WaitingQueue
from runtime.scheduler.request_tables import RequestTables, Running
from runtime.sequence import Sequence
from runtime.speculative.model_drafts import DRAFT

NO_BRANCHES: Mapping[Sequence, list[Branch]] = MappingProxyType({})
MAX_DEFERRED = 16  # waiting sequences that one step may look up and defer
MAX_WITHOUT_SLOT = 256  # waiting sequences that one step may skip because their adapters have no slot


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
        self.num_retracted = 0  # retractions since the start
        self.num_recomputed = 0  # tokens recomputed after retractions, since the start
        # Limits on prompt tokens: in a prefill-only step, and in a mixed step. None: only the plan limits them.
        self.prompt_limits: tuple[int | None, int | None] = (None, None)
        # Maximum number of prompt tokens of a mixed step. It cuts prompts. None: no limit.
        self.mixed_limit: int | None = None
        # Limits on prompt tokens with log-probabilities: in a prefill-only step, and in a mixed step.
        self.scored_limits: tuple[int, int] = SCORED_TOKENS
        self._plan = plan
        self._cache = cache
        self._running = running
        self._waiting = waiting
        self._fast_forward = fast_forward
        self._drafting = drafting
        # With pipeline parallelism, a sequence is in one micro-batch at a time, so micro-batches are independent.
        self._one_at_a_time = plan.micro_batches > 1
        # A constrained sequence is also in one step at a time if a cache kind can rewind only one token.
        self._one_step_back = any(kind.steps_back == 1 for kind in cache.kinds)

    def build(self, number: int) -> Batch | None:
        """Build batch `number` and allocate its pages. Return None if no row can be computed."""
        self._cache.begin_step()
        if self._waiting and self._waiting.allowed is None:
            if self._plan.priorities:
                self._preempt()
            self._share()
        if self._running.stalled:
            self._running.resume()
        self._fast_forward.append()
        decodes, prompts, followers = self._unfinished()
        step = _StepRows(self._plan.max_micro_batch, self._plan.max_forced)
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
        batch = step.build(number, tables, self._cache, self._running.adapters)
        # Freed after `build`, so that no row of this batch gets these pages.
        if branch_pages := step.branch_pages:
            self._cache.free(branch_pages)
        for sequence, duplicates in step.duplicates:
            first, pages = duplicates
            tables.write_pages(sequence.sequence_index, first, sequence.pages[first : first + len(pages)])
            self._cache.replaced(sequence, duplicates)
        if self._cache.kinds:
            self._cache.filled(batch)
        return batch

    def _preempt(self) -> None:
        """Retract running sequences if the most urgent waiting sequence does not fit.

        A sequence may be retracted only if its urgency is lower by more than `preemption_threshold`. The least urgent
        sequences are retracted first, and among equally urgent sequences the newest.
        """
        first = next(iter(self._waiting.ordered()), None)
        if first is None or first.num_pending or first in self._cache.held:
            return
        limit = first.urgency - self._plan.preemption_threshold
        victims = [sequence for sequence in reversed(list(self._running)) if sequence.urgency < limit]
        self._make_room(first, sorted(victims, key=lambda sequence: sequence.urgency))

    def _share(self) -> None:
        """Retract sequences of the owners (clients) with the largest shares, if an owner with a smaller share waits.

        Sequences are retracted only if no further row fits. An owner keeps at least the share that the waiting owner
        then has, so that two owners never retract each other's sequences in turn. The newest sequences are retracted
        first.
        """
        running = self._running
        if not running.full and running.tables.num_free:
            return
        if not self._waiting.is_owed_row:
            return
        first = next(iter(self._waiting.ordered()), None)
        if first is None or first.num_pending or first in self._cache.held:
            return
        running.adapters.begin_admission()
        if not running.adapters.can_enter(first):  # another waiting sequence would get the free row
            return
        owners, counts, victims = running.owners, Counter(running.owners.counts), []
        for sequence in reversed(list(running)):
            owner = sequence.request.owner
            if sequence.urgency <= first.urgency and owners.yields(owner, first.request.owner, counts):
                victims.append(sequence)
                counts[owner] -= 1
        victims.sort(key=lambda sequence: owners.of(sequence.request.owner), reverse=True)
        self._make_room(first, victims)

    def _make_room(self, first: Sequence, victims: list[Sequence]) -> None:
        """Retract `victims` in order until the waiting sequence `first` fits.

        If the pages and rows of all victims would not be enough, none is retracted.
        """
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

    def _unfinished(self) -> tuple[list[Sequence], list[Sequence], list[Sequence]]:
        """Return three lists of running sequences: decodes, prompts and followers.

        Decodes lack only the KV of their last output token. Prompts lack the KV of more tokens. The list of prompts
        begins with sequences whose prompt is computed and which lack the KV of several output tokens (usually forced
        ones), so that these do not wait for real prompts. Followers have draft tokens in flight, so only the device
        knows where their next row begins (`Batch.unknown_starts`).
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
                if computed + 1 < sequence.max_tokens:  # otherwise the pending token is the last one and needs no KV
                    decodes.append(sequence)
            elif lacking:
                (outputs if computed >= sequence.num_prompt else prompts).append(sequence)
        num_decoding = len(decodes)
        if self._one_at_a_time or self._one_step_back:
            decodes = [each for each in decodes if not (each.num_pending and self._is_alone(each))]
        return decodes[: self._micro_batch(num_decoding)], outputs + prompts, followers

    def _is_alone(self, sequence: Sequence) -> bool:
        """Return whether the sequence may be in one step at a time only."""
        return self._one_at_a_time or sequence.constraint is not None

    def _micro_batch(self, num_decoding: int) -> int:
        """Return the maximum number of decode rows in a step.

        Pipeline parallelism divides the decode rows evenly among the micro-batches.
        """
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
        if self._drafting.enabled and (proposed := self._drafting.propose(decodes)):
            decodes = [sequence for sequence in decodes if sequence not in proposed]
            step.add_drafts(proposed, branches=self._drafting.branch(proposed))
        step.add_decodes(decodes)

    def _may_add_followers(self, step: _StepRows) -> bool:
        """Return whether sequences with draft tokens in flight get a row in this step.

        Without a draft model, these rows have no draft tokens. A step of only such rows would cost more than it gains:
        if the sequences wait for the result, their next rows may have draft tokens again.
        """
        if not step:
            return self._drafting.by_model
        return bool(step.num_decodes) or self._plan.mixed

    def _add_followers(self, step: _StepRows, followers: list[Sequence]) -> None:
        """Add a row for each of these sequences with draft tokens in flight.

        A draft model may propose further tokens for the row.
        """
        found = []
        for sequence in followers:
            if step.full or sequence.sequence_index < 0:  # retracted to free pages for another row
                continue
            end = sequence.num_computed + 1
            if self._drafting.extend(sequence, end) == end:
                found.append(sequence)
        if self._drafting.by_model and (proposed := self._drafting.propose(found, step.num_drafted)):
            found = [sequence for sequence in found if sequence not in proposed]
            step.add_drafts(proposed, starts_known=False)
        step.add_decodes(found, starts_known=False)

    def _retract_one(self) -> bool:
        """Retract one running sequence to the head of its owner's queue. Return False if fewer than two sequences run.

        The sequence with the lowest urgency is retracted. Ties are broken by the owner with the largest share,
        then by the fewest output tokens, the longest prompt and the latest admission. A sequence that runs alone always
        has enough pages.
        """
        if len(self._running) < 2:
            return False
        victim = min(
            reversed(list(self._running)),
            key=lambda sequence: (
                sequence.urgency,
                -self._running.owners.of(sequence.request.owner),
                sequence.num_output,
                -sequence.num_prompt,
            ),
        )
        self._retract(victim)
        self.new_token_ratio.lift(self._running)
        return True

    def _retract(self, victim: Sequence) -> None:
        self._waiting.put_back(victim)  # first, so that an exception does not lose the sequence
        victim.num_retracted = victim.num_computed
        self._cache.swap_out(victim)
        self._running.leave(victim)
        self.num_retracted += 1

    def _add_prompts(self, step: _StepRows, prompts: list[Sequence]) -> None:
        """Continue cut prompts, then admit waiting sequences, within the budgets and the free pages."""
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

    def _unblock(self, step: _StepRows, prompts: list[Sequence]) -> None:
        """Add prompt rows to an empty step, after retractions if necessary, so that the engine never stands still."""
        if step.retracted:
            self._add_prompts(step, prompts)
        if any(sequence.num_pending for sequence in self._running):
            return  # no retraction yet: a sequence with a pending token may end and free its pages
        while prompts and not step and self._retract_one():
            step.retracted = True
            self._add_prompts(step, prompts)

    def _affordable(self, sequence: Sequence, start: int, budget: PromptBudget) -> int:
        """Return how many known tokens, beginning at position `start`, the budget and the free pages allow."""
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
        """Return a number of tokens that does not end within a span whose tokens attend to each other.

        A span at the beginning of the row is computed as a whole, even if it exceeds the budget.
        """
        end = start + count
        if sequence.media is None or (span := sequence.media.span_around(end)) is None:
            return count
        if span.start > start:
            return span.start - start
        num_pages = len(sequence.pages) + self._cache.num_available
        return span.end - start if span.end <= num_pages * self._cache.page_size else 0

    def _compute(self, step: _StepRows, sequence: Sequence, count: int, budget: PromptBudget) -> None:
        self._running.extend(sequence, sequence.num_computed + count)
        if sequence.request.logprobs is not None:
            budget.spend_scored(sequence, sequence.num_computed, count)
        step.add_prompt(sequence, count)
        budget.spend(count)
        duplicates = self._cache.insert(sequence)  # now, so that later rows of this step can share the pages
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
        num_deferred = num_without_slot = 0
        running.adapters.begin_admission()
        held = cache.held if self._waiting.allowed is None else NONE_HELD
        for sequence in self._waiting.ordered():
            if step.full or not running.tables.num_free or budget.exhausted or num_deferred >= MAX_DEFERRED:
                break
            if sequence.num_pending:  # just retracted: a step in flight samples its last token
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
                if fits and budget.grant(start, len(sequence.ids)):  # too many log-probabilities for this step
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

    def _start(self, step: _StepRows, sequence: Sequence, count: int, budget: PromptBudget) -> None:
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
        """Return whether another sequence, cut at the same position, will compute this sequence's next page."""
        start = sequence.num_shared
        end = start + self._cache.page_size
        if end > reusable_tokens(sequence):
            return False
        return any(
            other.locked_node is sequence.locked_node
            and other.locked_node is not None
            and other.num_shared == start
            # If the next page is equal, waiting already pays off. Later pages need not be compared.
            and other.keys[start:end] == sequence.keys[start:end]
            for other in unfinished
        )


class _StepRows:
    """The rows of the batch being built.

    Adding a row also updates its sequence: `num_computed`, and `num_pending` if the row samples.
    """

    __slots__ = (
        "_branch_rows",
        "_counts",
        "_draft_data",
        "_drafts",
        "_embedded",
        "_max_forced",
        "_max_rows",
        "_media",
        "_mutual_spans",
        "_prompt_logprobs",
        "_sampled",
        "_sequences",
        "_starts",
        "_token_ids",
        "_unknown_starts",
        "duplicates",
        "num_cached_tokens",
        "num_decodes",
        "num_drafted",
        "num_forced",
        "num_new",
        "num_prompt_tokens",
        "num_scored",
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
        self._drafts: dict[int, int] = {}  # number of proposed tokens, by row
        self._branch_rows: dict[int, tuple[int, Branch]] = {}  # (row of the trunk, branch), by row
        self._draft_data: dict[int, DraftData] = {}  # for rows with a constraint and draft tokens, by row
        self._unknown_starts: list[int] = []  # rows whose first position is known only to the device
        self._embedded: list[int] = []
        self._prompt_logprobs: list[PromptLogprobs] = []
        self._media: list[MediaSpan] = []
        self._mutual_spans: list[tuple[int, int, int]] = []
        self.duplicates: list[tuple[Sequence, Duplicates]] = []
        self.unfinished: list[Sequence] = []  # cut prompts, which continue in the next step
        self.retracted = False
        self.num_new = 0
        self.num_cached_tokens = 0
        self.num_prompt_tokens = 0
        self.num_scored = 0  # number of prompt tokens whose log-probabilities are computed
        self.num_decodes = 0
        self.num_drafted = 0  # number of proposed tokens in all rows
        self.num_forced = 0  # number of rows that compute up to `max_forced` known output tokens

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def full(self) -> bool:
        return self._max_rows is not None and len(self) >= self._max_rows

    @property
    def branch_pages(self) -> list[int]:
        """Pages of all branches."""
        return [page for _, branch in self._branch_rows.values() for page in branch.pages]

    def add_decodes(self, sequences: list[Sequence], *, starts_known: bool = True) -> None:
        """Add a row for each sequence. Each sequence lacks only the KV of its last token, which is known or pending."""
        first = len(self._sequences)
        if not starts_known:
            self._unknown_starts += range(first, first + len(sequences))
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
        self.num_decodes += len(sequences)

    def add_drafts(
        self,
        proposed: Mapping[Sequence, list[int]],
        *,
        starts_known: bool = True,
        branches: Mapping[Sequence, list[Branch]] = NO_BRANCHES,
    ) -> None:
        """Add one row for each sequence. It computes the one token without KV, then the proposed tokens.

        The branches of a sequence follow its row as separate rows.
        """
        for sequence, ids in proposed.items():
            row, start = len(self._sequences), sequence.num_computed
            if not starts_known:
                self._unknown_starts.append(row)
            self._sequences.append(sequence)
            self._starts.append(start)
            self._counts.append(1 + len(ids))
            self._token_ids.append(UNKNOWN if sequence.num_pending else sequence.ids[start])
            self._token_ids += ids
            self._sampled.append(row)
            self._drafts[row] = len(ids)
            constraint = sequence.constraint
            if constraint is not None:
                num_output = start + 1 - sequence.num_prompt
                data = constraint.drafts_after(num_output, sequence.ids, sequence.num_prompt, len(ids))
                if DRAFT not in ids:  # otherwise the worker proposes the tokens
                    data.propose(ids)
                self._draft_data[row] = data
            sequence.num_drafted += len(ids)
            sequence.num_computed = start + 1 + len(ids)
            sequence.num_pending += 1 + len(ids)
            self.num_drafted += len(ids)
            for branch in branches.get(sequence, ()):
                self._add_branch(sequence, row, start, branch)
        self.num_decodes += len(proposed)

    def _add_branch(self, sequence: Sequence, owner: int, start: int, branch: Branch) -> None:
        """Add a branch as a row after the row `owner`, which begins at position `start`."""
        row, count = len(self._sequences), len(branch.ids)
        self._branch_rows[row] = owner, branch
        self._sequences.append(sequence)
        self._starts.append(start + branch.depth)
        self._counts.append(count)
        self._token_ids += branch.ids
        self._sampled.append(row)
        self.num_drafted += count

    def add_prompt(self, sequence: Sequence, count: int) -> None:
        """Add a row that computes the next `count` known tokens.

        If the row ends with the last known token, it also samples or embeds.
        """
        start = sequence.num_computed
        end = start + count
        self._request_prompt_logprobs(sequence, start, end)
        if sequence.media is not None:
            self._add_media(sequence.media, start, end)
        if sequence.request.wants_embedding:
            if end == len(sequence.ids):
                self._embedded.append(len(self._sequences))
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

    def _add_media(self, media: PromptMedia, start: int, end: int) -> None:
        """Add the media vectors of a new row that computes the positions start .. end - 1."""
        row, first = len(self._sequences), len(self._token_ids)
        for span in media.spans:
            low, high = max(span.start, start), min(span.end, end)
            if low < high:
                vectors = span.vectors[low - span.start : high - span.start]
                self._media.append(MediaSpan(first + low - start, vectors))
                if media.mutual:
                    self._mutual_spans.append((row, span.start, span.end))

    def _request_prompt_logprobs(self, sequence: Sequence, start: int, end: int) -> None:
        params = sequence.request.logprobs
        first = max(sequence.next_logprob, start)
        last = min(end, sequence.num_prompt - 1)
        if params is None or first >= last:
            return
        targets = np.array(sequence.ids[first + 1 : last + 1], np.int32)
        offset = len(self._token_ids) + first - start
        self._prompt_logprobs.append(PromptLogprobs(len(self._sequences), offset, targets, params))
        self.num_scored += last - first
        sequence.next_logprob = last

    def build(self, number: int, tables: RequestTables, cache: PrefixCache, adapters: AdapterSlots) -> Batch:
        """Return the batch. It shares no memory with the tables."""
        indices = np.array([sequence.sequence_index for sequence in self._sequences], np.int32)
        starts = np.array(self._starts, np.int32)
        counts = np.array(self._counts, np.int32)
        ends = starts + counts
        width = -(-int(ends.max()) // cache.page_size)
        page_table = tables.pages[indices, :width]
        copies = cache.take_copies()
        if self._branch_rows:
            branches = [
                (self._sequences[owner], self._starts[owner], each) for owner, each in self._branch_rows.values()
            ]
            copies = (*copies, *page_copies(branches, cache.page_size))
            for row, (_, branch) in self._branch_rows.items():
                page_table[row, branch.first_page :] = 0
                page_table[row, branch.first_page : branch.first_page + len(branch.pages)] = branch.pages
        sampling = None
        if self._sampled:
            row_of = np.array(self._sampled, np.int32)
            if len(self._token_ids) == len(counts):  # usually every row has one token; this saves 4 us
                positions, new_positions = row_of, ends.take(row_of)
            else:
                row_of, before_last = self._spread_over_drafts(row_of)
                positions = counts.cumsum(dtype=np.int32)[row_of] - 1 - before_last
                new_positions = ends[row_of] - before_last
            ends_known = not self._unknown_starts
            sampling = tables.sampling.gather(
                positions,
                row_of,
                indices.take(row_of),
                new_positions.astype(np.int64),
                ends_known=ends_known,
                draft_data=self._draft_data,
            )
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
            hidden_rows=self._rows_with("hidden") if tables.num_with_parts else (),
            expert_rows=self._rows_with("experts") if tables.num_with_parts else (),
            embedding_rows=np.array(self._embedded, np.int32) if self._embedded else None,
            row_values=tables.values_of(indices),
            position_offsets=self._position_offsets(starts, counts) if tables.num_with_axes else None,
            media=tuple(self._media),
            mutual_spans=np.array(self._mutual_spans, np.int32) if self._mutual_spans else None,
            kinds={kind.name: kind.step_arrays(self._sequences, starts, counts, page_table) for kind in cache.kinds},
            drafts=self._all_drafts() if self._drafts else None,
            unknown_starts=self._flags(self._unknown_starts) if self._unknown_starts else None,
            copies=copies,
            adapters=adapters.take_placements(),
            stats=StepStats(
                self.num_new,
                self.num_cached_tokens,
                self.num_prompt_tokens,
                self.num_decodes + self.num_forced,
                self.num_scored,
            ),
        )

    def _rows_with(self, name: Literal["hidden", "experts"]) -> tuple[int, ...]:
        """Return the rows whose requests want hidden states or routed experts, as `name` says."""
        rows = ((row, sequence.parts) for row, sequence in enumerate(self._sequences))
        return tuple(row for row, parts in rows if parts is not None and getattr(parts, name) is not None)

    def _all_drafts(self) -> Drafts:
        """Return the rows with draft tokens, and their branches."""
        rows, counts = (np.array([*each], np.int32) for each in (self._drafts, self._drafts.values()))
        if not self._branch_rows:
            return Drafts(rows, counts)
        owners = [owner for owner, _ in self._branch_rows.values()]
        depths = [branch.depth for _, branch in self._branch_rows.values()]
        arrays = (np.array(values, np.int32) for values in ([*self._branch_rows], owners, depths))
        return Drafts(rows, counts, Branches(*arrays))

    def _num_sampled(self, row: int) -> int:
        return self._counts[row] if row in self._branch_rows else 1 + self._drafts.get(row, 0)

    def _position_offsets(self, starts: Ints, counts: Ints) -> Ints | None:
        """Return the position offsets [3, T] of the tokens, or None if all are 0."""
        offsets, first = np.zeros((3, len(self._token_ids)), np.int32), 0
        for sequence, start, count in zip(self._sequences, starts.tolist(), counts.tolist()):
            media = sequence.media
            if media is not None and media.offsets is not None:
                in_prompt = max(min(sequence.num_prompt - start, count), 0)
                offsets[:, first : first + in_prompt] = media.offsets[:, start : start + in_prompt]
                offsets[:, first + in_prompt : first + count] = media.delta
            first += count
        return offsets if offsets.any() else None

    def _flags(self, rows: list[int]) -> NDArray[np.bool_]:
        flags = np.zeros(len(self._sequences), np.bool_)
        flags[rows] = True
        return flags

    def _spread_over_drafts(self, rows: Ints) -> tuple[Ints, Ints]:
        """Return two arrays [N] for the N sampled positions: the row, and the distance from the row's last position."""
        if not self._drafts:
            return rows, np.zeros_like(rows)
        num_sampled = np.array([self._num_sampled(row) for row in self._sampled], np.int32)
        row_of = np.repeat(rows, num_sampled)
        ends = np.repeat(np.cumsum(num_sampled, dtype=np.int32), num_sampled)
        return row_of, ends - 1 - np.arange(len(row_of), dtype=np.int32)
