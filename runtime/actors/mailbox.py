"""A queue between coroutines, with many writers and one reader, which takes all items at once."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Mailbox(Generic[Item]):
    """An unbounded queue on one event loop, with a single reader.

    A future wakes the reader in 1 to 3 us, and the reader takes all items at once. `asyncio.Queue` costs several times
    as much per item. The mailbox needs no bound of its own: the waiting queue limits the requests, the steps limit the
    deltas, and the output stream's limit applies to chunks.
    """

    __slots__ = ("_items", "_waiter")

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._waiter: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item) -> None:
        """Add an item. Never blocks. Must be called on the event-loop thread."""
        self._items.append(item)
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def take(self) -> list[Item]:
        """Return and remove all items, oldest first. The list may be empty."""
        items, self._items = self._items, []
        return items

    async def wait(self) -> None:
        """Wait until there is an item. Cancellation leaves the mailbox unchanged."""
        while not self._items:
            if self._waiter is not None:
                raise RuntimeError("A mailbox has a single reader.")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    async def take_all(self) -> list[Item]:
        """Wait for an item, then take all items. Cancellation leaves the mailbox unchanged."""
        await self.wait()
        return self.take()
