"""Observers that log and count requests."""

from __future__ import annotations

import dataclasses
import logging
import time
from io import StringIO
from typing import Any

import orjson

from runtime.actors.live_requests import LiveRequest
from runtime.errors import PenstockError
from runtime.metrics.series import EngineMetrics
from runtime.request import Chunk
from runtime.sampling_params import SamplingParams

logger = logging.getLogger("penstock.requests")

SHORT_CHARS = 2048  # at log level 2, texts are cut to this length
_DEFAULTS = SamplingParams()


class RequestLog:
    """Logs requests. Client data is logged as JSON, so that no text can forge a log line.

    `level` is the value of `--log-requests-level`.
    """

    def __init__(self, level: int) -> None:
        self.level = level
        self._texts: dict[int, dict[int, StringIO]] = {}  # request id -> choice -> text, at level 2 and above

    def began(self, live: LiveRequest) -> None:
        """Log the request."""
        logger.info("Receive: obj=%s", self._request(live))

    def sent(self, live: LiveRequest, chunk: Chunk, now_s: float, before_s: float) -> None:
        """Collect the text for the final log line."""
        if self.level < 2:
            return
        text = self._texts.setdefault(live.request.id, {}).setdefault(chunk.index, StringIO())
        if self.level >= 3 or text.tell() < SHORT_CHARS:
            text.write(chunk.text)

    def ended(self, live: LiveRequest, error: PenstockError | None) -> None:
        """Log the outputs or the error."""
        texts = self._texts.pop(live.request.id, {})
        seconds = round(time.monotonic() - live.times.arrived, 6)
        if error is not None:
            out: dict[str, Any] = {
                "error": type(error).__name__,
                "message": str(error),
                "e2e_latency": seconds,
            }
        else:
            out = {"choices": [self._choice(chunk, texts) for chunk in live.ends], "e2e_latency": seconds}
        logger.info("Finish: obj=%s, out=%s", self._request(live), _json(out))

    def _request(self, live: LiveRequest) -> str:
        request = live.request
        fields: dict[str, Any] = {"rid": request.label}
        if self.level >= 1:
            fields["sampling_params"] = _non_defaults(request.sampling)
        if self.level >= 2:
            if request.text is not None:
                fields["text"] = self._shortened(request.text)
            elif request.ids is not None:
                fields["input_ids"] = list(request.ids if self.level >= 3 else request.ids[:SHORT_CHARS])
        return _json(fields)

    def _choice(self, chunk: Chunk, texts: dict[int, StringIO]) -> dict[str, Any]:
        finish = chunk.finish
        choice: dict[str, Any] = {
            "index": chunk.index,
            "finish_reason": finish.kind if finish else None,
            **chunk.usage._asdict(),
        }
        if self.level >= 2:
            text = texts[chunk.index].getvalue() if chunk.index in texts else ""
            rest = "" if chunk.ids else chunk.text  # `sent` does not get chunks without tokens
            choice["text"] = self._shortened(text + rest)
        return choice

    def _shortened(self, text: str) -> str:
        return text if self.level >= 3 else text[:SHORT_CHARS]


class TimeStatsLog:
    """Logs how long each request waited and ran, when it ends."""

    def began(self, live: LiveRequest) -> None:
        """Do nothing: times are logged when the request ends."""

    def ended(self, live: LiveRequest, error: PenstockError | None) -> None:
        """Log one line. If the request never ran in a step, its whole time counts as waiting."""
        times, now_s = live.times, time.monotonic()
        begun_s = times.scheduled or now_s
        logger.info(
            "Req Time Stats(rid=%s, input len=%d, output len=%d, type=unified): "
            "queue_duration=%.2fms, forward_duration=%.2fms, start_time=%.3f",
            _json(live.request.label),
            max((chunk.usage.prompt for chunk in live.ends), default=len(live.request.ids or ())),
            sum(chunk.usage.output for chunk in live.ends),
            (begun_s - (times.queued or times.arrived)) * 1e3,
            (now_s - begun_s) * 1e3,
            time.time() - (now_s - times.arrived),
        )


def _non_defaults(sampling: SamplingParams) -> dict[str, Any]:
    """Return the sampling parameters that differ from their defaults, by name."""
    values = {field.name: getattr(sampling, field.name) for field in dataclasses.fields(sampling)}
    return {name: value for name, value in values.items() if value != getattr(_DEFAULTS, name)}


def _json(value: Any) -> str:
    return orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


class RequestMetrics:
    """Updates the metrics from the requests."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics

    def began(self, live: LiveRequest) -> None:
        """Do nothing: requests are counted when they end."""

    def sent(self, live: LiveRequest, chunk: Chunk, now_s: float, before_s: float) -> None:
        """Record the time to the first token, or the time between tokens. Takes about 0.4 us."""
        if not live.request.counted:
            return
        series = self._metrics.of_labels(live.request.caller.labels)
        if before_s:
            num_tokens = len(chunk.ids)
            series.between_tokens_s.observe((now_s - before_s) / num_tokens, num_tokens)
        elif not live.times.first_token:  # no choice has sent a token yet
            times = live.times
            series.first_token_s.observe(now_s - times.arrived)
            if times.predicted_first_token_s:
                series.predicted(times.predicted_first_token_s, now_s - times.arrived)

    def ended(self, live: LiveRequest, error: PenstockError | None) -> None:
        """Count the request and its tokens."""
        times = live.times
        if times.tokenized:
            self._metrics.tokenizer_s.observe(times.tokenized - times.tokenizing)
        if error is not None:
            self._metrics.refused(error)
            return
        if not live.request.counted:
            return
        usages = [chunk.usage for chunk in live.ends]
        series = self._metrics.of_labels(live.request.caller.labels)
        series.num_aborted += live.aborting is not None
        series.ended(
            time.monotonic() - times.arrived,
            usages[0].prompt if usages else 0,
            sum(usage.output for usage in usages),
            max((usage.cached for usage in usages), default=0),
            grammar=live.request.constraint is not None,
        )
