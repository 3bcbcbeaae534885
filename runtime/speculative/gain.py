"""Measures whether drafts pay: whether steps with drafts bring more tokens per second than steps without."""

from __future__ import annotations

from dataclasses import dataclass, field

TRIAL = 8  # steps of a kind that are measured at once
FIRST_INTERVAL, LONGEST_INTERVAL = 64, 1024  # steps until the kind that was slower is measured again
KEPT = 0.9  # weight of the earlier steps of a kind in its averages, for each further step
LONGEST = 4.0  # a step counts as at most this multiple of the average time, because other work may delay it


@dataclass(slots=True)
class Rate:
    """Averages of the steps of one kind, in which newer steps count more."""

    tokens: float = 0.0
    seconds: float = 0.0
    weight: float = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """Add a step."""
        if self.weight > 1:
            seconds = min(seconds, LONGEST * self.seconds / self.weight)
        self.tokens = KEPT * self.tokens + tokens
        self.seconds = KEPT * self.seconds + seconds
        self.weight = KEPT * self.weight + 1

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class _Load:
    """The measurements at one load, and the kind of the next steps."""

    drafted: Rate = field(default_factory=Rate)
    plain: Rate = field(default_factory=Rate)
    allows: bool = True  # whether steps may have drafts
    left: int = TRIAL  # steps of this kind until the other kind is measured or the kinds are compared
    is_trial: bool = True  # whether these steps are measured to compare the kinds
    interval: int = FIRST_INTERVAL


class DraftGain:
    """Decides for each load (the number of rows, by powers of two) whether steps may have drafts.

    Trials of `TRIAL` steps measure both kinds in turns; between trials, steps are of the faster kind. If the faster
    kind stays the same, the interval between trials doubles. With drafts, steps that have none because nothing was
    found count as steps without drafts. `min_gain` is the least quotient of the rates with which drafts go on.
    """

    def __init__(self, min_gain: float = 1.0) -> None:
        self._min_gain = min_gain
        self._loads: dict[int, _Load] = {}

    def allows(self, num_rows: int) -> bool:
        """Return whether the next step of this many rows may have drafts."""
        return self._load(num_rows).allows

    def note(self, num_rows: int, *, drafted: bool, num_tokens: int, seconds: float) -> None:
        """Record a step without prompts: whether it had drafts, its new tokens, and its time."""
        load = self._load(num_rows)
        (load.drafted if drafted else load.plain).note(num_tokens, seconds)
        if drafted != load.allows:  # launched before the last change, or without a match
            return
        load.left -= 1
        if load.left > 0:
            return
        if not load.is_trial or not load.plain.weight or not load.drafted.weight:
            load.allows, load.left, load.is_trial = not load.allows, TRIAL, True
            return
        pays = load.drafted.tokens_per_s > self._min_gain * load.plain.tokens_per_s
        # The kind of this trial was the slower one before. If it still is, the next trial is later.
        load.interval = min(2 * load.interval, LONGEST_INTERVAL) if pays != load.allows else FIRST_INTERVAL
        load.allows, load.left, load.is_trial = pays, load.interval, False

    def _load(self, num_rows: int) -> _Load:
        size = num_rows.bit_length()
        if size not in self._loads:
            self._loads[size] = _Load()
        return self._loads[size]
