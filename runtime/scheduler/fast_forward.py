"""Fast-forward: appends tokens that a grammar forces, without sampling them, and computes them in one row.

If a mask allows only one token, it comes with the run of tokens that the grammar forces from there on
(`HostData.forced`). The scheduler appends the run, and the next step computes it as one row and samples the token after
it. If a step in flight already samples the first token of the run, the result of this step is superseded and ignored.
The run then costs only the superseded step, whatever its length. If no step was in flight, the run costs no step of its
own.

Sampling would choose the same tokens, because the mask allows no others. Like prompt tokens, forced tokens stay known
after late masks, retractions and failed steps.

Fast-forward takes host time for each constrained row. It is used only if the device takes longer than this host time
for a row of a step.
"""

from __future__ import annotations

from collections.abc import Callable

from runtime.config.plan import SchedulerPlan
from runtime.constraint import HostData, SequenceConstraint
from runtime.kv_cache.prefix_cache import PrefixCache
from runtime.scheduler.request_tables import Running
from runtime.sequence import Sequence

# Forced tokens are appended only if a step takes at least this many seconds per row, which is about the host's time for
# a row with forced tokens. Measured on two cores: with 1 ms or more per row, 1 and 8 rows gain 10% to 25%. With 0.3 ms,
# one row loses 5%. With 0.1 ms, 8 and 32 rows lose 25%.
MIN_ROW_S = 0.0005


class FastForward:
    """Appends forced tokens to the running sequences of one scheduler."""

    def __init__(self, plan: SchedulerPlan, cache: PrefixCache, running: Running, vocab_size: int) -> None:
        self.num_saved = 0  # forced tokens that saved a step each, since the start
        self.step_s: float | None = None  # average time of a decode step in seconds; None until one is measured
        # Called with the runs of forced tokens that are about to be appended.
        self.on_runs: Callable[[list[tuple[Sequence, tuple[int, ...]]]], object] | None = None
        self._enabled = plan.max_forced > 0
        self._share = plan.forced_share
        self._max_rows = plan.max_micro_batch
        self._cache = cache
        self._running = running
        self._vocab_size = vocab_size

    @property
    def awaited(self) -> HostData | None:
        """The newest host data that has not arrived yet and may force tokens of a running sequence, or None."""
        if self.pays:
            for sequence, constraint in reversed(self._running.constrained.items()):
                if not constraint.next.is_there and self._is_candidate(sequence):
                    return constraint.next
        return None

    def append(self) -> None:
        """Append forced tokens to the running sequences, if this saves enough steps and enough pages are free."""
        running = self._running
        if not self.pays or (self._max_rows is not None and len(running) > self._max_rows):
            return
        runs = [
            (sequence, self._forced(sequence, constraint))
            for sequence, constraint in running.constrained.items()
            if constraint.next.forced and self._is_candidate(sequence)
        ]
        runs = [(sequence, ids) for sequence, ids in runs if len(ids) > sequence.num_pending]
        num_saved = sum(len(ids) - sequence.num_pending for sequence, ids in runs)
        if not runs or num_saved < self._share * len(running):
            return
        if self.on_runs is not None:
            self.on_runs(runs)
        num_pages = self._cache.num_available - len(running)  # each of the other rows may need a page
        for sequence, ids in runs:
            num_pages -= -(-len(ids) // self._cache.page_size) + 1
            if num_pages < 0:
                return
            self.num_saved += len(ids) - sequence.num_pending
            sequence.ids += ids
            sequence.num_undelivered += len(ids)
            sequence.num_superseded += sequence.num_pending
            sequence.num_pending = 0
            running.tables.sampling.recount(sequence)

    @property
    def pays(self) -> bool:
        """Whether the device takes longer for a row of a step than the host takes to find its forced tokens."""
        return self._enabled and (self.step_s is None or self.step_s >= MIN_ROW_S * len(self._running))

    def _is_candidate(self, sequence: Sequence) -> bool:
        """Return whether forced tokens can be appended now.

        This requires that every token but the last is in a launched step, that at most one sampled token is pending,
        and that the sequence does not wait for host data.
        """
        num_pending = sequence.num_pending
        lacks_one = len(sequence.ids) + num_pending - sequence.num_computed == 1
        return lacks_one and num_pending <= 1 and sequence not in self._running.stalled

    def _forced(self, sequence: Sequence, constraint: SequenceConstraint) -> tuple[int, ...]:
        """Return the next forced tokens, up to the first one that ends the output or cannot be sampled (exclusive).

        The output keeps room for at least one more token: the step that computes the forced tokens samples it.
        """
        ids = constraint.forced_after(len(sequence.ids) - sequence.num_prompt)
        ids = ids[: max(sequence.max_tokens - 1 - len(sequence.ids), 0)]
        for count, token_id in enumerate(ids):
            if token_id >= self._vocab_size or token_id in sequence.stop_ids or token_id in sequence.banned_ids:
                return ids[:count]
        return ids
