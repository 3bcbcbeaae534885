"""What is noted of steps as they go by, for the log, for the watchdog and for what a waiting client is told."""

from __future__ import annotations

import logging
import time

from runtime.batch import Batch
from runtime.request import Delta
from runtime.scheduler.scheduler import Scheduler

logger = logging.getLogger("penstock.scheduler")

WEIGHT = 0.1  # of the newest step in the means
PATIENCE = 10  # times as long as predicted a step may take
LEAST_PATIENCE_S = 5.0
OVERHEAD = 1 / 20  # of a step with prompts, that what every step costs may be
LEAST_ENOUGH_TOKENS = 256
PAUSE_STEPS = 2  # of single tokens, that prompts beside them may take


class StepTimes:
    """Seconds of a step as those of a step of single tokens, and more for each token of a prompt.

    Nothing is predicted before steps of a kind were measured: the first ones may compile something.
    """

    def __init__(self) -> None:
        self._decode_s: float | None = None
        self._prompt_token_s: float | None = None
        self._short_decode_s: float | None = None  # the same where nothing came in between
        self._short_prompt_token_s: float | None = None

    def note(self, batch: Batch, seconds: float) -> None:
        """A step took so long."""
        tokens = batch.stats.num_prompt_tokens
        if not tokens:
            self._decode_s = _mean(self._decode_s, seconds)
            self._short_decode_s = _low_mean(self._short_decode_s, seconds)
            return
        rest = max(seconds - (self._decode_s or 0.0), 0.0)
        self._prompt_token_s = _mean(self._prompt_token_s, rest / tokens)
        rest = max(seconds - (self._short_decode_s or 0.0), 0.0)
        self._short_prompt_token_s = _low_mean(self._short_prompt_token_s, rest / tokens)

    @property
    def decode_s(self) -> float | None:
        """How long a step of single tokens takes; None where that is not known."""
        return self._decode_s

    def predicted_s(self, batch: Batch) -> float | None:
        """How long this step should take; None where that is not known."""
        tokens = batch.stats.num_prompt_tokens
        if tokens and self._prompt_token_s is None:
            return None
        if not tokens and self._decode_s is None:
            return None
        return (self._decode_s or 0.0) + tokens * (self._prompt_token_s or 0.0)

    @property
    def enough_tokens(self) -> tuple[int, int] | None:
        """Of prompts in a step of prompts alone, and in one beside single tokens; None where that is not known.

        Alone: so many that a further step costs little. With more, the first tokens of all would wait for the last
        prompt, and gain nothing. Beside single tokens fewer: streams that have begun wait for no more than some of
        their own steps, each of which they would take anyway.
        """
        if not self._short_decode_s or not self._short_prompt_token_s:
            return None
        step_tokens = self._short_decode_s / self._short_prompt_token_s  # that take as long as single tokens
        alone = max(LEAST_ENOUGH_TOKENS, int(step_tokens / OVERHEAD))
        return alone, min(alone, max(LEAST_ENOUGH_TOKENS, int(step_tokens * PAUSE_STEPS)))

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


def _low_mean(before: float | None, newest: float) -> float:
    """A mean that takes what is shorter soon, and what is longer slowly: that had to wait for something else."""
    if before is None:
        return newest
    return before + (0.5 if newest < before else WEIGHT / 4) * (newest - before)


class Progress:
    """What the logs and the watchdog want to know about the steps."""

    def __init__(self, scheduler: Scheduler, log_interval_steps: int) -> None:
        self.num_steps = 0
        self.num_generated = 0  # tokens of all outputs
        self.gen_throughput = 0.0  # tokens per second over the last log interval
        self.last_step_s = time.monotonic()
        self.queue = QueueRate()
        self.times = StepTimes()
        self._scheduler = scheduler
        self._interval = log_interval_steps
        self._interval_began_s = time.monotonic()
        self._num_generated_before = 0  # at the beginning of the interval
        self._num_decode_steps = 0

    def note_launch(self, batch: Batch) -> None:
        """After every launch."""
        stats = batch.stats
        self.queue.note(time.monotonic(), stats.num_new, self._scheduler.num_waiting)
        if stats.num_prompt_tokens and logger.isEnabledFor(logging.INFO):
            load = self._scheduler.load
            logger.info(
                "Prefill batch. #new-seq: %d, #new-token: %d, #cached-token: %d, token usage: %.2f, "
                "#running-req: %d, #queue-req: %d, ",
                stats.num_new,
                stats.num_prompt_tokens,
                stats.num_cached_tokens,
                load.token_usage,
                load.num_running,
                load.num_waiting,
            )

    def note_applied(self, batch: Batch, deltas: list[Delta]) -> tuple[float, int]:
        """After every applied step, with what it added to the outputs -> the step's seconds and its new tokens.

        A step takes from its launch, or the end of the step before it if that is later, until its result is applied.
        """
        num_tokens = sum([len(delta.ids) for delta in deltas])
        self.num_steps += 1
        self.num_generated += num_tokens
        before_s, self.last_step_s = self.last_step_s, time.monotonic()
        self.times.note(batch, self.last_step_s - before_s)
        if not batch.stats.num_prompt_tokens:
            self._num_decode_steps += 1
            if self._num_decode_steps % self._interval == 0:
                self._log_decode()
        return self.last_step_s - before_s, num_tokens

    def _log_decode(self) -> None:
        seconds = self.last_step_s - self._interval_began_s
        self.gen_throughput = (self.num_generated - self._num_generated_before) / max(seconds, 1e-9)
        self._interval_began_s, self._num_generated_before = self.last_step_s, self.num_generated
        load = self._scheduler.load
        logger.info(
            "Decode batch. #running-req: %d, #token: %d, token usage: %.2f, "
            "gen throughput (token/s): %.2f, #queue-req: %d, ",
            load.num_running,
            load.num_used_tokens,
            load.token_usage,
            self.gen_throughput,
            load.num_waiting,
        )


class QueueRate:
    """How fast the queue moves: sequences that begin to run in a second while others wait."""

    WINDOW_S = 5.0

    def __init__(self) -> None:
        self._rate: float | None = None
        self._began_s: float | None = None  # of the window; None while nobody waits
        self._num_started = 0

    def note(self, now_s: float, num_started: int, num_waiting: int) -> None:
        """After every launch."""
        if self._began_s is None:
            if num_waiting:
                self._began_s, self._num_started = now_s, 0
            return
        self._num_started += num_started
        passed_s = now_s - self._began_s
        if passed_s >= self.WINDOW_S or (not num_waiting and self._num_started and passed_s > 0):
            self._rate = self._num_started / passed_s
            self._began_s, self._num_started = (now_s if num_waiting else None), 0

    def wait_s(self, num_waiting: int) -> float:
        """Until the last of so many runs; 0 where nothing is known yet."""
        if not num_waiting or self._rate is None:
            return 0.0
        return num_waiting / max(self._rate, 1e-3)
