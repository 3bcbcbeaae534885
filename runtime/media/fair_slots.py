"""Slots that clients take in turns, so that one client with many images does not delay other clients."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple


class Asker(NamedTuple):
    """The request that asks for a slot. Clients take turns, and so do the requests of one client."""

    client: str = ""  # name of the API key; "" without keys, in which case the requests take turns
    request: int = 0


class FairSlots:
    """A semaphore whose waiting clients take turns. Must be used on the event loop."""

    def __init__(self, num_slots: int) -> None:
        self._num_free = num_slots
        # Waiting futures, by client and request. The first client's first request has the next turn.
        self._waiting: OrderedDict[str, OrderedDict[int, deque[asyncio.Future[None]]]] = OrderedDict()

    @asynccontextmanager
    async def slot(self, asker: Asker) -> AsyncIterator[None]:
        """Wait for a slot and hold it. A cancelled call holds no slot."""
        await self._acquire(asker)
        try:
            yield
        finally:
            self._release()

    async def _acquire(self, asker: Asker) -> None:
        if self._num_free:  # no future waits in this case
            self._num_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(asker.client, OrderedDict()).setdefault(asker.request, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the slot was granted at the moment of the cancellation
                self._release()
            else:
                self._forget(asker, turn)
            raise

    def _forget(self, asker: Asker, turn: asyncio.Future[None]) -> None:
        requests = self._waiting.get(asker.client, OrderedDict())
        turns = requests.get(asker.request, deque())
        if turn in turns:
            turns.remove(turn)
            if not turns:
                del requests[asker.request]
            if not requests:
                del self._waiting[asker.client]

    def _release(self) -> None:
        while self._waiting:
            client, requests = self._waiting.popitem(last=False)
            request, turns = requests.popitem(last=False)
            turn = turns.popleft()
            if turns:
                requests[request] = turns
            if requests:
                self._waiting[client] = requests
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1
