"""Pinned prefixes: prefixes that clients asked to keep cached, within a budget of pages.

A pinned prefix is evicted only after all unpinned ones. It is still evicted if running sequences need its pages, so a
pin never delays a request.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import NamedTuple

from runtime.kv_cache.radix_tree import Node, RadixTree, path_pages


class _Pin(NamedTuple):
    node: Node  # node of the prefix tree where the prefix ends
    num_pages: int


class Pins:
    """The pinned prefixes of a tree, by client and name.

    A new pin replaces the client's older pin with the same name. If all pins exceed the budget, the client with the
    most pinned pages loses its oldest pin.
    """

    def __init__(self, tree: RadixTree, max_pages: int) -> None:
        self.max_pages = max_pages
        self.num_pages = 0  # number of pinned pages; a page of several pins counts once for each pin
        self._tree = tree
        self._pins: OrderedDict[tuple[str, str], _Pin] = OrderedDict()
        self._pages_of: Counter[str] = Counter()  # number of pinned pages by client

    def __len__(self) -> int:
        return len(self._pins)

    def add(self, owner: str, name: str, node: Node, num_pages: int) -> None:
        """Pin the prefix that ends at `node`. Does nothing if the prefix is larger than the whole budget."""
        if (owner, name) in self._pins:
            self._drop(owner, name)
        if not 0 < num_pages <= self.max_pages:
            return
        self._pins[owner, name] = _Pin(node, num_pages)
        self.num_pages += num_pages
        self._pages_of[owner] += num_pages
        self._tree.pin(node)
        while self.num_pages > self.max_pages:
            most = max(self._pages_of, key=self._pages_of.__getitem__)
            self._drop(*next(key for key in self._pins if key[0] == most))

    def settle(self) -> None:
        """Subtract pages that were evicted from pinned prefixes. Drop pins whose last node was evicted."""
        lost = self._tree.take_shortened()
        if not lost:
            return
        for (owner, name), pin in list(self._pins.items()):
            if pin.node not in lost:
                continue
            if pin.node.parent is None:
                self._drop(owner, name)
            else:
                self._pins[owner, name] = pin._replace(num_pages=pin.num_pages - lost[pin.node])
                self.num_pages -= lost[pin.node]
                self._pages_of[owner] -= lost[pin.node]

    def check(self) -> None:
        """Raise `ValueError` unless the page counts of all pins match the tree."""
        pages_of: Counter[str] = Counter()
        for (owner, _), pin in self._pins.items():
            pages_of[owner] += pin.num_pages
            if pin.node.parent is None or pin.node.pins < 1 or len(path_pages(pin.node)) != pin.num_pages:
                raise ValueError("A pin does not count the pages of its prefix.")
        if pages_of != self._pages_of or pages_of.total() != self.num_pages or self.num_pages > max(0, self.max_pages):
            raise ValueError("The pinned pages do not balance.")

    def clear(self) -> None:
        """Remove all pins. Called when the tree is emptied."""
        for pin in self._pins.values():
            self._tree.unpin(pin.node)
        self._pins.clear()
        self._pages_of.clear()
        self.num_pages = 0

    def _drop(self, owner: str, name: str) -> None:
        pin = self._pins.pop((owner, name))
        self.num_pages -= pin.num_pages
        self._pages_of[owner] -= pin.num_pages
        if not self._pages_of[owner]:
            del self._pages_of[owner]
        self._tree.unpin(pin.node)
