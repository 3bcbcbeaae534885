"""What becomes of the pages in the prefix tree, for those who route requests by what a server has cached.

Each page has a hash of its tokens and of all before them, the same in every process. The events have the form that
vLLM and SGLang publish: lists that begin with their name.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

# ["BlockStored", hashes, hash before them or None, token ids, page size, adapter or None], ...
Event = list[Any]


class PageEvents:
    """Notes what enters the tree and leaves it, until somebody takes the notes."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._hashes: dict[int, int] = {}  # by page, of those in the tree
        self._events: list[Event] = [["AllBlocksCleared"]]  # whatever a server here before had

    def stored(
        self, pages: Sequence[int], ids: Sequence[int], before: int | None, namespace: Hashable
    ) -> None:
        """The tree has taken over these pages with these ids; `before` is the page in front of the first one."""
        size = self._page_size
        parent = None if before is None else self._hashes[before]
        above = repr(namespace).encode() if parent is None else parent.to_bytes(8, "big")
        tokens, hashes = np.array(ids, np.int64), []
        for number, page in enumerate(pages):
            block = tokens[number * size : (number + 1) * size].tobytes()
            digest = blake2b(above + block, digest_size=8).digest()
            self._hashes[page] = int.from_bytes(digest, "big") >> 1  # fits signed and unsigned readers
            hashes.append(self._hashes[page])
            above = hashes[-1].to_bytes(8, "big")
        self._events.append(["BlockStored", hashes, parent, list(ids), size, None])

    def removed(self, pages: Sequence[int]) -> None:
        """These pages have left the tree."""
        if pages:
            self._events.append(["BlockRemoved", [self._hashes.pop(page) for page in pages]])

    def cleared(self) -> None:
        """The tree is empty."""
        self._hashes.clear()
        self._events.append(["AllBlocksCleared"])

    def take(self) -> list[Event]:
        """The events since the last time, the oldest first."""
        events, self._events = self._events, []
        return events
