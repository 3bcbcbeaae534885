"""Hooks: call the user's functions with logits, with new tokens, and after steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from runtime.batch import Batch
from runtime.errors import InvalidRequest, PenstockError
from runtime.request import Chunk, Request

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore
    from runtime.actors.live_requests import LiveRequest

logger = logging.getLogger("penstock.python")

OnLogits = Callable[[list[int], Any], Any]  # (ids of prompt and output, logits [V]) -> None, or new logits


class TokenEvent(NamedTuple):
    """New tokens of one output. One event has all tokens that arrive together.

    `rid` is the id of the request, and `index` the number of the output among the request's choices. `ids` and `text`
    are the new tokens and their text. `finish_reason` is "stop", "length" or "abort", or None before the end.
    """

    rid: str
    index: int
    ids: list[int]
    text: str
    finish_reason: str | None


class StepEvent(NamedTuple):
    """One step of the model.

    `num_rows` is the number of sequences in the step, `num_prompt_tokens` the number of prompt tokens that the step
    computed, and `num_new_tokens` the number of output tokens that it produced. `seconds` is its duration, measured
    from its launch or from the end of the previous step, whichever is later.
    """

    number: int
    num_rows: int
    num_prompt_tokens: int
    num_new_tokens: int
    seconds: float


OnToken = Callable[[TokenEvent], object]
OnStep = Callable[[StepEvent], object]


def with_hook(requests: Sequence[Request], on_logits: OnLogits | None) -> Sequence[Request]:
    """Return the requests with `on_logits` attached, or unchanged if `on_logits` is None.

    Raises `InvalidRequest` if `on_logits` is not callable, or if a request has a custom logit processor.
    """
    if on_logits is None:
        return requests
    if not callable(on_logits):
        raise InvalidRequest("on_logits must be a function of (ids, logits).", param="on_logits")
    if any(request.sampling.custom_logit_processor is not None for request in requests):
        raise InvalidRequest("on_logits and custom_logit_processor exclude each other.", param="on_logits")
    return [replace(request, on_logits=on_logits) for request in requests]


class _TokenObserver:
    """Passes new tokens of the requests with these ids (`labels`), or of all requests, to a function."""

    def __init__(self, function: OnToken, labels: Collection[str] | None) -> None:
        self._function: OnToken | None = function
        self._labels = labels

    def began(self, live: LiveRequest) -> None:
        pass

    def sent(self, live: LiveRequest, chunk: Chunk, now_s: float, before_s: float) -> None:
        label = live.request.label
        if self._function is None or (self._labels is not None and label not in self._labels):
            return
        finish = None if chunk.finish is None else chunk.finish.kind
        try:
            self._function(TokenEvent(label, chunk.index, list(chunk.ids), chunk.text, finish))
        except Exception as error:  # an error of the user's function must not end the detokenizer
            self._function = None
            logger.error("on_token failed, and is not called again.", exc_info=error)

    def ended(self, live: LiveRequest, error: PenstockError | None) -> None:
        pass


def observe_tokens(core: EngineCore, function: OnToken, labels: Collection[str] | None) -> Callable[[], None]:
    """Call `function` with the new tokens of requests with these ids (`labels`), or of all requests for None.

    Returns a function that removes the hook.
    """
    return core.observe(_TokenObserver(function, labels))


@contextmanager
def tokens_observed(core: EngineCore, function: OnToken | None, requests: Sequence[Request]) -> Iterator[None]:
    """Call `function` with the tokens of these requests while the block runs."""
    if function is None:
        yield
        return
    end = observe_tokens(core, function, {request.label for request in requests})
    try:
        yield
    finally:
        end()


def observe_steps(core: EngineCore, function: OnStep) -> Callable[[], None]:
    """Call `function` after each step of every replica. Returns a function that removes the hook.

    Raises `InvalidRequest` if another function is already active.
    """
    progresses = [actor.progress for actor in core.schedulers]
    if any(progress.on_step is not None for progress in progresses):
        raise InvalidRequest("There is an on_step already; end it first.")

    def call(batch: Batch, seconds: float, num_tokens: int) -> None:
        event = StepEvent(batch.number, len(batch.counts), batch.stats.num_prompt_tokens, num_tokens, seconds)
        try:
            function(event)
        except Exception as error:  # an error of the user's function must not end the scheduler
            end()
            logger.error("on_step failed, and is not called again.", exc_info=error)

    def end() -> None:
        for progress in progresses:
            if progress.on_step is call:
                progress.on_step = None

    for progress in progresses:
        progress.on_step = call
    return end
