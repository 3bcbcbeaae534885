"""Advances the scheduler by many equal decode steps at once, for simulations.

Consecutive steps are equal if they have the same decode rows, and no sequence starts, ends or is retracted between
them.
"""

from __future__ import annotations

from runtime.config.plan import SchedulerPlan
from runtime.kv_cache.prefix_cache import PrefixCache
from runtime.scheduler.budget import NewTokenRatio
from runtime.scheduler.queue import WaitingQueue
from runtime.scheduler.request_tables import Running
from runtime.sequence import Sequence


class DecodeRuns:
    """Computes how many of the next steps have the same rows, and updates sequences and pages as these steps would."""

    def __init__(
        self, plan: SchedulerPlan, cache: PrefixCache, running: Running, waiting: WaitingQueue, ratio: NewTokenRatio
    ) -> None:
        self._cache = cache
        self._running = running
        self._waiting = waiting
        self._ratio = ratio
        self._priorities = plan.priorities
        self._max_rows = plan.max_micro_batch
        # All other features either change the scheduler's state in every step, or have rows that are not plain decode
        # rows.
        self._possible = (
            plan.micro_batches == 1
            and not plan.max_drafts
            and plan.min_draft_gain is None
            and not cache.kinds
            and cache.tier is None
            and cache.storage is None
        )

    def length(self, num_in_flight: int) -> int:
        """Return a lower bound on the number of equal steps that come next, if no sampled token ends a sequence.

        `num_in_flight` is the number of steps in flight. Each of them must have a row of every running sequence.
        """
        running, cache = self._running, self._cache
        num_rows = len(running)
        if not num_rows or not self._possible or running.constrained or running.stalled or cache.copies:
            return 0
        if self._max_rows is not None and num_rows > self._max_rows:
            return 0
        if self._waiting and not self._admits_none():
            return 0
        # A sequence needs a new page every `page_size` steps. This bound assumes that all sequences need it at the same
        # time.
        longest = cache.num_available // num_rows * cache.page_size
        for sequence in running:
            computed = sequence.num_computed
            if (
                sequence.num_pending != num_in_flight
                or sequence.num_drafted
                or computed < sequence.num_prompt
                or len(sequence.ids) + num_in_flight != computed + 1
            ):
                return 0
            longest = min(longest, sequence.max_tokens - max(computed, len(sequence.ids)) - 1)
        return longest

    def _admits_none(self) -> bool:
        """Return whether no waiting sequence can start or displace a running sequence until a running sequence ends."""
        running, waiting = self._running, self._waiting
        if waiting.allowed is not None or self._priorities:
            return False
        if waiting.is_owed_row:
            return False
        return running.full or not running.tables.num_free

    def advance(self, num_steps: int, token_id: int) -> None:
        """Update sequences, pages and the expected output length as `num_steps` equal steps would.

        Every step samples `token_id` in each row.
        """
        self._append_pages(num_steps)
        tokens = [token_id] * num_steps
        for sequence in self._running:
            sequence.num_computed += num_steps
            sequence.ids += tokens
        self._ratio.decay_by(num_steps)

    def _append_pages(self, num_steps: int) -> None:
        """Allocate the pages of all steps, in the order in which the steps would allocate them one by one."""
        size = self._cache.page_size
        growing: dict[int, list[Sequence]] = {}  # step -> sequences that need a new page in this step
        for sequence in self._running:
            for step in range(-sequence.num_computed % size, num_steps, size):
                growing.setdefault(step, []).append(sequence)
        if not growing:
            return
        sequences: list[Sequence] = []
        pages: list[int] = []
        for step in sorted(growing):
            sequences += growing[step]
            pages += self._cache.allocate(len(growing[step]))
        self._running.tables.append_pages(sequences, pages)
