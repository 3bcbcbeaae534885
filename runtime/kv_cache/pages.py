"""The free list of KV pages."""

from __future__ import annotations


class PagePool:
    """Allocates the page ids 0 .. total - 1. Does not record owners."""

    __slots__ = ("_free", "total")

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"A pool needs at least one page, not {total}.")
        self.total = total
        self._free = list(range(total - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Remove `count` pages from the free list and return them.

        Raises `ValueError`, without effect, if too few are free.
        """
        free = self._free
        if count > len(free):
            raise ValueError(f"{count} pages requested, {len(free)} free.")
        if count == 0:
            return []
        pages = free[-count:]
        del free[-count:]
        return pages

    def free(self, pages: list[int]) -> None:
        """Free allocated pages. No batch that is built later may use them for their previous owner."""
        self._free += pages

    def reset(self) -> None:
        """Free all pages."""
        self._free = list(range(self.total - 1, -1, -1))

    def check(self, used: list[int]) -> None:
        """Raise `ValueError` unless every page is either free or in `used`, exactly once."""
        if sorted(self._free + used) != list(range(self.total)):
            raise ValueError(f"The pages do not balance: {len(self._free)} free + {len(used)} used, of {self.total}.")
