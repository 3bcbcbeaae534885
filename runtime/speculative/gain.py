"""Measures whether draft tokens pay off: whether steps with them yield more tokens per second than plain steps."""

from __future__ import annotations

from dataclasses import dataclass, field

TRIAL = 8  # number of steps of one kind that are measured in a row
FIRST_INTERVAL, LONGEST_INTERVAL = 64, 1024  # number of steps before the slower kind is measured again
KEPT = 0.9  # factor by which each further step of a kind reduces the weight of earlier ones
LONGEST = 4.0  # a step counts as at most this multiple of the average time, because other work may delay it


@dataclass(slots=True)
class Rate:
    """Averages over the steps of one kind. Newer steps have more weight."""

    tokens: float = 0.0
    seconds: float = 0.0
    weight: float = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """Add the tokens and the time of a step."""
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
    allows: bool = True  # whether steps may have draft tokens
    left: int = TRIAL  # number of steps until the other kind is measured or the kinds are compared
    is_trial: bool = True  # whether these steps are measured for a comparison
    interval: int = FIRST_INTERVAL


class DraftGain:
    """Decides for each load whether steps may have draft tokens. Loads are numbers of rows, grouped by powers of two.

    Trials of `TRIAL` steps measure both kinds in turn. Between trials, all steps are of the faster kind. If the faster
    kind stays the same, the interval between trials doubles. Steps that may have draft tokens, but have none because no
    match was found, count as plain steps. Draft tokens are used if their rate exceeds `min_gain` times the rate of
    plain steps.
    """

    def __init__(self, min_gain: float = 1.0) -> None:
        self._min_gain = min_gain
        self._loads: dict[int, _Load] = {}

    def allows(self, num_rows: int) -> bool:
        """Return whether the next step with this number of rows may have draft tokens."""
        return self._load(num_rows).allows

    def note(self, num_rows: int, *, drafted: bool, num_tokens: int, seconds: float) -> None:
        """Record a step without prompts: whether it had draft tokens, its new tokens, and its time in seconds."""
        load = self._load(num_rows)
        (load.drafted if drafted else load.plain).note(num_tokens, seconds)
        if drafted != load.allows:  # launched before the last change, or no match was found
            return
        load.left -= 1
        if load.left > 0:
            return
        if not load.is_trial or not load.plain.weight or not load.drafted.weight:
            load.allows, load.left, load.is_trial = not load.allows, TRIAL, True
            return
        pays = load.drafted.tokens_per_s > self._min_gain * load.plain.tokens_per_s
        # The kind of this trial was the slower one before. If it still is, the next trial comes later.
        load.interval = min(2 * load.interval, LONGEST_INTERVAL) if pays != load.allows else FIRST_INTERVAL
        load.allows, load.left, load.is_trial = pays, load.interval, False

    def _load(self, num_rows: int) -> _Load:
        size = num_rows.bit_length()
        if size not in self._loads:
            self._loads[size] = _Load()
        return self._loads[size]
