"""Limits on the prompt tokens of a step, and the number of pages that admission reserves for outputs."""

from __future__ import annotations

from collections.abc import Iterable

from runtime.config.plan import SchedulerPlan
from runtime.sequence import Sequence

RESERVED_OUTPUT_TOKENS = 4096  # pages are reserved for at most this many future output tokens of a sequence
# Default limits on prompt tokens with log-probabilities, in a prefill-only step and in a mixed step. They apply until
# the time of such tokens has been measured.
SCORED_TOKENS: tuple[int, int] = (256, 32)
OPEN_ENDED_WEIGHT = 1 / 16  # weight of the newest output in the moving average of output lengths without max_new_tokens
RETRACTION_STEPS = 20  # after a retraction, pages are reserved for this many more output tokens of each sequence


class PromptBudget:
    """The number of prompt tokens that one step may still compute, limited by `chunk_tokens` and `max_prefill_tokens`.

    With chunked prefill, a prompt is cut at a page boundary to fit both limits, and so that its last chunk has at most
    `last_chunk_tokens`. Without it, the first prompt of a step is always granted, and a later prompt only if it fits.

    `token_limit` never cuts a prompt. Once a step has this number of tokens, it accepts no further prompt, so that the
    first token of each prompt comes sooner. `hard_limit` also cuts prompts. A chunk may always have one page, so that
    prompts always advance. `scored_limit` limits the prompt tokens with log-probabilities, which take longer than other
    tokens.
    """

    __slots__ = ("_chunk", "_last_chunk", "_page_size", "_scored", "_soft_limit", "_step", "_untouched")

    def __init__(
        self,
        plan: SchedulerPlan,
        page_size: int,
        num_decode_rows: int,
        token_limit: int | None = None,
        scored_limit: int = SCORED_TOKENS[0],
        hard_limit: int | None = None,
    ) -> None:
        self._page_size = page_size
        self._soft_limit = token_limit
        self._last_chunk = plan.last_chunk_tokens
        self._chunk: int | None = None
        if plan.chunk_tokens is not None:
            self._chunk = max(plan.chunk_tokens - num_decode_rows, page_size)
            if hard_limit is not None:
                self._chunk = max(min(self._chunk, hard_limit), page_size)
        self._step = max(plan.max_prefill_tokens - num_decode_rows, page_size)
        self._untouched = True
        self._scored = max(scored_limit, page_size)

    @property
    def exhausted(self) -> bool:
        limits = self._step, self._chunk, self._soft_limit
        return any(limit is not None and limit <= 0 for limit in limits)

    def grant(self, start: int, end: int) -> int:
        """Return how many of the positions start .. end - 1 the step may compute. Does not reduce the budget."""
        count = end - start
        if self._chunk is None:
            return count if self._untouched or count <= self._step else 0
        budget = min(self._chunk, self._step)
        if count <= budget:
            last = self._last_chunk
            if last is None or count <= last:
                return count
            return -(-(end - last) // self._page_size) * self._page_size - start
        return max((start + budget) // self._page_size * self._page_size - start, 0)

    def grant_scored(self, sequence: Sequence, start: int, count: int) -> int:
        """Return how many of the `count` tokens from `start` on fit into the budget of tokens with log-probabilities.

        Without chunked prefill, the first prompt of a step is always granted. Any other prompt is granted as a whole or
        not at all.
        """
        num_scored = self._num_scored(sequence, start, count)
        if num_scored <= self._scored:
            return count
        if self._chunk is None:
            return count if self._untouched else 0
        end = start + count - (num_scored - self._scored)
        return max(end // self._page_size * self._page_size - start, 0)

    @staticmethod
    def _num_scored(sequence: Sequence, start: int, count: int) -> int:
        """Return how many of the `count` tokens from position `start` on need log-probabilities."""
        return max(min(start + count, sequence.num_prompt - 1) - max(sequence.next_logprob, start), 0)

    def spend_scored(self, sequence: Sequence, start: int, count: int) -> None:
        self._scored -= self._num_scored(sequence, start, count)

    def spend(self, count: int) -> None:
        self._untouched = False
        self._step -= count
        if self._chunk is not None:
            self._chunk -= count
        if self._soft_limit is not None:
            self._soft_limit -= count


class NewTokenRatio:
    """The output length for which admission reserves pages.

    For a request with max_new_tokens, this length is a share (the ratio) of max_new_tokens. The ratio decays with every
    decode step, because most outputs end early, and a retraction raises it. For a request without max_new_tokens, the
    length is `open_tokens`: initially a value of the plan, then a moving average of the outputs of such requests. The
    length is at least `reserved_tokens` (in the plan), but never more than the number of tokens that may still follow.
    """

    __slots__ = ("_decay", "_initial", "_minimum", "_reserved", "open_tokens", "value")

    def __init__(self, plan: SchedulerPlan) -> None:
        self._initial = plan.new_token_ratio
        self._minimum = plan.min_new_token_ratio
        self._decay = plan.new_token_ratio_decay
        self._reserved = plan.reserved_tokens
        self.value = self._initial
        self.open_tokens = float(plan.open_ended_tokens)

    def pages_ahead(self, sequence: Sequence, page_size: int) -> int:
        """Return how many more pages a running sequence is expected to need."""
        if _is_open_ended(sequence):
            expected = max(self.open_tokens - sequence.num_output, RETRACTION_STEPS, self._reserved)
            return pages_ahead(sequence, 1.0, page_size, int(expected))
        return pages_ahead(sequence, self.value, page_size, least=self._reserved)

    def pages_at_first(self, sequence: Sequence, page_size: int) -> int:
        """Return how many pages must be free or cached to admit a sequence.

        For a request with max_new_tokens, they hold the whole output, up to `RESERVED_OUTPUT_TOKENS`.
        """
        if _is_open_ended(sequence):
            return self.pages_ahead(sequence, page_size)
        return pages_ahead(sequence, 1.0, page_size)

    def note_end(self, sequence: Sequence) -> None:
        """Record the length of an output that ended normally (without an abort)."""
        if _is_open_ended(sequence):
            self.open_tokens += OPEN_ENDED_WEIGHT * (sequence.num_output - self.open_tokens)

    def decay(self) -> None:
        """Lower the ratio. Called for each step with decode rows."""
        self.value = max(self.value - self._decay, self._minimum)

    def decay_by(self, num_steps: int) -> None:
        """Lower the ratio as much as `num_steps` calls of `decay` would."""
        for _ in range(num_steps):
            if self.value == self._minimum:
                break
            self.value = max(self.value - self._decay, self._minimum)

    def reset(self) -> None:
        """Restore the initial ratio. Called when no sequence is left."""
        self.value = self._initial

    def lift(self, running: Iterable[Sequence]) -> None:
        """Raise the expected output length after a retraction.

        The ratio becomes sum(output so far + `RETRACTION_STEPS`) / sum(maximum output) over the running sequences. For
        sequences without max_new_tokens, `open_tokens` becomes at least their mean output so far + `RETRACTION_STEPS`.
        """
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
    """Return whether only the context length limits the output, because the request has no max_new_tokens."""
    return sequence.sampling.max_new_tokens is None


def pages_ahead(
    sequence: Sequence, ratio: float, page_size: int, max_output: int = RESERVED_OUTPUT_TOKENS, *, least: int = 0
) -> int:
    """Return how many pages a sequence lacks for its known and pending tokens and for `ratio` of its remaining output.

    The remaining output counts as at least `least` tokens, but never as more tokens than may still follow.
    """
    known = len(sequence.ids) + sequence.num_pending
    output = min(sequence.max_tokens - known, max_output, RESERVED_OUTPUT_TOKENS)
    tokens = known + max(int(output * ratio), min(least, output))
    return max(-(-tokens // page_size) - len(sequence.pages), 0)
