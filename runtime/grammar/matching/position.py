"""An output's position in its grammar, and when the output may end."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.constraint import Output, allow, forbid
from runtime.grammar.backends.backend import Matcher
from runtime.grammar.matching.marker import Marker


class Ends(NamedTuple):
    """The rules for when an output may end."""

    # The model's end-of-sequence ids. The backend allows them where the output matches the grammar.
    model: frozenset[int]
    request: frozenset[int]  # further ids that end this request's output; allowed where `model` is
    # While the output has fewer than `min_tokens` tokens (or always, if `avoid` is set), it may end only if the grammar
    # allows no other token.
    min_tokens: int
    avoid: bool


class Position:
    """The position of one choice in its grammar. The mask thread owns it after construction."""

    __slots__ = (
        "_compiled", "_ends", "_is_free", "_marker", "_must_begin", "_num_matched", "_num_seen", "forced",
        "forced_masks", "matcher", "next_mask", "num_done", "num_submitted", "on_slow_thread", "opened_by", "slow",
    )  # fmt: skip

    def __init__(
        self,
        compiled: Matcher,
        ends: Ends,
        marker: Marker | None,
        opened_by: int | None = None,
        must_begin: bool = True,
    ) -> None:
        self._compiled = compiled
        self._ends = ends
        self._marker = marker
        self.opened_by = opened_by
        self._must_begin = must_begin
        self._start()
        self.slow = False  # whether the slow thread computes this output's next mask, because the last one took long
        # Forced tokens may cause a second request while the first is pending. One thread must then complete both in
        # order. Only the event loop writes `num_submitted`; only the mask thread writes `num_done`.
        self.num_submitted = self.num_done = 0
        self.on_slow_thread = False  # whether the slow thread has the pending requests

    def _start(self) -> None:
        self.forced: list[int] = []  # tokens that the matcher has consumed, and that the output does not yet have
        self.forced_masks: list[NDArray[np.int32]] = []  # [i]: the mask that allows only forced[i]
        self.next_mask: NDArray[np.int32] | None = None  # the mask after the forced tokens; None: not computed
        self.matcher: Matcher | None = None  # None: the constraint has not begun
        self._num_seen = 0  # number of output tokens up to this position
        self._num_matched = 0  # number of matched bytes of the marker
        self._is_free = self._marker is not None and self.opened_by is None

    def advance(self, output: Output) -> bool:
        """Advance to the end of `output`, which must either extend the output of the previous call or begin anew.

        Return whether the constraint has begun. Raises `ValueError` if the grammar does not allow the output.
        """
        new, num_before = output.new_ids, output.num_before
        if num_before != self._num_seen:
            if num_before:
                raise ValueError("The output does not extend the previous one.")
            self._start()
        self._num_seen += len(new)
        if not num_before and new and new[0] == self.opened_by:
            self._start()
            self._num_seen, self._is_free = len(new), True
            new = new[1:]
        return self._follow(new)

    def follow(self, new: list[int]) -> bool:
        """Advance by the tokens `new`. Return and raise as `advance` does."""
        self._num_seen += len(new)
        return self._follow(new)

    def _follow(self, new: list[int]) -> bool:
        if self.matcher is None:
            new = self._after_marker(new)
        if self.matcher is None:
            return False
        if self.forced:
            count = min(len(self.forced), len(new))
            if new[:count] != self.forced[:count]:
                raise ValueError("The output does not continue with its forced tokens.")
            del self.forced[:count], self.forced_masks[:count]
            new = new[count:]
        if new:
            self.next_mask = None
            if not self.matcher.consume(new):
                raise ValueError(f"The grammar does not allow its own output: {self.matcher.error:.200}")
        return True

    @property
    def num_seen(self) -> int:
        """Number of output tokens up to this position."""
        return self._num_seen

    @property
    def known_mask(self) -> NDArray[np.int32] | None:
        """The mask of the next token if it has already been computed, else None."""
        return self.forced_masks[0] if self.forced else self.next_mask

    def copy(self) -> Position:
        """Return an independent position of the same output."""
        found = Position(self._compiled, self._ends, self._marker, self.opened_by, self._must_begin)
        found.matcher = None if self.matcher is None else self.matcher.copy()
        found.forced, found.forced_masks = list(self.forced), list(self.forced_masks)
        found.next_mask = self.next_mask
        found._num_seen, found._num_matched, found._is_free = self._num_seen, self._num_matched, self._is_free
        return found

    def ends_by(self, token_id: int) -> bool:
        """Whether this token ends the output."""
        return token_id in self._ends.model or token_id in self._ends.request

    def force(self, token_id: int, mask: NDArray[np.int32]) -> bool:
        """Let the matcher consume the only token that `mask` allows. Return False if the matcher refuses it."""
        if self.matcher is None or not self.matcher.consume([token_id]):
            return False
        self.forced.append(token_id)
        self.forced_masks.append(mask)
        return True

    def _after_marker(self, new: list[int]) -> list[int]:
        """Search the new tokens for the marker. If it occurs, begin the constraint. Return the tokens after it."""
        marker = self._marker
        if marker is None or not self._is_free:
            self.matcher = self._compiled.copy()
            return new
        for index, token_id in enumerate(new):
            self._num_matched = marker.advance(self._num_matched, token_id)
            if self._num_matched == marker.length:
                self.matcher = self._compiled.copy()
                return new[index + 1 :]
        return []

    def free_mask(self, num_words: int) -> NDArray[np.int32] | None:
        """Return the mask for an output whose constraint has not begun. None allows all tokens.

        If the output may not end before the constraint begins, the mask forbids the tokens that end the output.
        """
        if self._marker is None:
            return None
        mask, ends = self._marker.mask(self._num_matched, num_words), self._ends
        if not self._must_begin and not ends.avoid and self._num_seen >= ends.min_tokens:
            return mask
        mask = np.full(num_words, -1, np.int32) if mask is None else mask.copy()
        forbid(mask, ends.model if self._must_begin else ends.model | ends.request)
        return mask

    def finish_mask(self, mask: NDArray[np.int32], may_end: bool) -> None:
        """Apply the rules in `Ends` to the backend's mask, int32 [words], in place.

        `may_end` says whether the backend's mask allows an end-of-sequence id of the model.
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
