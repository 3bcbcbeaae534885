"""Tokens that a grammar forces are known before they are sampled: they are appended, and computed in one row.

A run of tokens about which nothing is left to choose comes with the mask that allows its first token only
(`HostData.forced`). With steps in flight the first one is being sampled when that is known: the result of that step
brings nothing new, so it is dropped, and the next step computes the whole run as one row, which yields the token
behind it. k tokens take so one step more than none, or, where no step is in flight, none at all.

The tokens are those that would have been sampled: whatever else happens (late masks, retraction, a failed step), they
stay, as the tokens of a prompt do.

Finding them, waiting for them and giving them a row of their own takes the host some time for each constrained row, so
it is done only where a row of a step takes the device longer.
"""

from __future__ import annotations

from runtime.config.plan import SchedulerPlan
from runtime.constraint import HostData, SequenceConstraint
from runtime.kv_cache.prefix_cache import PrefixCache
from runtime.scheduler.request_tables import Running
from runtime.sequence import Sequence

# Of a step's time, for each row that runs: about so long takes the host for one whose tokens are forced. Measured on
# two cores: 1 and 8 rows gain a tenth to a quarter where a row takes 1 ms or more; where it takes 0.3 ms one row loses
# a twentieth, and where it takes 0.1 ms 8 and 32 rows lose a quarter.
LEAST_ROW_S = 0.0005


class FastForward:
    """Appends forced tokens to the running sequences of one scheduler."""

    def __init__(self, plan: SchedulerPlan, cache: PrefixCache, running: Running, vocab_size: int) -> None:
        self.num_saved = 0  # tokens that took no step of their own, since the start
        self.step_s: float | None = None  # what a step of single tokens takes; None: not known yet
        self._enabled = plan.max_forced > 0
        self._share = plan.forced_share
        self._max_rows = plan.max_micro_batch
        self._cache = cache
        self._running = running
        self._vocab_size = vocab_size

    @property
    def awaited(self) -> HostData | None:
        """What is being found out last about running sequences whose next tokens may turn out to be forced."""
        if self.pays:
            for sequence, constraint in reversed(self._running.constrained.items()):
                if not constraint.next.is_there and self._is_candidate(sequence):
                    return constraint.next
        return None

    def append(self) -> None:
        """Append what is known to be forced, where that saves enough and there are pages for it."""
        running = self._running
        if not self.pays or (self._max_rows is not None and len(running) > self._max_rows):
            return
        found = [
            (sequence, self._forced(sequence, constraint))
            for sequence, constraint in running.constrained.items()
            if constraint.next.forced and self._is_candidate(sequence)
        ]
        found = [(sequence, ids) for sequence, ids in found if len(ids) > sequence.num_pending]
        num_saved = sum(len(ids) - sequence.num_pending for sequence, ids in found)
        if not found or num_saved < self._share * len(running):
            return
        room = self._cache.num_available - len(running)  # the other rows may want a page each
        for sequence, ids in found:
            room -= -(-len(ids) // self._cache.page_size) + 1
            if room < 0:
                return
            self.num_saved += len(ids) - sequence.num_pending
            sequence.ids += ids
            sequence.num_unsent += len(ids)
            sequence.num_void += sequence.num_pending
            sequence.num_pending = 0
            running.tables.sampling.recount(sequence)

    @property
    def pays(self) -> bool:
        """Whether a row takes longer in a step than it takes to find out that its tokens are forced."""
        return self._enabled and (self.step_s is None or self.step_s >= LEAST_ROW_S * len(self._running))

    def _is_candidate(self, sequence: Sequence) -> bool:
        """Whether it lacks one token, which is in no more than one step."""
        num_pending = sequence.num_pending
        lacks_one = len(sequence.ids) + num_pending - sequence.num_computed == 1
        return lacks_one and num_pending <= 1 and sequence not in self._running.stalled

    def _forced(self, sequence: Sequence, constraint: SequenceConstraint) -> tuple[int, ...]:
        """The forced tokens that come next, without what ends the output or what the model cannot write.

        One token less than the output may have: the one behind them is sampled in the same step.
        """
        ids = constraint.forced_after(len(sequence.ids) - sequence.num_prompt)
        ids = ids[: max(sequence.max_tokens - 1 - len(sequence.ids), 0)]
        for count, token_id in enumerate(ids):
            if (
                token_id >= self._vocab_size
                or token_id in sequence.stop_ids
                or token_id in sequence.banned_ids
            ):
                return ids[:count]
        return ids
