"""The queue of page copies that the next batch will carry."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.batch import PageCopy


class CopyQueue:
    """Collects page copies in order. Consecutive copies between the same two pools are merged into one `PageCopy`."""

    def __init__(self) -> None:
        self._copies: list[tuple[str, str, list[int], list[int]]] = []
        self._last_targets: set[int] = set()  # target pages of the `PageCopy` that was added last

    def __bool__(self) -> bool:
        return bool(self._copies)

    def add(self, source: str, target: str, source_pages: Sequence[int], target_pages: Sequence[int]) -> None:
        """Append copies of `source_pages[i]` of pool `source` to `target_pages[i]` of pool `target`.

        No page may occur twice in `target_pages`.
        """
        if not source_pages:
            return
        if self._copies:
            last_source, last_target, sources, targets = self._copies[-1]
            if (last_source, last_target) == (source, target) and self._last_targets.isdisjoint(target_pages):
                sources += source_pages
                targets += target_pages
                self._last_targets.update(target_pages)
                return
        self._copies.append((source, target, list(source_pages), list(target_pages)))
        self._last_targets = set(target_pages)

    def take(self) -> tuple[PageCopy, ...]:
        """Return the queued copies and empty the queue."""
        if not self._copies:
            return ()
        copies, self._copies = self._copies, []
        return tuple(
            PageCopy(source, target, np.array(sources, np.int32), np.array(targets, np.int32))
            for source, target, sources, targets in copies
        )

    def clear(self) -> None:
        """Drop all copies. Called when KV may be wrong after a failed step."""
        self._copies = []
