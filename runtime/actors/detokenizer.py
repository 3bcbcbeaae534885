"""The detokenizer actor: ids to text, piece by piece, with stop strings found across the pieces."""

from __future__ import annotations

import asyncio
import logging
from time import monotonic

from runtime.actors.live_requests import LiveRequest, LiveRequests
from runtime.actors.mailbox import Mailbox
from runtime.actors.output_stream import join_logprobs
from runtime.errors import EngineFailure
from runtime.request import Chunk, Delta, Finish, Logprobs, Request
from runtime.scheduler.apply import first_logprobs
from runtime.tokenizer.incremental import IncrementalDecoder
from runtime.tokenizer.stop import StopMatcher
from runtime.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger("penstock.detokenizer")

TURN_S = 0.002  # of work before the loop gets a turn
TURN_DELTAS = 16  # between looks at the clock


class DetokenizerActor:
    """Reads one list of deltas per step from `inbox`; puts chunks into the requests' output streams.

    Where a stop string ends a choice, its scheduler is told.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, requests: LiveRequests, *, stream_interval: int = 1
    ) -> None:
        self.inbox: Mailbox[list[Delta]] = Mailbox()
        self._tokenizer = tokenizer
        self._requests = requests
        self._stream_interval = stream_interval

    async def run(self) -> None:
        """Until cancelled. However many deltas a step has, others get the loop every few milliseconds."""
        while True:
            lists = await self.inbox.take_all()
            began = monotonic()
            for deltas in lists:
                for start in range(0, len(deltas), TURN_DELTAS):
                    self.process(deltas[start : start + TURN_DELTAS])
                    if monotonic() - began > TURN_S:
                        await asyncio.sleep(0)
                        began = monotonic()

    def process(self, deltas: list[Delta]) -> None:
        """Turn deltas into chunks; deltas of requests that are gone are dropped."""
        get = self._requests.get
        for delta in deltas:
            live = get(delta.request_id)
            if live is None:
                continue
            try:
                decoders = live.decoders or self._start(live)
                decoder = decoders[delta.index]
                if decoder.ended:
                    continue
                chunk = decoder.push(delta)
            except Exception:  # a foreign library on one request's output: this request's border
                logger.exception("decoding the output of request %s failed", live.request.label)
                self._requests.fail(delta.request_id, EngineFailure("The output could not be decoded."))
                continue
            if chunk is None:
                continue
            live.output.put(chunk)
            if chunk.finish is not None:
                decoder.ended = True
                self._end_choice(live, delta)

    def _start(self, live: LiveRequest) -> list[ChoiceDecoder]:
        request = live.request
        live.decoders = [
            ChoiceDecoder(request, self._tokenizer, self._stream_interval) for _ in range(request.sampling.n)
        ]
        return live.decoders

    def _end_choice(self, live: LiveRequest, last: Delta) -> None:
        if last.finish is None and live.scheduler is not None:  # its text ended it
            live.scheduler.end_choice(live, last.index)
        if live.output.finished:
            self._requests.remove(live)


class ChoiceDecoder:
    """The text state of one choice."""

    __slots__ = (
        "_held_ids",
        "_held_logprobs",
        "_held_text",
        "_incremental",
        "_interval",
        "_matcher",
        "_prompt_logprobs",
        "_since_sent",
        "_trim_stop_token",
        "ended",
    )

    def __init__(self, request: Request, tokenizer: Tokenizer | None, stream_interval: int) -> None:
        sampling = request.sampling
        self.ended = False
        self._interval = sampling.stream_interval or stream_interval
        self._since_sent = self._interval - 1  # so that the first token is sent at once
        self._trim_stop_token = not sampling.no_stop_trim
        self._held_text = ""
        self._held_ids: list[int] = []
        self._held_logprobs: list[Logprobs] = []
        self._prompt_logprobs: Logprobs | None = None
        self._incremental: IncrementalDecoder | None = None
        if tokenizer is not None:
            self._incremental = tokenizer.decoder(
                request.ids or (),
                sampling.skip_special_tokens,
                sampling.spaces_between_special_tokens,
            )
        self._matcher = StopMatcher(sampling.stop, sampling.no_stop_trim) if sampling.stop else None

    def push(self, delta: Delta) -> Chunk | None:
        """The chunk to send now; None while everything is held back."""
        ids, finish = delta.ids, delta.finish
        text = ""
        if self._incremental is not None:
            text, ids, finish = self._decode(self._incremental, ids, finish)
        self._held_text += text
        self._held_ids += ids
        self._since_sent += len(ids)
        if delta.logprobs is not None:
            self._held_logprobs.append(first_logprobs(delta.logprobs, len(ids)))
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = delta.prompt_logprobs
        return self._send(delta, finish)

    def _send(self, delta: Delta, finish: Finish | None) -> Chunk | None:
        if finish is None:
            if self._since_sent < self._interval:
                return None
            if not self._held_text and self._incremental is not None:
                return None
        chunk = Chunk(
            delta.index,
            self._held_text,
            self._held_ids,
            finish,
            delta.usage,
            join_logprobs(self._held_logprobs) if self._held_logprobs else None,
            self._prompt_logprobs,
            delta.embedding,
        )
        self._held_text = ""
        self._held_ids = []
        self._held_logprobs = []
        self._prompt_logprobs = None
        self._since_sent = 0
        return chunk

    def _decode(
        self, incremental: IncrementalDecoder, ids: list[int], finish: Finish | None
    ) -> tuple[str, list[int], Finish | None]:
        """Text that is certain, its ids, and the finish, which a stop string may replace."""
        shown = ids
        if finish is not None and finish.kind == "stop" and self._trim_stop_token:
            shown = ids[:-1]
        if self._matcher is None:
            text = incremental.push(shown)
            return (text + incremental.flush() if finish else text), ids, finish
        return self._match(incremental, self._matcher, shown, ids, finish)

    def _match(
        self,
        incremental: IncrementalDecoder,
        matcher: StopMatcher,
        shown: list[int],
        ids: list[int],
        finish: Finish | None,
    ) -> tuple[str, list[int], Finish | None]:
        sent = ""
        for count, token_id in enumerate(shown, start=1):
            text, matched = matcher.push(incremental.push([token_id]))
            sent += text
            if matched is not None:
                return sent, ids[:count], Finish("stop", matched=matched)
        if finish is not None:
            text, matched = matcher.push(incremental.flush())
            sent += text
            if matched is not None:
                return sent, ids, Finish("stop", matched=matched)
            sent += matcher.flush()
        return sent, ids, finish
