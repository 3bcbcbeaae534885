"""The prefix tree: maps token sequences to the pages that hold their KV.

A node has a run of consecutive full pages and their token ids. Its children continue the run, and differ in their first
page. A running sequence locks the node where its cached prefix ends. Every node counts the locks on itself and on its
descendants. All descendants of an unlocked node are therefore unlocked, so leaves can be evicted one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count, islice

PINNED = 1 << 60  # added to the eviction order of pinned nodes; larger than every value of the clock


class Node:
    """A run of pages. If the node is split, this object keeps the *end* of the run, because locks refer to the end."""

    __slots__ = ("children", "ids", "last_used", "locks", "pages", "parent", "pins")

    def __init__(self, parent: Node | None, ids: list[int], pages: list[int]) -> None:
        self.parent = parent  # None for a root and for a node that was removed
        self.ids = ids
        self.pages = pages
        self.children: dict[tuple[int, ...], Node] = {}
        self.locks = 0
        self.pins = 0  # number of pinned prefixes that end here
        self.last_used = 0

    @property
    def order(self) -> int:
        """Sort key for eviction; the node with the lowest key is evicted first.

        Unpinned nodes come before pinned ones. Within both groups, the least recently used node comes first.
        """
        return self.last_used + PINNED if self.pins else self.last_used


class RadixTree:
    """Finds the longest cached prefix in whole pages. Has locks and evicts the least recently used pages.

    Different namespaces (such as an adapter or a cache salt) share no pages. The tree owns inserted pages until
    `evict`, `remove` or `clear` returns them.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.num_pages = 0
        self.num_evictable = 0  # number of pages of unlocked nodes
        self._roots: dict[Hashable, Node] = {}
        self._num_nodes = 0
        self._clock = 0
        self._serial = count()
        self._leaves: list[tuple[int, int, Node]] = []  # heap of (order, tie, node); stale entries are skipped
        # Number of pages evicted from each pinned node since the last `take_shortened`.
        self._shortened: Counter[Node] = Counter()

    def match_length(self, ids: list[int], limit: int, namespace: Hashable = None) -> int:
        """Return how many of the first `limit` tokens are in the tree. Does not change the tree."""
        root = self._roots.get(namespace)
        if root is None:
            return 0
        _, matched, _, more = self._walk(root, ids, limit)
        return matched + more * self.page_size

    def path(self, ids: list[int], limit: int, namespace: Hashable = None) -> list[Node]:
        """Return the nodes that match `ids[:limit]`, from the root on. The last node may match only in part."""
        root = self._roots.get(namespace)
        if root is None:
            return []
        node, _, child, _ = self._walk(root, ids, limit)
        nodes = []
        current = child or node
        while current is not None:
            nodes.append(current)
            current = current.parent
        return nodes[::-1]

    def pages(self, ids: list[int], limit: int, namespace: Hashable = None) -> list[int]:
        """Return the pages that match the first `limit` tokens, in order. Does not change the tree."""
        root = self._roots.get(namespace)
        if root is None:
            return []
        node, _, child, more = self._walk(root, ids, limit)
        return path_pages(node) + (child.pages[:more] if child is not None else [])

    def outline(self, limit: int) -> tuple[list[tuple[int, int, int]], int]:
        """Return up to `limit` nodes in breadth-first order, and the total number of nodes.

        Each node is a tuple (index of its parent in this list, number of pages, number of locks). The parent index of a
        root is -1.
        """
        num_nodes = self._num_nodes + len(self._roots)
        return [(parent, len(node.pages), node.locks) for parent, node in self._first_nodes(limit)], num_nodes

    def outline_ids(self, limit: int, num_ids: int) -> list[list[int]]:
        """Return the first `num_ids` keys of each node that `outline` returns, in the same order."""
        return [node.ids[:num_ids] for _, node in self._first_nodes(limit)]

    def _first_nodes(self, limit: int) -> list[tuple[int, Node]]:
        """Return up to `limit` nodes in breadth-first order, each with the index of its parent."""
        nodes = [(-1, root) for root in islice(self._roots.values(), limit)]
        for index, (_, node) in enumerate(nodes):  # the loop extends the list while it runs
            nodes += [(index, child) for child in islice(node.children.values(), limit - len(nodes))]
        return nodes

    def lock(self, ids: list[int], limit: int, namespace: Hashable = None) -> tuple[Node, list[int]]:
        """Lock the longest cached prefix of `ids[:limit]`. Return the prefix's last node, and its pages in order."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(None, [], [])
        node, _, child, more = self._walk(root, ids, limit)
        if child is not None:
            node = self._split(child, more)
        self._count_lock(node, None)
        return node, path_pages(node)

    def insert(self, node: Node, ids: list[int], pages: list[int]) -> tuple[Node, list[int]]:
        """Insert full pages after a locked prefix that ends at `node`.

        The lock moves to the first returned value, the new end. If the tree already has pages for the first of these
        tokens, they are the second returned value. The caller keeps its own pages for these tokens, and the tree
        becomes the owner of the remaining ones.
        """
        size, locked, known, position = self.page_size, node, [], 0
        while position < len(ids):
            key = tuple(ids[position : position + size])
            child = node.children.get(key)
            if child is None:
                child = Node(node, ids[position:], pages[position // size :])
                node.children[key] = child
                self._num_nodes += 1
                self.num_pages += len(child.pages)
                self.num_evictable += len(child.pages)
            else:
                shared = self._num_common_pages(child, ids, position, len(ids))
                if shared < len(child.pages):
                    child = self._split(child, shared)
                known += child.pages
            position += len(child.ids)
            node = child
        self._count_lock(node, locked)
        return node, known

    def unlock(self, node: Node) -> None:
        """Release one lock on a node that `lock` or `insert` returned."""
        self._clock += 1
        current: Node | None = node
        while current is not None:
            current.last_used = self._clock
            current.locks -= 1
            if not current.locks:
                self.num_evictable += len(current.pages)
            root, current = current, current.parent
        self._offer(node)
        self._drop_root_if_empty(root)

    def pin(self, node: Node) -> None:
        """Pin the prefix that ends at this node, so that it is evicted only after all unpinned prefixes."""
        node.pins += 1
        self._offer(node)

    def unpin(self, node: Node) -> None:
        """Remove one pin from a node, which may already have been evicted from the tree."""
        node.pins -= 1
        self._offer(node)

    def take_shortened(self) -> Counter[Node]:
        """Return and clear the number of pages evicted from each pinned node.

        A node without a parent was evicted completely.
        """
        shortened, self._shortened = self._shortened, Counter()
        return shortened

    def evict(self, num_pages: int) -> list[int]:
        """Remove and return up to `num_pages` pages, from the ends of the least recently used leaves on."""
        freed: list[int] = []
        while len(freed) < num_pages and self._leaves:
            order, _, node = heappop(self._leaves)
            if not _is_free_leaf(node) or node.order != order:
                continue
            missing = num_pages - len(freed)
            if len(node.pages) > missing:
                freed += node.pages[-missing:]
                del node.pages[-missing:]
                del node.ids[-missing * self.page_size :]
                if node.pins:
                    self._shortened[node] += missing
                self._offer(node)
            else:
                freed += node.pages
                self._remove(node)
        self.num_pages -= len(freed)
        self.num_evictable -= len(freed)
        return freed

    def remove(self, node: Node) -> list[int]:
        """Release the caller's lock on a node. Remove the node, and then its ancestors up to the first one in use.

        A node is in use if it has locks or children. Returns the removed pages.
        """
        freed: list[int] = []
        self.unlock(node)
        while (parent := node.parent) is not None and not node.locks and not node.children:
            freed += node.pages
            self._remove(node)
            node = parent
        self.num_pages -= len(freed)
        self.num_evictable -= len(freed)
        return freed

    def clear(self) -> list[int]:
        """Remove and return all pages, including locked ones. Existing locks become invalid."""
        pages = [page for node in self._nodes() for page in node.pages]
        self._roots.clear()
        self._leaves.clear()
        self._shortened.clear()
        self._num_nodes = self.num_pages = self.num_evictable = 0
        return pages

    def check(self, holders: Iterable[Node]) -> list[int]:
        """Raise `ValueError` unless locks, counts and keys agree with the lock holders. Return all pages."""
        locks: Counter[int] = Counter()
        for holder in holders:
            current: Node | None = holder
            while current is not None:
                locks[id(current)] += 1
                root, current = current, current.parent
            if root not in self._roots.values():
                raise ValueError("A locked node is no longer in the tree.")
        nodes = list(self._nodes())
        evictable_leaves = {(order, id(node)) for order, _, node in self._leaves}
        for node in nodes:
            if node.locks != locks[id(node)]:
                raise ValueError(f"A node counts {node.locks} locks but has {locks[id(node)]} holders.")
            if node.parent is not None:
                self._check_run(node, evictable_leaves)
        if len(nodes) - len(self._roots) != self._num_nodes:
            raise ValueError("The number of nodes is wrong.")
        pages = [page for node in nodes for page in node.pages]
        evictable = sum(len(node.pages) for node in nodes if not node.locks)
        if len(pages) != self.num_pages or evictable != self.num_evictable:
            raise ValueError("The page counts of the tree are wrong.")
        return pages

    def _check_run(self, node: Node, evictable_leaves: set[tuple[int, int]]) -> None:
        parent = node.parent
        if not node.pages or len(node.ids) != len(node.pages) * self.page_size:
            raise ValueError("A node's ids do not fill its pages.")
        if parent is None or parent.children.get(tuple(node.ids[: self.page_size])) is not node:
            raise ValueError("A node is not at the key of its ids.")
        if _is_free_leaf(node) and (node.order, id(node)) not in evictable_leaves:
            raise ValueError("An unlocked leaf is not in the eviction order.")

    def _nodes(self) -> Iterator[Node]:
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _walk(self, node: Node, ids: list[int], limit: int) -> tuple[Node, int, Node | None, int]:
        """Find the longest match of `ids[:limit]` below `node`.

        Returns the last node that matches in full, the number of tokens up to its end, the child of this node that
        matches in part (or None), and the number of matched pages of the child.
        """
        size, position = self.page_size, 0
        while position + size <= limit:
            child = node.children.get(tuple(ids[position : position + size]))
            if child is None:
                break
            shared = self._num_common_pages(child, ids, position, limit)
            if shared < len(child.pages):
                return node, position, child, shared
            node = child
            position += len(child.ids)
        return node, position, None, 0

    def _num_common_pages(self, child: Node, ids: list[int], start: int, stop: int) -> int:
        """Return how many pages of `child` match `ids[start:stop]`. Bisects, because comparing slices is fast in C."""
        size, child_ids = self.page_size, child.ids
        low, high = 0, min(len(child_ids), stop - start) // size
        middle = high
        while low < high:
            if child_ids[low * size : middle * size] == ids[start + low * size : start + middle * size]:
                low = middle
            else:
                high = middle - 1
            middle = (low + high + 1) // 2
        return low

    def _split(self, node: Node, num_pages: int) -> Node:
        """Split a node after `num_pages` pages. Return its new parent, which gets the first pages."""
        parent, cut = node.parent, num_pages * self.page_size
        if parent is None:
            raise ValueError("A root cannot be split.")
        first = Node(parent, node.ids[:cut], node.pages[:num_pages])
        first.locks, first.last_used = node.locks, node.last_used
        parent.children[tuple(first.ids[: self.page_size])] = first
        node.ids, node.pages, node.parent = node.ids[cut:], node.pages[num_pages:], first
        first.children[tuple(node.ids[: self.page_size])] = node
        self._num_nodes += 1
        return first

    def _count_lock(self, node: Node, stop: Node | None) -> None:
        current: Node | None = node
        while current is not stop and current is not None:
            if not current.locks:
                self.num_evictable -= len(current.pages)
            current.locks += 1
            current = current.parent

    def _remove(self, node: Node) -> None:
        parent = node.parent
        if parent is None:
            raise ValueError("A root is removed with its last child.")
        del parent.children[tuple(node.ids[: self.page_size])]
        if node.pins:
            self._shortened[node] += len(node.pages)
        node.parent = None
        self._num_nodes -= 1
        self._offer(parent)
        if parent.parent is None:
            self._drop_root_if_empty(parent)

    def _offer(self, node: Node) -> None:
        """Make a node a candidate for eviction if it is an unlocked leaf."""
        if not _is_free_leaf(node):
            return
        heappush(self._leaves, (node.order, next(self._serial), node))
        if len(self._leaves) > 2 * self._num_nodes + 64:
            self._leaves = [entry for entry in self._leaves if _is_free_leaf(entry[2]) and entry[2].order == entry[0]]
            heapify(self._leaves)

    def _drop_root_if_empty(self, root: Node) -> None:
        if not root.locks and not root.children:
            for namespace, node in self._roots.items():
                if node is root:
                    del self._roots[namespace]
                    return


def _is_free_leaf(node: Node) -> bool:
    return not node.locks and not node.children and node.parent is not None


def path_pages(node: Node) -> list[int]:
    """Return the pages from the root to the end of this node, in order."""
    runs = []
    current: Node | None = node
    while current is not None:
        runs.append(current.pages)
        current = current.parent
    return [page for run in reversed(runs) for page in run]
