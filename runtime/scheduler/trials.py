"""Finds the request that makes steps fail, by recomputing smaller and smaller groups of requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from runtime.sequence import Sequence

# Maximum number of consecutive rounds that find no culprit. A round begins when a step fails outside a trial: the
# requests of this step are bisected. When a step fails after so many rounds, all its requests are ended.
MAX_ROUNDS = 2
# After this many consecutive requests have failed alone, all requests are ended, because none of them is the cause.
MAX_ALONE = 3


class Trials:
    """Groups of requests. One group at a time is computed, until each of its requests has a new token.

    If a group's step fails, the group is halved. A request that fails alone is the culprit. Each halving takes about
    two steps and recomputes the prompts. All other requests wait during the trials.
    """

    def __init__(self) -> None:
        self._groups: deque[list[int]] = deque()  # groups of request ids; the first group is being computed
        # Number of known tokens of each sequence of the first group when its computation began.
        self._known: dict[Sequence, int] = {}
        self._num_rounds = 0  # number of rounds since a culprit was last found
        self._num_alone = 0

    def __bool__(self) -> bool:
        return bool(self._groups)

    @property
    def allowed(self) -> set[Sequence] | None:
        """The sequences that may be computed now, or None if all may be."""
        return set(self._known) if self._groups else None

    def narrow(self, failed: list[int]) -> list[int]:
        """Record a failed step with these requests. Return the requests to end; the others are tried after `begin`."""
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
        """Allow only the first group with live sequences. `sequences` are all running and waiting sequences."""
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
        """Return whether each sequence of the first group has ended or has a new token. If so, drop this group.

        If the KV pool is `full`, waiting sequences are ignored, and their requests become the next group.
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
