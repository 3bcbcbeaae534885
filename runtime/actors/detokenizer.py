"""The detokenizer actor: decodes the tokens of each step into chunks of the output streams."""

from __future__ import annotations

import asyncio
import logging
from time import monotonic

from runtime.actors.choice_decoder import ChoiceDecoder
from runtime.actors.live_requests import LiveRequest, LiveRequests
from runtime.actors.mailbox import Mailbox
from runtime.errors import EngineFailure
from runtime.request import Delta
from runtime.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger("penstock.detokenizer")

TURN_S = 0.002  # the detokenizer yields to the event loop after working for this time
TURN_DELTAS = 16  # number of deltas processed between two checks of the time


class DetokenizerActor:
    """Reads one list of deltas per step from `inbox`, and puts chunks into the requests' output streams.

    If a stop string ends a choice, it notifies the request's scheduler.
    """

    def __init__(self, tokenizer: Tokenizer | None, requests: LiveRequests, *, stream_interval: int = 1) -> None:
        self.inbox: Mailbox[list[Delta]] = Mailbox()
        self._tokenizer = tokenizer
        self._requests = requests
        self._stream_interval = stream_interval

    async def run(self) -> None:
        """Process deltas until cancelled.

        Yields to the event loop every `TURN_S`, regardless of the number of deltas.
        """
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
        """Turn deltas into chunks. Ignores deltas of requests that have ended."""
        get, observers = self._requests.get, self._requests.token_observers
        now_s = monotonic()
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
            except Exception:  # a tokenizer library failed to decode this output: only this request fails
                logger.exception("decoding the output of request %s failed", live.request.label)
                self._requests.fail(delta.request_id, EngineFailure("The output could not be decoded."))
                continue
            if chunk is None:
                continue
            if chunk.ids:
                for observer in observers:
                    observer.sent(live, chunk, now_s, decoder.sent_s)
                decoder.sent_s = now_s
                live.times.first_token = live.times.first_token or now_s
            live.output.put(chunk)
            if chunk.finish is not None:
                decoder.ended = True
                live.ends.append(chunk)
                self._end_choice(live, delta)

    def _start(self, live: LiveRequest) -> list[ChoiceDecoder]:
        request = live.request
        live.decoders = [
            ChoiceDecoder(request, self._tokenizer, self._stream_interval, live.stop_patterns)
            for _ in range(request.sampling.n)
        ]
        return live.decoders

    def _end_choice(self, live: LiveRequest, last: Delta) -> None:
        if last.finish is None and live.scheduler is not None:  # a stop string ended the choice
            live.scheduler.end_choice(live, last.index)
        if live.output.finished:
            self._requests.remove(live)
