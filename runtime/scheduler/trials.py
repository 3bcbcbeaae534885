"""Finds the request that makes steps fail, by recomputing smaller and smaller groups of requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from runtime.sequence import Sequence

# Number of consecutive rounds that may find no culprit. In a round, a step fails outside trials, and its requests are
# then bisected. The next such failure ends all requests of its step.
MAX_ROUNDS = 2
MAX_ALONE = 3  # after this many consecutive requests fail alone, all requests are ended: none is the cause


class Trials:
    """Groups of requests, which are computed one group at a time until each request has a new token.

    If a group's step fails, the group is halved. A request that fails alone is the culprit. Each halving takes about
    two steps and recomputes the prompts. All other requests wait during the trials.
    """

    def __init__(self) -> None:
        self._groups: deque[list[int]] = deque()  # request ids; the first group is being computed
        # For each sequence of the first group: its number of known tokens when the group began.
        self._known: dict[Sequence, int] = {}
        self._num_rounds = 0  # rounds since the last culprit
        self._num_alone = 0

    def __bool__(self) -> bool:
        return bool(self._groups)

    @property
    def allowed(self) -> set[Sequence] | None:
        """The sequences that may be computed now, or None if all may be."""
        return set(self._known) if self._groups else None

    def narrow(self, failed: list[int]) -> list[int]:
        """Record a failed step with these requests. Return the requests to end; `begin` tries the remaining ones."""
        if not failed:
            return []
        alone = len(failed) == 1 and bool(self._groups) and failed == self._groups[0]
        if not self._groups:
            self._num_rounds += 1
        others = [[request_id for request_id in group if request_id not in set(failed)] for group in self._groups]
        self._groups = deque(group for group in others if group)
        if alone:
            self._num_rounds = 0
            self._num_alone += 1
            if self._num_alone < MAX_ALONE:
                return failed
        elif self._num_rounds <= MAX_ROUNDS:
            middle = (len(failed) + 1) // 2
            self._groups.extendleft(half for half in (failed[middle:], failed[:middle]) if half)
            return []
        lost = [*failed, *(request_id for group in self._groups for request_id in group)]
        self.stop()
        return lost

    def begin(self, sequences: Iterable[Sequence]) -> None:
        """Allow only sequences of the first group that has live ones. `sequences` are all running and waiting ones."""
        by_request: dict[int, list[Sequence]] = {}
        for sequence in sequences:
            by_request.setdefault(sequence.request.id, []).append(sequence)
        self._known = {}
        while self._groups and not self._known:
            members = [sequence for id_ in self._groups[0] for sequence in by_request.get(id_, ())]
            self._known = {sequence: len(sequence.ids) for sequence in members}
            if not members:
                self._groups.popleft()

    def passed(self, full: bool) -> bool:
        """Return whether each sequence of the first group has ended or has a new token. If so, go on to the next group.

        If the pool is `full`, waiting sequences are ignored. Their requests become the next group.
        """
        open_ids: dict[int, None] = {}
        for sequence, known in self._known.items():
            if sequence.finish is None and len(sequence.ids) == known:
                if sequence.sequence_index >= 0 or not full:
                    return False
                open_ids[sequence.request.id] = None
        self._next(list(open_ids))
        return True

    def skip(self) -> None:
        """Skip the first group, because none of its sequences can be computed now."""
        self._next([])

    def stop(self) -> None:
        """End the trials. All sequences may be computed again."""
        self._groups.clear()
        self._known = {}
        self._num_rounds = self._num_alone = 0

    def _next(self, left: list[int]) -> None:
        self._num_alone = 0
        self._groups.popleft()
        if left:
            self._groups.appendleft(left)
