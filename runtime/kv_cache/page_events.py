"""Events about pages that enter and leave the prefix tree. Routers use them to know what each server has cached.

A page is identified by a hash of its own tokens and all preceding tokens, which is the same in every process. Events
have the format of vLLM and SGLang: lists that begin with the event's name.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

# For example, ["BlockStored", hashes, parent hash or None, token ids, page size, adapter or None].
Event = list[Any]


class PageEvents:
    """Records events until `take` is called."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._hashes: dict[int, int] = {}  # page in the tree -> its hash
        self._events: list[Event] = [["AllBlocksCleared"]]  # so that a router forgets the pages of an earlier server

    def stored(self, pages: Sequence[int], ids: Sequence[int], parent_page: int | None, namespace: Hashable) -> None:
        """Record that pages entered the tree.

        `ids` are their tokens, and `parent_page` is the page before the first one.
        """
        size = self._page_size
        parent = None if parent_page is None else self._hashes[parent_page]
        previous = repr(namespace).encode() if parent is None else parent.to_bytes(8, "big")
        tokens, hashes = np.array(ids, np.int64), []
        for number, page in enumerate(pages):
            block = tokens[number * size : (number + 1) * size].tobytes()
            digest = blake2b(previous + block, digest_size=8).digest()
            # 63 bits, which also fit into a signed 64-bit integer.
            self._hashes[page] = int.from_bytes(digest, "big") >> 1
            hashes.append(self._hashes[page])
            previous = hashes[-1].to_bytes(8, "big")
        self._events.append(["BlockStored", hashes, parent, list(ids), size, None])

    def removed(self, pages: Sequence[int]) -> None:
        """Record that pages left the tree."""
        if pages:
            self._events.append(["BlockRemoved", [self._hashes.pop(page) for page in pages]])

    def cleared(self) -> None:
        """Record that the tree was emptied."""
        self._hashes.clear()
        self._events.append(["AllBlocksCleared"])

    def take(self) -> list[Event]:
        """Return the recorded events, oldest first, and clear them."""
        events, self._events = self._events, []
        return events
