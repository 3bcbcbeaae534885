"""The requests that are in the engine: one record of each, from its submission to its last chunk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Protocol

from runtime.actors.choice_decoder import ChoiceDecoder
from runtime.actors.output_stream import OutputStream
from runtime.errors import PenstockError
from runtime.request import Chunk, Finish, Request, Usage
from runtime.sequence import Sequence

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


class LiveRequest:
    """What the actors know of one request. Each field has one writer, named behind it."""

    __slots__ = ("aborting", "arrived_s", "decoders", "output", "request", "scheduler", "sequences")

    def __init__(self, request: Request, output: OutputStream) -> None:
        self.request = request  # the tokenizer, once its ids are known
        self.output = output  # the engine core, once
        self.arrived_s = time.monotonic()  # the engine core, once
        self.sequences: list[Sequence] = []  # the tokenizer: one for each choice
        self.scheduler: SchedulerHandle | None = (
            None  # the engine core or the router; None before, and while no replica is alive
        )
        self.decoders: list[ChoiceDecoder] = []  # the detokenizer, from the first output on
        self.aborting: Finish | None = (
            None  # `abort`: it is to end so, which its scheduler may not have done yet
        )

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


class LiveRequests:
    """The one table of them, owned by the engine core. A request that has ended is not in it."""

    def __init__(self) -> None:
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
        return live

    def remove(self, live: LiveRequest) -> None:
        """Its output has ended. Does nothing the second time."""
        self._live.pop(live.request.id, None)
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
            live.output.put(Chunk(index, "", [], ABORTED_EARLY, usage))
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
        self.remove(live)
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
