"""What a step may compute of prompts, and how many pages admission keeps free for outputs."""

from __future__ import annotations

from collections.abc import Iterable

from runtime.config.plan import SchedulerPlan
from runtime.sequence import Sequence

RESERVED_OUTPUT_TOKENS = 4096  # a longer remaining output is counted as this much
OPEN_ENDED_WEIGHT = 1 / 16  # of the newest output in the mean of those that have no limit of their own
RETRACTION_STEPS = 20  # after a retraction: steps that every sequence should have ahead of it


class PromptBudget:
    """The prompt tokens that one step may still compute, by chunk and by step.

    With chunking a prompt is cut, at a page boundary, to what is left of both limits. Without it prompts are
    whole: the first of a step is always granted, later ones while they fit. After `enough_tokens` the step takes no
    further prompt, and cuts none for that: first tokens need not wait for prompts that came later.
    """

    __slots__ = ("_chunk", "_enough", "_page_size", "_step", "_untouched")

    def __init__(
        self, plan: SchedulerPlan, page_size: int, num_decode_rows: int, enough_tokens: int | None = None
    ) -> None:
        self._page_size = page_size
        self._enough = enough_tokens
        self._chunk: int | None = None
        if plan.chunk_tokens is not None:
            self._chunk = max(plan.chunk_tokens - num_decode_rows, page_size)
        self._step = max(plan.max_prefill_tokens - num_decode_rows, page_size)
        self._untouched = True

    @property
    def exhausted(self) -> bool:
        limits = self._step, self._chunk, self._enough
        return any(limit is not None and limit <= 0 for limit in limits)

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
        if self._enough is not None:
            self._enough -= count


class NewTokenRatio:
    """The output for which admission keeps pages free.

    Of a stated limit it is a share, which starts careful and sinks with every decode step, since most outputs end
    early; a retraction shows that it was too low and lifts it. Where a request states no limit, the context is none
    that its sender chose: `open_tokens` are expected, at first as planned, then as outputs of that kind turn out.
    """

    __slots__ = ("_decay", "_initial", "_minimum", "open_tokens", "value")

    def __init__(self, plan: SchedulerPlan) -> None:
        self._initial = plan.new_token_ratio
        self._minimum = plan.min_new_token_ratio
        self._decay = plan.new_token_ratio_decay
        self.value = self._initial
        self.open_tokens = float(plan.open_ended_tokens)

    def pages_ahead(self, sequence: Sequence, page_size: int) -> int:
        """Pages that a running sequence is expected to take yet."""
        if _is_open_ended(sequence):
            expected = max(self.open_tokens - sequence.num_output, RETRACTION_STEPS)
            return pages_ahead(sequence, 1.0, page_size, int(expected))
        return pages_ahead(sequence, self.value, page_size)

    def pages_at_first(self, sequence: Sequence, page_size: int) -> int:
        """Pages that must be free for a sequence to enter: for all that it asks for, if it says how much that is."""
        if _is_open_ended(sequence):
            return self.pages_ahead(sequence, page_size)
        return pages_ahead(sequence, 1.0, page_size)

    def note_end(self, sequence: Sequence) -> None:
        """An output has ended by itself or at its limit."""
        if _is_open_ended(sequence):
            self.open_tokens += OPEN_ENDED_WEIGHT * (sequence.num_output - self.open_tokens)

    def decay(self) -> None:
        """One more step without a retraction."""
        self.value = max(self.value - self._decay, self._minimum)

    def reset(self) -> None:
        """Nothing is left to run."""
        self.value = self._initial

    def lift(self, running: Iterable[Sequence]) -> None:
        """After a retraction: what the sequences that stay have produced and soon will, of all they may."""
        produced = allowed = 0
        running = list(running)
        if open_ended := [sequence.num_output for sequence in running if _is_open_ended(sequence)]:
            so_far = sum(open_ended) / len(open_ended) + RETRACTION_STEPS
            self.open_tokens = max(self.open_tokens, so_far)
        for sequence in running:
            produced += sequence.num_output + RETRACTION_STEPS
            allowed += sequence.max_tokens - sequence.num_prompt
        if allowed:
            self.value = max(min(produced / allowed, 1.0), self._minimum)


def _is_open_ended(sequence: Sequence) -> bool:
    """Whether only the context limits its output."""
    return sequence.sampling.max_new_tokens is None


def pages_ahead(
    sequence: Sequence, ratio: float, page_size: int, most_output: int = RESERVED_OUTPUT_TOKENS
) -> int:
    """Pages that a sequence still lacks for its known tokens and `ratio` of its remaining output."""
    known = len(sequence.ids) + sequence.num_pending
    output = min(sequence.max_tokens - known, most_output, RESERVED_OUTPUT_TOKENS)
    tokens = known + int(output * ratio)
    return max(-(-tokens // page_size) - len(sequence.pages), 0)
