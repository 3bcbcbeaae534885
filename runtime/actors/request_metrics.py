"""What is counted of requests, as they go out and end."""

from __future__ import annotations

from time import monotonic

from runtime.actors.live_requests import LiveRequest
from runtime.errors import PenstockError
from runtime.metrics.series import EngineMetrics
from runtime.request import Chunk


class RequestMetrics:
    """A `RequestObserver` that counts."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics

    def began(self, live: LiveRequest) -> None:
        """Counted when it ends."""

    def sent(self, live: LiveRequest, chunk: Chunk, now_s: float, before_s: float) -> None:
        """Count the time to the first token, or since the last one: about 0.4 us."""
        series = self._metrics.of_labels(live.caller.labels)
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
        usages = [chunk.usage for chunk in live.ends]
        series = self._metrics.of_labels(live.caller.labels)
        series.num_aborted += live.aborting is not None
        series.ended(
            monotonic() - times.arrived,
            usages[0].prompt if usages else 0,
            sum(usage.output for usage in usages),
            max((usage.cached for usage in usages), default=0),
            grammar=live.request.constraint is not None,
        )
