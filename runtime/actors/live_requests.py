"""Records of the requests in the engine, from submission to the last chunk."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from time import monotonic
from typing import NamedTuple, Protocol, Self, runtime_checkable

from runtime.actors.choice_decoder import ChoiceDecoder
from runtime.actors.output_stream import OutputStream
from runtime.actors.request_times import RequestTimes
from runtime.errors import DeadlinePassed, InvalidRequest, PenstockError
from runtime.request import Chunk, Finish, Request, Usage
from runtime.sequence import Sequence
from runtime.tokenizer.stop import StopPattern

NUM_RECENT = 64  # number of ended requests whose timelines are kept
ABORTED = Finish("abort", message="Aborted by the user.")
ABORTED_EARLY = Finish("abort", message="Aborted before it was scheduled.")


class SchedulerHandle(Protocol):
    """The methods of a request's scheduler actor that other actors call."""

    def abort(self, live: LiveRequest) -> None:
        """End all choices of the request with the finish `live.aborting`."""
        ...

    def end_choice(self, live: LiveRequest, index: int) -> None:
        """Stop computing a choice whose text contains a stop string. No further delta follows."""
        ...


class LiveRequest:
    """The state of one request. Only one part of the engine writes each field; the field's comment names this part."""

    __slots__ = (
        "aborting",
        "breaker_ids",
        "decoders",
        "ends",
        "output",
        "request",
        "scheduler",
        "sequences",
        "stop_patterns",
        "times",
    )

    def __init__(self, request: Request, output: OutputStream) -> None:
        self.request = request  # replaced by the tokenizer: compiled grammar, media, token ids
        self.output = output  # written by the engine core
        self.times = output.times = RequestTimes()
        self.ends: list[Chunk] = []  # last chunk of each choice; written when it is put into the output
        self.sequences: list[Sequence] = []  # one for each choice, written by the tokenizer
        # Compiled sampling parameters, written by the tokenizer on a thread. They are kept here because the caches of
        # compiled texts may evict them before the event loop uses them.
        self.stop_patterns: Seq[StopPattern] = ()
        self.breaker_ids: frozenset[int] = frozenset()
        # Written by the scheduler actor or the router. None before admission and while no replica is alive.
        self.scheduler: SchedulerHandle | None = None
        self.decoders: list[ChoiceDecoder] = []  # written by the detokenizer, with the first output
        # How the request will end if it is aborted, else None. `LiveRequests` writes it before the scheduler ends the
        # request.
        self.aborting: Finish | None = None

    @property
    def waits(self) -> bool:
        """Whether all choices are still in the queue: none has started, and none has ended."""
        return all(sequence.num_cached < 0 and sequence.finish is None for sequence in self.sequences)

    @property
    def has_output(self) -> bool:
        """Whether a choice has ended or has an output token, so that the client may have received output."""
        return any(
            sequence.finish is not None or len(sequence.ids) > sequence.num_prompt for sequence in self.sequences
        )


class Timeline(NamedTuple):
    """Times and counts of one request, for live views. Holds no reference to the request, so that it can be freed."""

    label: str
    owner: str
    # arrived, tokenized, queued, scheduled, first token, ended (`time.monotonic`; 0.0 if not reached)
    times: tuple[float, ...]
    prompt: int  # number of prompt tokens
    cached: int  # prompt tokens that were cached
    output: int
    finish: str  # finish reasons of the choices, or the name of the error that ended the request

    @classmethod
    def of(cls, live: LiveRequest, *, ended_s: float = 0.0, error: PenstockError | None = None) -> Self:
        """Return the timeline of a request that is live, or that ended at `ended_s`."""
        times, usages = live.times, [chunk.usage for chunk in live.ends]
        kinds = {chunk.finish.kind for chunk in live.ends if chunk.finish}
        first = live.sequences[0] if live.sequences else None
        return cls(
            live.request.label,
            live.request.owner,
            (times.arrived, times.tokenized, times.queued, times.scheduled, times.first_token, ended_s),
            first.num_prompt if first else len(live.request.ids or ()),
            max(0, first.num_cached) if first else 0,
            sum(usage.output for usage in usages) if ended_s else sum(s.num_output for s in live.sequences),
            type(error).__name__ if error is not None else ", ".join(sorted(kinds)) if ended_s else "",
        )

    @property
    def state(self) -> str:
        """The phase of the request."""
        _, tokenized, queued, scheduled, first_token, ended = self.times
        if ended:
            return "ended"
        if first_token:
            return "decode"
        return "prefill" if scheduled else "waiting" if queued or tokenized else "tokenizing"


class RequestObserver(Protocol):
    """Counts, logs or traces requests. The methods must not block or raise."""

    def began(self, live: LiveRequest) -> None:
        """Called when a request is accepted. Its ids may not be known yet."""
        ...

    def ended(self, live: LiveRequest, error: PenstockError | None) -> None:
        """Called when the output has ended, with `live.ends` or with an error."""
        ...


@runtime_checkable
class TokenObserver(RequestObserver, Protocol):
    """An observer that is also called for every chunk with tokens."""

    def sent(self, live: LiveRequest, chunk: Chunk, now_s: float, before_s: float) -> None:
        """Called when a chunk with tokens is sent. `before_s` is the time of the choice's previous chunk, or 0.0.

        At the first chunk of the request, `live.times.first_token` is still 0.0.
        """
        ...


class LiveRequests:
    """The table of live requests, owned by the engine core. A request is removed when its output has ended."""

    def __init__(self, observers: Seq[RequestObserver] = ()) -> None:
        self.observers: list[RequestObserver] = []
        self.token_observers: list[TokenObserver] = []  # the observers that are also called for every chunk
        for observer in observers:
            self.observe(observer)
        # Timelines of recently ended requests, oldest first.
        self.recent: deque[Timeline] = deque(maxlen=NUM_RECENT)
        self._live: dict[int, LiveRequest] = {}  # request id -> request
        self._timers: dict[int, asyncio.TimerHandle] = {}  # request id -> timer that ends the request at its time limit
        self._labels: set[tuple[str, str]] = set()  # (owner, label) of the live requests
        self._ended: dict[int, asyncio.Event] = {}  # request id -> event for `wait_for`, set when the request ends
        self._idle = asyncio.Event()
        self._idle.set()
        self.get = self._live.get

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[LiveRequest]:
        """Iterate over a copy of the table, because requests may be added and removed during the iteration."""
        return iter(list(self._live.values()))

    def observe(self, observer: RequestObserver) -> None:
        """Add an observer of all requests."""
        self.observers.append(observer)
        if isinstance(observer, TokenObserver):
            self.token_observers.append(observer)

    def stop_observing(self, observer: RequestObserver) -> None:
        """Remove an observer. A second call does nothing."""
        if observer in self.observers:
            self.observers.remove(observer)
            self.token_observers = [each for each in self.observers if isinstance(each, TokenObserver)]

    def add(self, request: Request) -> LiveRequest:
        """Add a new request. Raises `InvalidRequest` if its owner has a live request with the same label."""
        label = request.owner, request.label
        if request.label and label in self._labels:
            raise InvalidRequest(f"A request with the rid {request.label[:80]!r} is running already.", param="rid")
        self._labels.add(label)
        output = OutputStream(request.id, request.sampling.n, self.abort)
        live = self._live[request.id] = LiveRequest(request, output)
        self._idle.clear()
        if (timeout_s := request.service.timeout_s) is not None:
            passed = DeadlinePassed(f"The answer was not complete within {timeout_s:g} s.", param="timeout_s")
            loop = asyncio.get_running_loop()
            self._timers[request.id] = loop.call_later(timeout_s, self.fail, request.id, passed)
        for observer in self.observers:
            observer.began(live)
        return live

    def remove(self, live: LiveRequest, error: PenstockError | None = None) -> None:
        """Remove a request whose output has ended, and notify the observers. A second call does nothing."""
        if self._live.pop(live.request.id, None) is None:
            return
        self._labels.discard((live.request.owner, live.request.label))
        if self._timers and (timer := self._timers.pop(live.request.id, None)) is not None:
            timer.cancel()
        live.times.ended = monotonic()
        self.recent.append(Timeline.of(live, ended_s=live.times.ended, error=error))
        for observer in self.observers:
            observer.ended(live, error)
        if self._ended and (ended := self._ended.pop(live.request.id, None)) is not None:
            ended.set()
        if not self._live:
            self._idle.set()

    def abort(self, request_id: int) -> None:
        """Abort a request in any phase. Its output ends with kind "abort". Unknown ids are ignored."""
        live = self._live.get(request_id)
        if live is None or live.aborting is not None:
            return
        live.aborting = ABORTED
        if live.scheduler is not None:
            live.scheduler.abort(live)
            return
        usage = Usage(len(live.request.ids or ()), 0, 0)
        for index in range(live.request.sampling.n):
            live.ends.append(Chunk(index, "", [], ABORTED_EARLY, usage))
            live.output.put(live.ends[-1])
        self.remove(live)

    def abort_label(self, label: str, *, owner: str | None = None, exact: bool = False) -> int:
        """Abort every request whose label starts with `label`. Return the number of aborted requests.

        With `owner`, only this owner's requests are aborted. With `exact`, the label must be equal: only the request
        with this label is aborted, or all requests of the batch to which the client has given this name.
        """
        requests = [live.request for live in self if owner is None or live.request.owner == owner]
        if exact:
            ids = [request.id for request in requests if label in (request.label, request.batch)]
        else:
            ids = [request.id for request in requests if request.label.startswith(label)]
        for request_id in ids:
            self.abort(request_id)
        return len(ids)

    def fail(self, request_id: int, error: PenstockError) -> None:
        """End a request with an error for its client, and stop computing it. Unknown ids are ignored."""
        live = self._live.get(request_id)
        if live is None:
            return
        self.remove(live, error)
        live.output.fail(error)
        live.aborting = live.aborting or ABORTED
        if live.scheduler is not None:
            live.scheduler.abort(live)

    def fail_all(self, error: PenstockError) -> None:
        for live in self:
            self.fail(live.request.id, error)

    async def wait_for(self, request_ids: Iterable[int]) -> None:
        """Return when none of these requests is live."""
        for request_id in request_ids:
            live = self._live.get(request_id)
            if live is None:
                continue
            ended = self._ended.setdefault(request_id, asyncio.Event())
            await ended.wait()

    async def wait_idle(self) -> None:
        """Return when no request is live."""
        await self._idle.wait()
