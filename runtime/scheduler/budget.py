"""How much a step may compute, and how much output admission sets aside."""

from __future__ import annotations

from collections.abc import Iterable

from runtime.config.plan import SchedulePlan
from runtime.sequence import Sequence

RESERVED_OUTPUT_TOKENS = 4096  # a longer remaining output is counted as this much
RETRACTION_STEPS = 20  # after a retraction: steps that every sequence should have ahead of it


class PromptBudget:
    """The prompt tokens that one step may still compute, by chunk and by step.

    With chunking a prompt is cut, at a page boundary, to what is left of both limits. Without it prompts are
    whole: the first of a step is always granted, later ones while they fit.
    """

    __slots__ = ("_chunk", "_page_size", "_step", "_untouched")

    def __init__(self, plan: SchedulePlan, page_size: int, num_decode_rows: int) -> None:
        self._page_size = page_size
        self._chunk: int | None = None
        if plan.chunk_tokens is not None:
            self._chunk = max(plan.chunk_tokens - num_decode_rows, page_size)
        self._step = max(plan.max_prefill_tokens - num_decode_rows, page_size)
        self._untouched = True

    @property
    def exhausted(self) -> bool:
        return self._step <= 0 or (self._chunk is not None and self._chunk <= 0)

    def grant(self, start: int, end: int) -> int:
        """How many of positions start .. end - 1 may be computed; 0 when none. Spends nothing."""
        wanted = end - start
        if self._chunk is None:
            return wanted if self._untouched or wanted <= self._step else 0
        room = min(self._chunk, self._step)
        if wanted <= room:
            return wanted
        return max((start + room) // self._page_size * self._page_size - start, 0)

    def spend(self, count: int) -> None:
        self._untouched = False
        self._step -= count
        if self._chunk is not None:
            self._chunk -= count


class NewTokenRatio:
    """The share of the remaining output for which admission keeps pages free.

    It starts careful and sinks with every decode step, since most outputs end early; a retraction shows that
    it was too low and lifts it.
    """

    __slots__ = ("_decay", "_initial", "_minimum", "value")

    def __init__(self, plan: SchedulePlan) -> None:
        self._initial = plan.new_token_ratio
        self._minimum = plan.min_new_token_ratio
        self._decay = plan.new_token_ratio_decay
        self.value = self._initial

    def decay(self) -> None:
        """One more step without a retraction."""
        self.value = max(self.value - self._decay, self._minimum)

    def reset(self) -> None:
        """Nothing is left to run."""
        self.value = self._initial

    def lift(self, running: Iterable[Sequence]) -> None:
        """After a retraction: what the sequences that stay have produced and soon will, of all they may."""
        produced = allowed = 0
        for sequence in running:
            produced += sequence.num_output + RETRACTION_STEPS
            allowed += sequence.max_tokens - sequence.num_prompt
        if allowed:
            self.value = max(min(produced / allowed, 1.0), self._minimum)


def pages_ahead(sequence: Sequence, ratio: float, page_size: int) -> int:
    """Pages that a sequence still lacks for its known tokens and `ratio` of its remaining output."""
    known = len(sequence.ids) + sequence.num_pending
    output = min(sequence.max_tokens - known, RESERVED_OUTPUT_TOKENS)
    tokens = known + int(output * ratio)
    return max(-(-tokens // page_size) - len(sequence.pages), 0)
