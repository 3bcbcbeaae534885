"""Measures whether draft tokens pay off: whether steps with them yield more tokens per second than steps without."""

from __future__ import annotations

from dataclasses import dataclass, field

TRIAL = 8  # number of consecutive steps of one kind (with or without draft tokens) in a measurement
# Shortest and longest number of steps until the slower kind is measured again.
FIRST_INTERVAL, LONGEST_INTERVAL = 64, 8192
TRIAL_SHARE = 0.01  # a trial may lose at most this share of the time until the next trial
FADED = 0.25  # when a new trial begins, the weight of the earlier steps of its kind is multiplied by this
KEPT = 0.9  # with each further step of a kind, the weight of all its earlier steps is multiplied by this
LONGEST = 4.0  # other work can delay a step, so it counts as at most this multiple of the average time


@dataclass(slots=True)
class Rate:
    """Averages over the steps of one kind, with more weight on newer steps."""

    tokens: float = 0.0
    seconds: float = 0.0
    weight: float = 0.0
    drafted_rows: float = 0.0  # rows with draft tokens
    accepted: float = 0.0  # accepted draft tokens

    def note(self, tokens: int, seconds: float, drafted_rows: int = 0, accepted: int = 0) -> None:
        """Add the number of new tokens and the time of a step, and what it did with draft tokens."""
        if self.weight > 1:
            seconds = min(seconds, LONGEST * self.seconds / self.weight)
        self.tokens = KEPT * self.tokens + tokens
        self.seconds = KEPT * self.seconds + seconds
        self.weight = KEPT * self.weight + 1
        self.drafted_rows = KEPT * self.drafted_rows + drafted_rows
        self.accepted = KEPT * self.accepted + accepted

    def fade(self) -> None:
        """Reduce the weight of all earlier steps."""
        self.tokens, self.seconds, self.weight = (FADED * each for each in (self.tokens, self.seconds, self.weight))
        self.drafted_rows, self.accepted = FADED * self.drafted_rows, FADED * self.accepted

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def lost_to(self, better: Rate) -> float:
        """Return the time that a trial of this kind loses, as a number of steps of the better kind."""
        if not better.seconds or not better.tokens:
            return 0.0
        steps = (self.seconds / better.seconds - self.tokens / better.tokens) * better.weight / self.weight
        return max(TRIAL * steps, 0.0)


@dataclass(slots=True)
class _Load:
    """The measurements at one load, and the current kind of steps."""

    drafted: Rate = field(default_factory=Rate)
    plain: Rate = field(default_factory=Rate)
    allows: bool = True  # whether steps may have draft tokens
    left: int = TRIAL  # number of steps until the other kind is measured, or until the kinds are compared
    is_trial: bool = True  # whether the current steps are part of a measurement
    interval: int = FIRST_INTERVAL

    @property
    def is_off(self) -> bool:
        """Whether draft tokens did not pay off, and are not tried now."""
        return not self.allows and not self.is_trial


class DraftGain:
    """Decides for each load whether steps may have draft tokens. A load is a number of rows, rounded to a power of two.

    Steps with draft tokens and plain steps (without) are measured in turn, `TRIAL` steps each. Between these trials,
    all steps are of the faster kind. The interval between trials doubles while the faster kind stays the same, and
    returns to `FIRST_INTERVAL` when it changes. If necessary, the interval is longer, so that a trial loses at most
    `TRIAL_SHARE` of it. It is never longer than `LONGEST_INTERVAL`.

    A load begins without draft tokens if they do not pay off at the next smaller known load, because larger steps gain
    less from them. A step for which prompt lookup finds no match has no draft tokens, so it counts as a plain step. A
    step after a step with draft tokens always counts as a step with draft tokens: it is launched only after their
    verification, while other steps are launched before the previous step ends.

    Draft tokens are used if steps with them yield more than `min_gain` times the tokens per second of plain steps.
    """

    def __init__(self, min_gain: float = 1.0) -> None:
        self._min_gain = min_gain
        self._loads: dict[int, _Load] = {}

    def allows(self, num_rows: int) -> bool:
        """Return whether the next step with this number of rows may have draft tokens."""
        return self._load(num_rows).allows

    def measures_plain(self, num_rows: int) -> bool:
        """Return whether steps with this number of rows are a trial of plain steps."""
        load = self._load(num_rows)
        return load.is_trial and not load.allows

    def is_off(self, num_rows: int) -> bool:
        """Return whether a step with this number of rows has no draft tokens, and no other load needs them either."""
        return self._load(num_rows).is_off and not any(
            load.allows and not load.is_trial for load in self._loads.values()
        )

    def cost(self, num_rows: int) -> float | None:
        """Return how many draft tokens a row must accept to be as fast as a plain row, or None if it is not measured.

        This is the number of tokens that plain steps would yield in the additional time of steps with draft tokens.
        """
        load = self._load(num_rows)
        drafted = load.drafted
        if not drafted.drafted_rows or not load.plain.seconds:
            return None
        plain_tokens = self._min_gain * load.plain.tokens_per_s * drafted.seconds
        return (plain_tokens - (drafted.tokens - drafted.accepted)) / drafted.drafted_rows

    def note(
        self,
        num_rows: int,
        *,
        drafted: bool,
        num_tokens: int,
        seconds: float,
        follows: bool = False,
        drafted_rows: int = 0,
        accepted: int = 0,
    ) -> None:
        """Record a step without prompts: whether it had draft tokens, its new tokens, and its time in seconds.

        `follows` says whether the step before it had draft tokens. `drafted_rows` is the number of its rows with draft
        tokens, and `accepted` is the number of accepted draft tokens.
        """
        load = self._load(num_rows)
        if drafted or follows:
            load.drafted.note(num_tokens, seconds, drafted_rows, accepted)
        else:
            load.plain.note(num_tokens, seconds)
        # Do not count a step that was launched before the kind changed, for which prompt lookup found no match, or that
        # draft tokens delayed.
        if drafted != load.allows or (follows and not drafted):
            return
        load.left -= 1
        if load.left > 0:
            return
        if not load.is_trial or not load.plain.weight or not load.drafted.weight:
            load.allows, load.left, load.is_trial = not load.allows, TRIAL, True
            (load.drafted if load.allows else load.plain).fade()
            return
        pays = load.drafted.tokens_per_s > self._min_gain * load.plain.tokens_per_s
        # This trial measured the kind that was slower before. If it is still slower, the next trial comes later.
        load.interval = min(2 * load.interval, LONGEST_INTERVAL) if pays != load.allows else FIRST_INTERVAL
        lost = load.plain.lost_to(load.drafted) if pays else load.drafted.lost_to(load.plain)
        load.interval = min(max(load.interval, int(lost / TRIAL_SHARE)), LONGEST_INTERVAL)
        load.allows, load.left, load.is_trial = pays, load.interval, False

    def _load(self, num_rows: int) -> _Load:
        size = num_rows.bit_length()
        if size not in self._loads:
            smaller = [known for known in self._loads if known < size]
            load = self._loads[size] = _Load()
            if smaller and self._loads[max(smaller)].is_off:
                load.allows, load.is_trial, load.left = False, False, FIRST_INTERVAL
        return self._loads[size]
