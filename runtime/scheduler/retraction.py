"""Retracts running sequences: for more urgent sequences, for owners with smaller shares, or if pages are missing."""

from __future__ import annotations

from collections import Counter

from runtime.config.plan import SchedulerPlan
from runtime.kv_cache.prefix_cache import PrefixCache
from runtime.scheduler.budget import NewTokenRatio
from runtime.scheduler.queue import WaitingQueue
from runtime.scheduler.request_tables import Running
from runtime.sequence import Sequence


class Retraction:
    """Retracts running sequences: frees their pages and puts them back into the queue. They are recomputed later."""

    def __init__(
        self,
        plan: SchedulerPlan,
        cache: PrefixCache,
        running: Running,
        waiting: WaitingQueue,
        new_token_ratio: NewTokenRatio,
    ) -> None:
        self.num_retracted = 0  # retractions since the start
        self._plan = plan
        self._cache = cache
        self._running = running
        self._waiting = waiting
        self._new_token_ratio = new_token_ratio

    def preempt(self) -> None:
        """Retract running sequences if the most urgent waiting sequence does not fit.

        A running sequence may be retracted if the waiting sequence's urgency is higher by more than
        `preemption_threshold`. Sequences whose adapter occupies the slot that the waiting sequence needs are retracted
        first, then the least urgent ones, and among equally urgent sequences the newest.
        """
        first = next(iter(self._waiting.ordered()), None)
        if first is None or first.num_pending or first in self._cache.held:
            return
        limit = first.urgency - self._plan.preemption_threshold
        victims = [sequence for sequence in reversed(list(self._running)) if sequence.urgency < limit]
        in_slot = self._running.adapters.must_leave(first, victims)
        if in_slot is not None:  # else `first` cannot run, and another waiting sequence would get the free row
            victims.sort(key=lambda sequence: (sequence not in in_slot, sequence.urgency))
            self._make_room(first, victims, at_least=len(in_slot))

    def share(self) -> None:
        """Retract sequences of the owners (clients) with the largest shares, if an owner with a smaller share waits.

        Sequences are retracted only if the waiting sequence does not fit otherwise. After the retraction, an owner
        still has at least the share of the waiting owner, so that two owners never retract each other's sequences in
        turn. The newest sequences are retracted first.
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
        if not running.adapters.can_enter(first):  # another waiting sequence would get the row that becomes free
            return
        owners, counts, victims = running.owners, Counter(running.owners.counts), []
        for sequence in reversed(list(running)):
            owner = sequence.request.owner
            if sequence.urgency <= first.urgency and owners.yields(owner, first.request.owner, counts):
                victims.append(sequence)
                counts[owner] -= 1
        victims.sort(key=lambda sequence: owners.of(sequence.request.owner), reverse=True)
        self._make_room(first, victims)

    def _make_room(self, first: Sequence, victims: list[Sequence], at_least: int = 0) -> None:
        """Retract `victims` in order until the waiting sequence `first` fits, but not fewer than `at_least` of them.

        Retracts none if `first` would not fit even after the retraction of all victims.
        """
        if not victims:
            return
        size, estimate = self._cache.page_size, self._new_token_ratio
        self._cache.lock(first)
        lacking = estimate.pages_at_first(first, size) - self._cache.num_available
        self._cache.release(first, keep=False)
        lacking += sum(estimate.pages_ahead(sequence, size) for sequence in self._running)
        num_rows, chosen = self._running.tables.num_free, []
        for victim in victims:
            if lacking <= 0 and num_rows and len(chosen) >= at_least:
                break
            chosen.append(victim)
            num_rows += 1
            lacking -= len(victim.pages) + estimate.pages_ahead(victim, size)
        if lacking <= 0 and num_rows:
            for victim in chosen:
                self.retract(victim)

    def retract_one(self) -> bool:
        """Retract one running sequence to the head of its owner's queue. Return False if fewer than two sequences run.

        The sequence with the lowest urgency is retracted. Ties are broken by the largest share of the owner, then by
        the fewest output tokens, the longest prompt and the latest admission. The last running sequence is never
        retracted, because it always has enough pages.
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
        self.retract(victim)
        self._new_token_ratio.lift(self._running)
        return True

    def retract(self, victim: Sequence) -> None:
        """Free the row and pages of a running sequence, and put it back into the queue."""
        self._waiting.put_back(victim)  # before the pages are freed, so that an exception does not lose the sequence
        victim.num_retracted = victim.num_computed
        self._cache.swap_out(victim)
        self._running.leave(victim)
        self.num_retracted += 1
