"""Advance a copy of an output's grammar position by draft tokens, to compute the masks after them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runtime.constraint import DraftData, HostData
from runtime.grammar.matching.position import Position


class DraftWalk:
    """A copy of an output's position that advances by one draft token after another. The mask thread owns it.

    `first` has the mask of the first draft token. The target model never accepts a draft token that the mask forbids.
    The walk therefore ends at such a token, and the data of later tokens is skipped.
    """

    def __init__(self, position: Position, first: HostData, drafts: DraftData) -> None:
        self.position = position.copy()
        self._previous = first
        self._drafts = drafts
        self._ids = drafts.ids or ()
        self._num_done = 0  # number of draft tokens after which the data is set

    def go_on(self, num_words: int) -> bool:
        """Advance to the next draft token after which the backend must compute a mask. Return False if none is left."""
        while self._num_done < len(self._ids):
            token_id = self._ids[self._num_done]
            if self._previous.failed or not _allows(self._previous.bitmask, token_id):
                break
            if self.position.ends_by(token_id):
                break
            if not self.position.follow([token_id]):
                self.give(self.position.free_mask(num_words))
            elif self.position.known_mask is not None:
                self.give(self.position.known_mask)
            else:
                return True
        self.stop()
        return False

    def give(self, mask: NDArray[np.int32] | None) -> None:
        """Set the mask after the draft token to which the walk has advanced."""
        self._previous = self._drafts.after[self._num_done]
        self._previous.give(mask)
        self._num_done += 1

    def stop(self) -> None:
        """End the walk, and mark the data of the remaining draft tokens as skipped."""
        self._drafts.skip_from(self._num_done)


def _allows(bitmask: NDArray[np.int32] | None, token_id: int) -> bool:
    if bitmask is None:
        return True
    return token_id // 32 < len(bitmask) and bool(int(bitmask[token_id // 32]) >> token_id % 32 & 1)
