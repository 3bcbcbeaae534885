"""How many calls a client has open at once, from its request's head to the end of its answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import Scope

from runtime.errors import TooManyRequests
from serve.access import Client


class OpenCalls:
    """Counts by key, or by address where no key is shown, and refuses what is over the limit; None: none is."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._num_open: dict[str, int] = {}

    @contextmanager
    def one_of(self, client: Client, scope: Scope) -> Iterator[None]:
        """While a call is open. Raises `TooManyRequests`."""
        if self._limit is None:
            yield
            return
        name = _name_of(client, scope)
        num_open = self._num_open.get(name, 0)
        if num_open >= self._limit:
            raise TooManyRequests(
                f"This client has {num_open} calls open, which is as many as it may have "
                "(--max-open-calls-per-client)."
            )
        self._num_open[name] = num_open + 1
        try:
            yield
        finally:
            left = self._num_open[name] - 1
            if left:
                self._num_open[name] = left
            else:
                del self._num_open[name]


def _name_of(client: Client, scope: Scope) -> str:
    if client.name:
        return f"key {client.name}"
    peer = scope.get("client")
    return f"address {peer[0] if peer else ''}"
