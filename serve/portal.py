"""A loop of its own in a thread of its own, for callers that have none."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Thread

import anyio
from anyio.from_thread import BlockingPortal


@contextmanager
def open_portal(name: str) -> Iterator[BlockingPortal]:
    """A portal into a fresh loop; leaving it ends the loop and its thread.

    The thread is a daemon: an interpreter that ends while somebody forgot to leave must not wait for it, which
    it would for anyio's own portals.
    """
    opened: Future[BlockingPortal] = Future()
    thread = Thread(target=anyio.run, args=(_host, opened), name=name, daemon=True)
    thread.start()
    portal = opened.result()
    try:
        yield portal
    finally:
        portal.call(portal.stop)
        thread.join()


async def _host(opened: Future[BlockingPortal]) -> None:
    async with BlockingPortal() as portal:
        opened.set_result(portal)
        await portal.sleep_until_stopped()
