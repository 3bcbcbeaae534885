"""The requests that are in the engine: one record of each, from its submission to its last chunk."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from time import monotonic
from typing import NamedTuple, Protocol, Self

from runtime.actors.choice_decoder import ChoiceDecoder
from runtime.actors.output_stream import OutputStream
from runtime.errors import PenstockError
from runtime.request import Chunk, Finish, Request, Usage
from runtime.sequence import Sequence

NUM_RECENT = 64  # requests that have ended whose times are remembered
ABORTED = Finish("abort", message="Aborted by the user.")
ABORTED_EARLY = Finish("abort", message="Aborted before it was scheduled.")


class SchedulerHandle(Protocol):
    """Whom to tell about a request that is being computed: its scheduler actor."""

    def abort(self, live: LiveRequest) -> None:
        """End the request, as its `aborting` says."""
        ...

    def end_choice(self, live: LiveRequest, index: int) -> None:
        """The text of this choice ended it: compute it no further, and send nothing more for it."""
        ...


class RequestTimes:
    """When a request came where, by `time.monotonic`; 0.0 for what has not been. Each has one writer."""

    __slots__ = ("arrived", "first_token", "queued", "scheduled", "tokenized", "tokenizing")

    def __init__(self) -> None:
        self.arrived = monotonic()
        self.tokenizing = 0.0  # the tokenizer
        self.tokenized = 0.0
        self.queued = 0.0  # the scheduler actor: it may be in a step from now on
        self.scheduled = 0.0  # the scheduler actor: its first step was launched
        self.first_token = 0.0  # the detokenizer: of any choice


class LiveRequest:
    """What the actors know of one request. Each field has one writer, named behind it."""

    __slots__ = (
        "aborting",
        "decoders",
        "ends",
        "output",
        "request",
        "scheduler",
        "sequences",
        "times",
    )

    def __init__(self, request: Request, output: OutputStream) -> None:
        self.request = request  # the tokenizer, once its ids are known
        self.output = output  # the engine core, once
        self.times = RequestTimes()
        self.ends: list[Chunk] = []  # whoever puts it into the output: the last chunk of each choice
        self.sequences: list[Sequence] = []  # the tokenizer: one for each choice
        # The engine core or the router; None before, and while no replica is alive.
        self.scheduler: SchedulerHandle | None = None
        self.decoders: list[ChoiceDecoder] = []  # the detokenizer, from the first output on
        # `abort`: it is to end so, which its scheduler may not have done yet.
        self.aborting: Finish | None = None

    @property
    def waits(self) -> bool:
        """Whether none of its choices has run yet."""
        return all(sequence.num_cached < 0 and sequence.finish is None for sequence in self.sequences)

    @property
    def begun(self) -> bool:
        """Whether some of its output may have gone out."""
        return any(
            sequence.finish is not None or len(sequence.ids) > sequence.num_prompt
            for sequence in self.sequences
        )


class Timeline(NamedTuple):
    """How a request fared, for who watches. It holds nothing of the request."""

    label: str
    owner: str
    # `time.monotonic` of arrived, tokenized, queued, scheduled, first token, ended; or 0.0.
    times: tuple[float, ...]
    prompt: int  # tokens
    cached: int  # of them
    output: int
    finish: str  # kinds of its choices' ends, or the error that ended it

    @classmethod
    def of(cls, live: LiveRequest, *, ended_s: float = 0.0, error: PenstockError | None = None) -> Self:
        """Of now, or at its end."""
        times, usages = live.times, [chunk.usage for chunk in live.ends]
        said = {chunk.finish.kind for chunk in live.ends if chunk.finish}
        first = live.sequences[0] if live.sequences else None
        return cls(
            live.request.label,
            live.request.owner,
            (times.arrived, times.tokenized, times.queued, times.scheduled, times.first_token, ended_s),
            first.num_prompt if first else len(live.request.ids or ()),
            max(0, first.num_cached) if first else 0,
            sum(usage.output for usage in usages) if ended_s else sum(s.num_output for s in live.sequences),
            type(error).__name__ if error is not None else ", ".join(sorted(said)) if ended_s else "",
        )

    @property
    def state(self) -> str:
        """Where it is."""
        _, tokenized, queued, scheduled, first_token, ended = self.times
        if ended:
            return "ended"
        if first_token:
            return "decode"
        return "prefill" if scheduled else "waiting" if queued or tokenized else "tokenizing"


class RequestObserver(Protocol):
    """Who counts or logs requests. Its methods return at once and raise nothing."""

    def began(self, live: LiveRequest) -> None:
        """A request was taken in; its ids may not be known yet."""
        ...

    def sent(self, live: LiveRequest, chunk: Chunk, now_s: float, before_s: float) -> None:
        """A chunk with tokens goes out, and the one before it of the same choice at `before_s`; 0.0: there was none.

        Before the first one of any choice, `live.times.first_token` is 0.0.
        """
        ...

    def ended(self, live: LiveRequest, error: PenstockError | None) -> None:
        """The output has ended: with `live.ends`, or with an error for its reader."""
        ...


class LiveRequests:
    """The one table of them, owned by the engine core. A request that has ended is not in it."""

    def __init__(self, observers: Seq[RequestObserver] = ()) -> None:
        self.observers = observers
        # Of requests that have ended, the last one last.
        self.recent: deque[Timeline] = deque(maxlen=NUM_RECENT)
        self._live: dict[int, LiveRequest] = {}  # by request id
        self._idle = asyncio.Event()
        self._idle.set()
        self.get = self._live.get

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[LiveRequest]:
        """Over those of now; requests may come and go meanwhile."""
        return iter(list(self._live.values()))

    def add(self, request: Request) -> LiveRequest:
        """Enter a new request."""
        output = OutputStream(request.id, request.sampling.n, self.abort)
        live = self._live[request.id] = LiveRequest(request, output)
        self._idle.clear()
        for observer in self.observers:
            observer.began(live)
        return live

    def remove(self, live: LiveRequest, error: PenstockError | None = None) -> None:
        """Its output has ended. Does nothing the second time."""
        if self._live.pop(live.request.id, None) is None:
            return
        self.recent.append(Timeline.of(live, ended_s=monotonic(), error=error))
        for observer in self.observers:
            observer.ended(live, error)
        if not self._live:
            self._idle.set()

    def abort(self, request_id: int) -> None:
        """End a request wherever it is; its output ends with kind "abort". Unknown ids are ignored."""
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
        """Abort every request whose label starts with `label`; returns how many.

        With `owner` only those of this owner; with `exact` only that label, or its numbered ones of a batch.
        """
        matches = _is_label if exact else str.startswith
        ids = [
            live.request.id
            for live in self
            if (owner is None or live.request.owner == owner) and matches(live.request.label, label)
        ]
        for request_id in ids:
            self.abort(request_id)
        return len(ids)

    def fail(self, request_id: int, error: PenstockError) -> None:
        """End a request with an error for its sender, and its computation if there is any. Unknown ids are ignored."""
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

    async def wait_idle(self) -> None:
        """Return when the last request has ended."""
        await self._idle.wait()


def _is_label(label: str, given: str) -> bool:
    """Whether the label is the given one, or one that a batch made of it by a number."""
    name, _, number = label.rpartition("_")
    return label == given or (name == given and number.isdecimal())
