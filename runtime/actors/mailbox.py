"""Where one coroutine leaves things for another: many writers, one reader who takes all that has arrived."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Mailbox(Generic[Item]):
    """Unbounded, for one event loop, with a single reader.

    A plain future wakes the reader (1 to 3 us; a queue per item costs several times that), and the reader
    drains everything per wake, so a busy engine pays for one wake however many items came. Whoever puts is
    bounded elsewhere: requests by the waiting queue, deltas by the steps, chunks by the output stream's cap.
    """

    __slots__ = ("_items", "_waiter")

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._waiter: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item) -> None:
        """Leave `item`. Never blocks; call it on the loop's thread."""
        self._items.append(item)
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def take(self) -> list[Item]:
        """Everything that has arrived, oldest first; empty when there is nothing."""
        items, self._items = self._items, []
        return items

    async def wait(self) -> None:
        """Return when there is something to take. Cancelled, it leaves the mailbox as it was."""
        while not self._items:
            if self._waiter is not None:
                raise RuntimeError("a mailbox has one reader")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    async def take_all(self) -> list[Item]:
        """Wait for something, then take everything. Cancelled, it takes nothing."""
        await self.wait()
        return self.take()
