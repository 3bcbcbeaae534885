"""How long a step should take, from how long steps took: what tells a long step from one that hangs."""

from __future__ import annotations

from runtime.batch import Batch

WEIGHT = 0.1  # of the newest step in the means
PATIENCE = 10  # times as long as predicted a step may take
LEAST_PATIENCE_S = 5.0


class StepTimes:
    """Seconds of a step as those of a step of single tokens, and more for each token of a prompt.

    Nothing is predicted before steps of a kind were measured: the first ones may compile something.
    """

    def __init__(self) -> None:
        self._decode_s: float | None = None
        self._prompt_token_s: float | None = None

    def note(self, batch: Batch, seconds: float) -> None:
        """A step took so long."""
        tokens = batch.stats.num_prompt_tokens
        if not tokens:
            self._decode_s = _mean(self._decode_s, seconds)
            return
        rest = max(seconds - (self._decode_s or 0.0), 0.0)
        self._prompt_token_s = _mean(self._prompt_token_s, rest / tokens)

    def predicted_s(self, batch: Batch) -> float | None:
        """How long this step should take; None where that is not known."""
        tokens = batch.stats.num_prompt_tokens
        if tokens and self._prompt_token_s is None:
            return None
        if not tokens and self._decode_s is None:
            return None
        return (self._decode_s or 0.0) + tokens * (self._prompt_token_s or 0.0)

    def patience_s(self, batch: Batch, longest_s: float) -> float:
        """After how long this step counts as hanging; `longest_s` where nothing is known about its kind."""
        predicted_s = self.predicted_s(batch)
        if predicted_s is None:
            return longest_s
        return max(LEAST_PATIENCE_S, PATIENCE * predicted_s)


def _mean(before: float | None, newest: float) -> float:
    """A mean that forgets slowly, and takes what is much longer at once: false alarms are worse than late ones."""
    if before is None or newest > before:
        return newest if before is None else before + max(WEIGHT, 0.5) * (newest - before)
    return before + WEIGHT * (newest - before)
