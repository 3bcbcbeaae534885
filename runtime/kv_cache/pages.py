"""The free list of KV pages."""

from __future__ import annotations


class PagePool:
    """Allocates page ids 0 .. total - 1; knows nothing of who holds them."""

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
        """Remove `count` pages from the free list; raises `ValueError`, taking none, when there are fewer."""
        free = self._free
        if count > len(free):
            raise ValueError(f"{count} pages asked for, {len(free)} free.")
        if count == 0:
            return []
        pages = free[-count:]
        del free[-count:]
        return pages

    def free(self, pages: list[int]) -> None:
        """Return allocated pages; nobody may refer to them in a batch filled from now on."""
        self._free += pages

    def reset(self) -> None:
        """Every page is free again."""
        self._free = list(range(self.total - 1, -1, -1))

    def check(self, held: list[int]) -> None:
        """Raise `ValueError` unless the free and the `held` pages are together every page exactly once."""
        if sorted(self._free + held) != list(range(self.total)):
            raise ValueError(
                f"The pages do not balance: {len(self._free)} free + {len(held)} held, {self.total} in all."
            )
