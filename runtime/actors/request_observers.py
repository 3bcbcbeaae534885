"""What is logged and counted of requests as they come, go out and end."""

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

SHORT_CHARS = 2048  # of a text at level 2
_DEFAULTS = SamplingParams()


class RequestLog:
    """A `RequestObserver` that logs. What clients sent is written as JSON, so that no text can forge a line.

    `level` is that of `--log-requests-level`.
    """

    def __init__(self, level: int) -> None:
        self._level = level
        self._texts: dict[int, dict[int, StringIO]] = {}  # by request id and choice, of level 2 and above

    def began(self, live: LiveRequest) -> None:
        """Log what was asked for."""
        logger.info("Receive: obj=%s", self._asked(live))

    def sent(self, live: LiveRequest, chunk: Chunk, now_s: float, before_s: float) -> None:
        """Keep the text for the line at the end."""
        if self._level < 2:
            return
        text = self._texts.setdefault(live.request.id, {}).setdefault(chunk.index, StringIO())
        if self._level >= 3 or text.tell() < SHORT_CHARS:
            text.write(chunk.text)

    def ended(self, live: LiveRequest, error: PenstockError | None) -> None:
        """Log what came of it."""
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
        logger.info("Finish: obj=%s, out=%s", self._asked(live), _json(out))

    def _asked(self, live: LiveRequest) -> str:
        request = live.request
        said: dict[str, Any] = {"rid": request.label}
        if self._level >= 1:
            said["sampling_params"] = _set(request.sampling)
        if self._level >= 2:
            if request.text is not None:
                said["text"] = self._shortened(request.text)
            elif request.ids is not None:
                said["input_ids"] = list(request.ids if self._level >= 3 else request.ids[:SHORT_CHARS])
        return _json(said)

    def _choice(self, chunk: Chunk, texts: dict[int, StringIO]) -> dict[str, Any]:
        finish = chunk.finish
        choice: dict[str, Any] = {
            "index": chunk.index,
            "finish_reason": finish.kind if finish else None,
            **chunk.usage._asdict(),
        }
        if self._level >= 2:
            text = texts[chunk.index].getvalue() if chunk.index in texts else ""
            rest = "" if chunk.ids else chunk.text  # such a chunk was not `sent`
            choice["text"] = self._shortened(text + rest)
        return choice

    def _shortened(self, text: str) -> str:
        return text if self._level >= 3 else text[:SHORT_CHARS]


class TimeStatsLog:
    """A `RequestObserver` that logs how long a request waited and ran."""

    def began(self, live: LiveRequest) -> None:
        """Nothing is known yet."""

    def sent(self, live: LiveRequest, chunk: Chunk, now_s: float, before_s: float) -> None:
        """Nothing is logged of single tokens."""

    def ended(self, live: LiveRequest, error: PenstockError | None) -> None:
        """One line; of a request that was never in a step, the time until now is what it waited."""
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


def _set(sampling: SamplingParams) -> dict[str, Any]:
    """The parameters that are not the defaults."""
    values = {field.name: getattr(sampling, field.name) for field in dataclasses.fields(sampling)}
    return {name: value for name, value in values.items() if value != getattr(_DEFAULTS, name)}


def _json(value: Any) -> str:
    return orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


class RequestMetrics:
    """A `RequestObserver` that counts."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics

    def began(self, live: LiveRequest) -> None:
        """Counted when it ends."""

    def sent(self, live: LiveRequest, chunk: Chunk, now_s: float, before_s: float) -> None:
        """Count the time to the first token, or since the last one: about 0.4 us."""
        if not live.request.counted:
            return
        series = self._metrics.of_labels(live.request.caller.labels)
        if before_s:
            num_tokens = len(chunk.ids)
            series.between_tokens_s.observe((now_s - before_s) / num_tokens, num_tokens)
        elif not live.times.first_token:  # of the first choice
            series.first_token_s.observe(now_s - live.times.arrived)

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
