"""Measured times and rates of steps, for logs, the watchdog, step sizes and hints to waiting clients."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from runtime.batch import Batch
from runtime.request import Delta
from runtime.scheduler.scheduler import Scheduler

logger = logging.getLogger("penstock.scheduler")

WEIGHT = 0.1  # weight of the newest step in the moving averages
WINDOW_TOKENS = 4096  # after this number of prompt tokens, earlier ones count half in the mean time of a prompt token
RISE = 0.5  # weight of the newest step where the average moves fast: upwards in `_mean`, downwards in `_low_mean`
PATIENCE = 10  # a step counts as hanging after this multiple of its predicted time
LEAST_PATIENCE_S = 5.0  # a step counts as hanging only after at least this time
OVERHEAD = 1 / 20  # the token limit keeps the fixed cost of a prefill step below this share of its time
MIN_PROMPT_TOKENS = 256  # lower bound of the limits on prompt tokens
MIN_SCORED_TOKENS = 16  # lower bound of the limits on prompt tokens with log-probabilities
PAUSE_STEPS = 2  # the prompts of a mixed step delay running streams by at most this many decode steps
TARGET_SHARE = 0.95  # share of the target time for the step itself; the rest is for delivering its tokens


class StepTimes:
    """Predicts the time of a step: the mean time of a decode step, plus a mean time for each prompt token.

    Steps with and without prompt tokens are two kinds. A kind has no prediction until a step of this kind was measured.
    """

    def __init__(self) -> None:
        self._decode_s: float | None = None
        self._prompt_token_s: float | None = None
        self._prompt_s = self._num_prompt = 0.0  # time and number of prompt tokens, where earlier tokens count less
        self._short_decode_s: float | None = None  # time of a decode step, without delays by other work of the machine
        self._short_prompt_token_s: float | None = None
        # Time of one prompt token's log-probabilities, without delays by other work of the machine.
        self._short_scored_s: float | None = None

    def note(self, batch: Batch, seconds: float) -> None:
        """Record the measured time of a step in seconds."""
        tokens, num_scored = batch.stats.num_prompt_tokens, batch.stats.num_scored
        if num_scored:
            rest = seconds - (self._short_decode_s or 0.0) - tokens * (self._short_prompt_token_s or 0.0)
            self._short_scored_s = _low_mean(self._short_scored_s, max(rest, 0.0) / num_scored)
            return
        if not tokens:
            self._decode_s = _mean(self._decode_s, seconds)
            self._short_decode_s = _low_mean(self._short_decode_s, seconds)
            return
        rest = max(seconds - (self._decode_s or 0.0), 0.0)
        self._prompt_token_s = _mean(self._prompt_token_s, rest / tokens)
        kept = 0.5 ** (tokens / WINDOW_TOKENS)
        self._prompt_s, self._num_prompt = self._prompt_s * kept + rest, self._num_prompt * kept + tokens
        rest = max(seconds - (self._short_decode_s or 0.0), 0.0)
        self._short_prompt_token_s = _low_mean(self._short_prompt_token_s, rest / tokens)

    def note_decodes(self, times_s: Iterable[float]) -> None:
        """Record the measured times in seconds of several decode steps, as `note` does for one step."""
        decode_s, short_s = self._decode_s, self._short_decode_s
        for seconds in times_s:
            if decode_s is None or short_s is None:
                decode_s, short_s = _mean(decode_s, seconds), _low_mean(short_s, seconds)
            else:  # the same formula as `_mean`, inlined: 0.1 us instead of 0.3 us
                decode_s += (RISE if seconds > decode_s else WEIGHT) * (seconds - decode_s)
                short_s += (RISE if seconds < short_s else WEIGHT / 4) * (seconds - short_s)
        self._decode_s, self._short_decode_s = decode_s, short_s

    @property
    def decode_s(self) -> float | None:
        """Average time of a decode step in seconds, or None before one is measured."""
        return self._decode_s

    @property
    def prompt_token_s(self) -> float | None:
        """Average time in seconds that a prompt token adds to a step, or None before such a step is measured."""
        return self._prompt_token_s

    @property
    def mean_prompt_token_s(self) -> float | None:
        """Like `prompt_token_s`, but weighted by the number of prompt tokens of each step.

        Steps have a fixed cost, so a token of a short step takes much longer than one of a long step. After short
        prompts, `prompt_token_s` is therefore too high for long ones. If fewer than `MIN_PROMPT_TOKENS` tokens were
        measured, their time is mostly fixed cost, and it is divided by `MIN_PROMPT_TOKENS`.
        """
        return self._prompt_s / max(self._num_prompt, MIN_PROMPT_TOKENS) if self._num_prompt else None

    def predicted_s(self, batch: Batch) -> float | None:
        """Predict the time of this step in seconds. None if no step of its kind has been measured."""
        tokens = batch.stats.num_prompt_tokens
        if tokens and self._prompt_token_s is None:
            return None
        if not tokens and self._decode_s is None:
            return None
        scored_s = batch.stats.num_scored * (self._short_scored_s or 0.0)
        return (self._decode_s or 0.0) + tokens * (self._prompt_token_s or 0.0) + scored_s

    @property
    def prompt_limits(self) -> tuple[int, int] | None:
        """Limits on prompt tokens: in a prefill-only step, and in a mixed step. None before steps are measured.

        In a prefill-only step, the limit is just high enough to make the step's fixed cost a small share of its time.
        With a higher limit, the first tokens of all prompts would only come later. In a mixed step the limit is lower:
        it delays running streams by at most `PAUSE_STEPS` decode steps.
        """
        if not self._short_decode_s or not self._short_prompt_token_s:
            return None
        # Number of prompt tokens that take as long as one decode step.
        step_tokens = self._short_decode_s / self._short_prompt_token_s
        prefill = max(MIN_PROMPT_TOKENS, int(step_tokens / OVERHEAD))
        return prefill, min(prefill, max(MIN_PROMPT_TOKENS, int(step_tokens * PAUSE_STEPS)))

    def tokens_within(self, target_s: float) -> int | None:
        """Return how many prompt tokens a mixed step may have so that streams get a token about every `target_s`.

        Returns None before steps are measured. The averages rise fast and fall slowly, so most steps take less time
        than `target_s`.
        """
        if self._decode_s is None or not self._prompt_token_s:
            return None
        return max(0, int((TARGET_SHARE * target_s - self._decode_s) / self._prompt_token_s))

    @property
    def scored_limits(self) -> tuple[int, int] | None:
        """Limits on prompt tokens with log-probabilities, like `prompt_limits`. None before steps are measured."""
        if not self._short_decode_s or not self._short_scored_s:
            return None
        step_tokens = self._short_decode_s / self._short_scored_s
        return (
            max(MIN_SCORED_TOKENS, int(step_tokens / OVERHEAD)),
            max(MIN_SCORED_TOKENS, int(step_tokens * PAUSE_STEPS)),
        )

    def patience_s(self, batch: Batch, longest_s: float) -> float:
        """Seconds after which this step counts as hanging, or `longest_s` if its time cannot be predicted."""
        predicted_s = self.predicted_s(batch)
        if predicted_s is None:
            return longest_s
        return max(LEAST_PATIENCE_S, PATIENCE * predicted_s)


def _mean(before: float | None, newest: float) -> float:
    """Return the updated average.

    The average rises fast and falls slowly, because the watchdog's false alarms are worse than late ones.
    """
    if before is None:
        return newest
    return before + (RISE if newest > before else WEIGHT) * (newest - before)


def _low_mean(before: float | None, newest: float) -> float:
    """Return the updated average. It falls fast and rises slowly, because long times include delays by other work."""
    if before is None:
        return newest
    return before + (RISE if newest < before else WEIGHT / 4) * (newest - before)


class Progress:
    """Counts and rates of a replica's steps, for the logs and the watchdog."""

    def __init__(self, scheduler: Scheduler, log_interval_steps: int) -> None:
        self.num_steps = 0
        self.num_generated = 0  # output tokens of all requests
        self.gen_throughput = 0.0  # tokens per second over the last log interval
        self.last_step_s = time.monotonic()
        # Seconds for which running sequences waited for the launch of the oldest step in flight.
        self._late_s = 0.0
        self.queue = QueueRate()
        self.times = StepTimes()
        self.on_step: Callable[[Batch, float, int], object] | None = None  # called with (batch, seconds, new tokens)
        self._scheduler = scheduler
        self._interval = log_interval_steps
        self._interval_began_s = time.monotonic()
        self._num_generated_before = 0  # value of `num_generated` at the start of the log interval
        self._num_decode_steps = 0

    def note_first_launch(self, batch: Batch) -> None:
        """Record the launch of a step while no step is in flight. Call it before `note_launch`.

        The device was idle since the last step ended. If the batch has no new sequences, its sequences waited
        meanwhile, for example for the verification of draft tokens.
        """
        now_s = time.monotonic()
        self._late_s = 0.0 if batch.stats.num_new else now_s - self.last_step_s
        self.last_step_s = now_s

    def note_launch(self, batch: Batch) -> None:
        """Record a launched step, and log its prompt tokens."""
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

    def note_applied(self, batch: Batch, deltas: list[Delta]) -> tuple[float, float, int]:
        """Record an applied step. Return its time in seconds, its delay and the number of output tokens that it added.

        A step begins at its launch or at the end of the previous step, whichever is later. The delay is the time in
        seconds for which running sequences waited for the launch.
        """
        num_tokens = sum([len(delta.ids) for delta in deltas])
        self.num_steps += 1
        self.num_generated += num_tokens
        before_s, self.last_step_s = self.last_step_s, time.monotonic()
        late_s, self._late_s = self._late_s, 0.0
        self.times.note(batch, self.last_step_s - before_s)
        if not batch.stats.num_prompt_tokens:
            self._num_decode_steps += 1
            if self._num_decode_steps % self._interval == 0:
                self._log_decode()
        if self.on_step is not None:
            self.on_step(batch, self.last_step_s - before_s, num_tokens)
        return self.last_step_s - before_s, late_s, num_tokens

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
    """Rate at which waiting sequences start to run, per second."""

    WINDOW_S = 5.0

    def __init__(self) -> None:
        self._rate: float | None = None
        self._began_s: float | None = None  # start of the window; None while the queue is empty
        self._num_started = 0

    def note(self, now_s: float, num_started: int, num_waiting: int) -> None:
        """Record a launch: the number of sequences that it started, and the number still waiting."""
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
        """Expected seconds until the last of `num_waiting` sequences starts to run; 0 if the rate is unknown."""
        if not num_waiting or self._rate is None:
            return 0.0
        return num_waiting / max(self._rate, 1e-3)
