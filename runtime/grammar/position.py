"""How far an output has come in its grammar, and when it may end."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.constraint import Output, allow, forbid
from runtime.grammar.backend import Matcher
from runtime.grammar.marker import Marker


class Ends(NamedTuple):
    """When an output may end."""

    model: frozenset[int]  # token ids that the backend allows where the grammar accepts
    request: frozenset[int]  # further ones that end this request's output, allowed there as well
    # Before so many, and with `avoid` at any time, it ends only where nothing else is allowed.
    min_tokens: int
    avoid: bool


class Position:
    """How far one choice has come. Belongs to the mask thread but for its making."""

    __slots__ = (
        "_compiled", "_ends", "_is_free", "_marked", "_marker", "_num_seen", "forced",
        "forced_masks", "kept", "matcher", "num_answered", "num_asked", "on_slow_thread", "opened_by", "slow",
    )  # fmt: skip

    def __init__(
        self, compiled: Matcher, ends: Ends, marker: Marker | None, opened_by: int | None = None
    ) -> None:
        self._compiled = compiled
        self._ends = ends
        self._marker = marker
        self.opened_by = opened_by
        self._start()
        self.slow = False  # whether its masks take long, so that others must not wait for them
        # What it was asked: with forced tokens twice at a time, which one thread has to answer, in order. The event
        # loop counts what it asks, and that thread what it has answered.
        self.num_asked = self.num_answered = 0
        self.on_slow_thread = False  # the thread that answers what is asked now

    def _start(self) -> None:
        self.forced: list[int] = []  # tokens that the matcher has taken and the output must go on with
        self.forced_masks: list[NDArray[np.int32]] = []  # of each of them
        self.kept: NDArray[np.int32] | None = None  # the mask behind them
        self.matcher: Matcher | None = None  # None: the constraint has not begun
        self._num_seen = 0
        self._marked = 0
        self._is_free = self._marker is not None and self.opened_by is None

    def advance(self, output: Output) -> bool:
        """Go to the end of this output, which is the last one and more, or begins anew.

        False where the constraint has not begun. Raises `ValueError` for an output that the grammar does not allow.
        """
        new, num_before = output.new_ids, output.num_before
        if num_before != self._num_seen:
            if num_before:
                raise ValueError("The output is not the last one and more.")
            self._start()
        self._num_seen += len(new)
        if not num_before and new and new[0] == self.opened_by:
            self._start()
            self._num_seen, self._is_free = len(new), True
            new = new[1:]
        if self.matcher is None:
            new = self._behind_marker(new)
        if self.matcher is None:
            return False
        if self.forced:
            count = min(len(self.forced), len(new))
            if new[:count] != self.forced[:count]:
                raise ValueError("the output does not go on with what was forced")
            del self.forced[:count], self.forced_masks[:count]
            new = new[count:]
        if new:
            self.kept = None
            if not self.matcher.consume(new):
                raise ValueError(f"the grammar does not allow its own output: {self.matcher.error:.200}")
        return True

    def ends_by(self, token_id: int) -> bool:
        """Whether this token ends the output."""
        return token_id in self._ends.model or token_id in self._ends.request

    def force(self, token_id: int, mask: NDArray[np.int32]) -> bool:
        """Let the matcher go on by the token that `mask` leaves; False where it can not."""
        if self.matcher is None or not self.matcher.consume([token_id]):
            return False
        self.forced.append(token_id)
        self.forced_masks.append(mask)
        return True

    def _behind_marker(self, new: list[int]) -> list[int]:
        """What of these tokens the grammar is about."""
        marker = self._marker
        if marker is None or not self._is_free:
            self.matcher = self._compiled.copy()
            return new
        for index, token_id in enumerate(new):
            self._marked = marker.advance(self._marked, token_id)
            if self._marked == marker.length:
                self.matcher = self._compiled.copy()
                return new[index + 1 :]
        return []

    def free_mask(self, num_words: int) -> NDArray[np.int32] | None:
        """Before the constraint begins: what is allowed; None: everything. The output cannot end there."""
        if self._marker is None:
            return None
        mask = self._marker.mask(self._marked, num_words)
        mask = np.full(num_words, -1, np.int32) if mask is None else mask.copy()
        forbid(mask, self._ends.model)
        return mask

    def finish_mask(self, mask: NDArray[np.int32], may_end: bool) -> None:
        """Apply in place what the request says about its end, to the int32 [words] of the backend.

        `may_end`: the backend allows one of the model's ends.
        """
        num_seen, ends = self._num_seen + len(self.forced), self._ends
        if self.opened_by is not None and num_seen == 0:
            allow(mask, [self.opened_by])
        if not may_end:
            return
        if ends.avoid or num_seen < ends.min_tokens:
            others = mask.copy()
            forbid(others, ends.model)
            if others.any():
                mask[:] = others
                return
        if ends.request:
            allow(mask, ends.request)
