"""Pauses generation until a client resumes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Literal, cast

from runtime.actors.live_requests import LiveRequest, LiveRequests
from runtime.actors.scheduler import SchedulerActor

Mode = Literal["abort", "wait", "retract", "in_place"]


class GenerationPause:
    """During a pause no replica runs a step, and new requests wait.

    Modes: "abort" ends the requests in the engine. "wait" lets these requests finish before the pause begins. "retract"
    frees the KV of running requests and recomputes it after the pause. "in_place" keeps their KV.
    """

    def __init__(
        self,
        actors: Callable[[], Sequence[SchedulerActor]],
        requests: LiveRequests,
        submit: Callable[[LiveRequest], None],
    ) -> None:
        self._actors = actors
        self._requests = requests
        self._submit = submit
        self._held: list[LiveRequest] = []
        self._hold: AsyncExitStack | None = None
        self._lock = asyncio.Lock()
        self._finishing = False  # whether a pause with mode "wait" has not begun yet because requests are running
        self.mode: Mode | None = None  # mode of the current pause; None: not paused

    @property
    def paused(self) -> bool:
        """Whether steps are suspended until `end` is called."""
        return self._hold is not None

    @property
    def num_held(self) -> int:
        """Number of choices of the requests that are held back."""
        return sum(live.request.sampling.n for live in self._held)

    def holds_back(self, live: LiveRequest) -> bool:
        """Hold a new request back if a pause waits for earlier requests to finish. Return True if it was held back."""
        if self._finishing:
            self._held.append(live)
        return self._finishing

    async def begin(self, mode: Mode) -> None:
        """Pause generation as `mode` says. If it is already paused, `mode` can only abort or retract requests.

        Raises `EngineClosed` if the engine ends while it waits. If the call is cancelled, generation continues.
        """
        async with self._lock:
            if mode == "wait" and not self.paused:
                await self._finish_requests()
            if self._hold is None:
                async with AsyncExitStack() as stack:
                    for actor in self._actors():
                        await stack.enter_async_context(actor.paused())
                    self._hold = stack.pop_all()
                self.mode = mode
            if mode == "abort":
                await self._abort_all()
            if mode == "retract":
                self.retract()
            self._release_held()

    async def end(self) -> bool:
        """End the pause. Return False if generation was not paused."""
        async with self._lock:
            hold, self._hold, self.mode = self._hold, None, None
            if hold is None:
                return False
            await hold.aclose()
            return True

    def retract(self) -> None:
        """Free the pages of all requests and empty the prefix trees. Allowed only while paused."""
        for actor in self._actors():
            actor.scheduler.recompute()

    async def _finish_requests(self) -> None:
        """Wait until all requests in the engine have ended. New requests are held back until then."""
        self._finishing = True
        try:
            ids = [live.request.id for live in self._requests]
            await self._requests.wait_for(ids)
        except BaseException:
            self._release_held()
            raise

    async def _abort_all(self) -> None:
        held = {live.request.id for live in self._held}
        ids = [live.request.id for live in self._requests if live.request.id not in held]
        for request_id in ids:
            self._requests.abort(request_id)
        await self._requests.wait_for(ids)

    def _release_held(self) -> None:
        self._finishing = False
        held, self._held = self._held, []
        for live in held:
            if self._requests.get(live.request.id) is not None:
                self._submit(live)


def mode_of(name: str) -> Mode:
    """Return the mode that SGLang or vLLM calls `name`; for example, "keep" means "in_place".

    Raises KeyError if unknown.
    """
    names = {"abort": "abort", "wait": "wait", "retract": "retract", "in_place": "in_place", "keep": "in_place"}
    return cast(Mode, names[name])
