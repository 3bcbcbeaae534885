"""Store of responses that clients can continue. When it is full, the oldest responses are removed."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from runtime.errors import NotFound

MAX_RESPONSES = 4096
MAX_BYTES = 256 * 1024 * 1024


@dataclass(slots=True)
class StoredResponse:
    """A response, and the conversation that a later request needs to continue it."""

    response: dict[str, Any]
    owner: str  # name of the client's API key; empty without a key
    input_items: Sequence[Mapping[str, Any]]  # items of this request, without the earlier conversation
    messages: Sequence[Mapping[str, Any]]  # the whole conversation including the answer, but without instructions
    num_bytes_before: int = 0  # estimated size in bytes of the request and the conversation before it
    task: asyncio.Task[None] | None = None  # the task that computes a background response; else None
    num_bytes: int = field(init=False, default=0)

    @property
    def id(self) -> str:
        return self.response["id"]

    def measure(self) -> int:
        """Return the approximate size in bytes, including the conversation before this response.

        A message that several stored responses share counts in each of them, because it stays in memory until the
        last of these responses is removed.
        """
        return self.num_bytes_before + 2 * len(orjson.dumps(self.response["output"]))


class ResponseStore:
    """Responses with `store: true`. A client sees only the responses stored with its own key."""

    def __init__(self, *, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def put(self, stored: StoredResponse) -> None:
        """Store a response or its new state. If the store is full, the oldest finished responses are removed."""
        self._forget(stored.id)
        stored.num_bytes = stored.measure()
        self._stored[stored.id] = stored
        self._num_bytes += stored.num_bytes
        for name in [name for name, other in self._stored.items() if other.task is None]:
            if len(self._stored) <= self._max_responses and self._num_bytes <= self._max_bytes:
                return
            self._forget(name)

    def update(self, stored: StoredResponse) -> None:
        """Store the new state of a response, unless it was deleted in the meantime."""
        if stored.id in self._stored:
            self.put(stored)

    @property
    def num_running(self) -> int:
        """Number of responses that are still being computed."""
        return sum(stored.task is not None for stored in self._stored.values())

    def find(self, response_id: str, owner: str) -> StoredResponse | None:
        """Return the response, or None if this client has no such response."""
        stored = self._stored.get(response_id)
        return stored if stored is not None and stored.owner == owner else None

    def get(self, response_id: str, owner: str) -> StoredResponse:
        """Return the response. Raises `NotFound` if this client has no such response."""
        stored = self.find(response_id, owner)
        if stored is None:
            raise NotFound(f"Response with id '{response_id[:200]}' not found.", param="response_id")
        return stored

    def find_item(self, item_id: str, owner: str) -> Mapping[str, Any] | None:
        """Return an input or output item of a stored response by its id, or None if there is none."""
        for stored in reversed(self._stored.values()):
            if stored.owner != owner:
                continue
            for item in (*stored.response["output"], *stored.input_items):
                if item.get("id") == item_id:
                    return item
        return None

    def delete(self, response_id: str, owner: str) -> None:
        """Delete a response, and cancel it if it is running. Raises `NotFound` if the client has no such response."""
        stored = self.get(response_id, owner)
        self._forget(response_id)
        if stored.task is not None:
            stored.task.cancel()

    def _forget(self, response_id: str) -> None:
        stored = self._stored.pop(response_id, None)
        if stored is not None:
            self._num_bytes -= stored.num_bytes
