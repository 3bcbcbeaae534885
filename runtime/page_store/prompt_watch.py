"""Lets a decode server follow the progress of a prompt on the prefill servers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast

from runtime.page_store.offered_pages import OfferedPages
from runtime.page_store.transfer_protocol import BEAT_S, MAX_GREETING, PROGRESS, PromptState, num_groups_in

logger = logging.getLogger("penstock.core")

TIMEOUT_S = 10.0  # longest time in which a prefill server must answer
OTHER_PAGES = "The prefill server %s:%d has another model, cache layout or number of ranks (%s)."


class PromptWatch:
    """The progress of one prompt on all prefill servers. Belongs to the event loop."""

    def __init__(self) -> None:
        self._progress: dict[object, tuple[int, PromptState]] = {}  # key: the connection or the local store
        self._changed = asyncio.Event()
        self._connecting: set[asyncio.Task[None]] = set()
        self._following: list[PromptConnection] = []
        self._local = contextlib.ExitStack()

    @property
    def progress(self) -> tuple[int, PromptState]:
        """(number of leading keys that have a page, state of the prompt). ENDED if no server can be reached."""
        states = {state for _, state in self._progress.values()}
        if self._connecting:
            states.add(PromptState.UNKNOWN)
        count = max((count for count, _ in self._progress.values()), default=0)
        if PromptState.PENDING in states:
            return count, PromptState.PENDING
        return count, PromptState.UNKNOWN if states == {PromptState.UNKNOWN} else PromptState.ENDED

    async def wait(self) -> None:
        """Wait until the progress may have changed, or `BEAT_S` has passed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BEAT_S):
                await self._changed.wait()
        self._changed.clear()
        for each in self._following:
            each.check()

    def wake(self) -> None:
        """Make `wait` return now."""
        self._changed.set()

    def follow_local(self, offered: OfferedPages | None, prompt: bytes, keys: Sequence[bytes]) -> bool:
        """Follow the prompt on a replica in this process. Return False if there is no such replica."""
        if offered is None:
            return False
        loop = asyncio.get_running_loop()

        def look() -> None:
            self.note(offered, *offered.progress(watch))

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # raised if the loop is closed
                loop.call_soon_threadsafe(look)

        watch = self._local.enter_context(offered.watching(prompt, keys, wake))
        look()
        return True

    def connect(self, connecting: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine that connects to a prefill server. Until it ends, the prompt may be on that server."""
        task = asyncio.create_task(connecting)
        self._connecting.add(task)
        task.add_done_callback(self._connected)

    def _connected(self, task: asyncio.Task[None]) -> None:
        self._connecting.discard(task)
        self._changed.set()

    def follow(self, following: PromptConnection) -> None:
        """Register a connection, which `close` will close."""
        self._following.append(following)

    def note(self, source: object, count: int, state: PromptState) -> None:
        """Record the progress on a prefill server."""
        self._progress[source] = count, state
        self._changed.set()

    def lost(self, source: object) -> None:
        """Record that a prefill server cannot be reached any more."""
        self._progress.pop(source, None)
        self._changed.set()

    def close(self) -> None:
        """Stop following the prompt."""
        self._local.close()
        for task in self._connecting:
            task.cancel()
        for each in self._following:
            each.transport.abort()


class PromptConnection(asyncio.Protocol):
    """A connection on which a prefill server sends the progress of one prompt."""

    transport: asyncio.Transport

    def __init__(
        self, peer: tuple[str, int], watch: PromptWatch, request: bytes, greeted: Callable[[int], None]
    ) -> None:
        """Create the protocol. `greeted` is called with the server's number of attention groups, once it is known."""
        self.peer = peer
        self._watch, self._request, self._greeted = watch, request, greeted
        self._data = b""
        self._accepted = False
        self._heard_s = time.monotonic()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._watch.follow(self)
        self._watch.note(self, 0, PromptState.UNKNOWN)
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._heard_s = time.monotonic()
        self._data += data
        if not self._accepted:
            line, newline, rest = self._data.partition(b"\n")
            num_groups = num_groups_in(line) if newline else None
            if (newline and num_groups is None) or len(line) > MAX_GREETING:
                logger.warning(OTHER_PAGES, *self.peer, line[:MAX_GREETING])
                self.transport.abort()
            if num_groups is None:
                return
            self._accepted, self._data = True, rest
            self._greeted(num_groups)
        whole = len(self._data) // PROGRESS.size * PROGRESS.size
        if self._accepted and whole and not self.transport.is_closing():
            count, state = PROGRESS.unpack(self._data[whole - PROGRESS.size : whole])
            self._watch.note(self, count, PromptState(state))
            self._data = self._data[whole:]

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.lost(self)

    def check(self) -> None:
        """Close the connection if the prefill server has been silent for too long."""
        if time.monotonic() - self._heard_s > TIMEOUT_S:
            self.transport.abort()
