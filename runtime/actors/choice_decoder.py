"""Incremental decoding of one choice of a request. Stop strings are also found across steps."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.actors.output_stream import join_logprobs
from runtime.request import Chunk, Delta, Finish, Logprobs, Request, Usage
from runtime.scheduler.apply import first_logprobs
from runtime.tokenizer.incremental import IncrementalDecoder
from runtime.tokenizer.stop import StopMatcher, StopPattern
from runtime.tokenizer.tokenizer import Tokenizer


class ChoiceDecoder:
    """Decodes the deltas of one choice. Holds text, token ids and log-probabilities back until they can be sent."""

    __slots__ = (
        "_held_ids",
        "_held_logprobs",
        "_held_text",
        "_incremental",
        "_interval",
        "_matcher",
        "_prompt_ids",
        "_prompt_logprobs",
        "_since_sent",
        "_trim_stop_token",
        "ended",
        "sent_s",
    )

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer | None,
        stream_interval: int,
        patterns: Sequence[StopPattern] = (),  # the request's compiled `stop_regex`
    ) -> None:
        sampling = request.sampling
        self.ended = False
        self.sent_s = 0.0  # time of the last chunk (`time.monotonic`), written by the detokenizer
        self._interval = sampling.stream_interval or stream_interval
        self._since_sent = self._interval - 1  # so that the first token is sent immediately
        self._trim_stop_token = not sampling.no_stop_trim
        self._held_text = ""
        self._held_ids: list[int] = []
        self._held_logprobs: list[Logprobs] = []
        self._prompt_logprobs: Logprobs | None = None
        self._prompt_ids = request.ids if request.returns_ids else None
        self._incremental: IncrementalDecoder | None = None
        if tokenizer is not None and not request.wants_embedding:
            self._incremental = tokenizer.decoder(
                request.ids or (),
                sampling.skip_special_tokens,
                sampling.spaces_between_special_tokens,
                request.shown_special_ids,
            )
        self._matcher: StopMatcher | None = None
        if sampling.stop or patterns:
            self._matcher = StopMatcher(sampling.stop, sampling.no_stop_trim, patterns)

    def push(self, delta: Delta) -> Chunk | None:
        """Decode a delta. Return a chunk to send now, or None if its text is held back."""
        ids, finish, usage = delta.ids, delta.finish, delta.usage
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
        if len(ids) < len(delta.ids):  # a stop string ended the choice within the delta
            usage = usage._replace(output=usage.output - len(delta.ids) + len(ids))
        return self._send(delta, finish, usage)

    def _send(self, delta: Delta, finish: Finish | None, usage: Usage) -> Chunk | None:
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
            usage,
            join_logprobs(self._held_logprobs) if self._held_logprobs else None,
            self._prompt_logprobs,
            delta.embedding,
            self._prompt_ids,
            None if finish is None else delta.parts,
        )
        self._held_text = ""
        self._held_ids = []
        self._held_logprobs = []
        self._prompt_logprobs = self._prompt_ids = None
        self._since_sent = 0
        return chunk

    def _decode(
        self, incremental: IncrementalDecoder, ids: list[int], finish: Finish | None
    ) -> tuple[str, list[int], Finish | None]:
        """Return the text that is now final, the ids of this text, and the finish.

        If a stop string or stop pattern matches, the returned finish replaces the given one.
        """
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
