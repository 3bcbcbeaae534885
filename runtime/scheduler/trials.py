"""Which of a failed step's requests it fails for: they are computed again, ever fewer of them at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from runtime.sequence import Sequence

MAX_ROUNDS = 2  # in a row that find nobody: the third failed step loses all of its requests
MAX_ALONE = 3  # in a row that fail alone: then it is not they, and nobody else is tried


class Trials:
    """Groups of requests to be computed one group after the other, until each request has brought a token.

    A group whose step fails is halved, and a request that fails alone is at fault. That takes about two steps for each
    halving and every prompt computed as often; whoever asks meanwhile waits.
    """

    def __init__(self) -> None:
        self._groups: deque[list[int]] = deque()  # ids of requests; the first is under way
        self._known: dict[Sequence, int] = {}  # choices of the first group -> tokens known when it began
        self._num_rounds = 0  # without anybody at fault
        self._num_alone = 0

    def __bool__(self) -> bool:
        return bool(self._groups)

    @property
    def allowed(self) -> set[Sequence] | None:
        """Who may be computed now; None where all may."""
        return set(self._known) if self._groups else None

    def narrow(self, failed: list[int]) -> list[int]:
        """A step with these requests failed -> those to be given up. The others are to be tried: see `begin`."""
        if not failed:
            return []
        alone = len(failed) == 1 and bool(self._groups) and failed == self._groups[0]
        if not self._groups:
            self._num_rounds += 1
        others = [[each for each in group if each not in set(failed)] for group in self._groups]
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
        lost = [*failed, *(each for group in self._groups for each in group)]
        self.stop()
        return lost

    def begin(self, sequences: Iterable[Sequence]) -> None:
        """Try the first group in which somebody is left; `sequences` are all that run or wait."""
        by_request: dict[int, list[Sequence]] = {}
        for sequence in sequences:
            by_request.setdefault(sequence.request.id, []).append(sequence)
        self._known = {}
        while self._groups and not self._known:
            members = [sequence for each in self._groups[0] for sequence in by_request.get(each, ())]
            self._known = {sequence: len(sequence.ids) for sequence in members}
            if not members:
                self._groups.popleft()

    def passed(self, full: bool) -> bool:
        """Whether the group's step can be trusted; those for whom there was no room (`full`) are tried next."""
        open_ids: dict[int, None] = {}
        for sequence, known in self._known.items():
            if sequence.finish is None and len(sequence.ids) == known:
                if sequence.sequence_index >= 0 or not full:
                    return False
                open_ids[sequence.request.id] = None
        self._next(list(open_ids))
        return True

    def skip(self) -> None:
        """Nothing of this group can be computed now: that shall hold up nobody."""
        self._next([])

    def stop(self) -> None:
        """Let all be computed at once."""
        self._groups.clear()
        self._known = {}
        self._num_rounds = self._num_alone = 0

    def _next(self, left: list[int]) -> None:
        self._num_alone = 0
        self._groups.popleft()
        if left:
            self._groups.appendleft(left)
