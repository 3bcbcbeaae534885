"""A constraint that allows the same tokens at every position of an output."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future

import numpy as np

from runtime.constraint import HostData, Output, give


class AllowedTokens:
    """A `runtime.constraint.Constraint` for a fixed set of token ids below `vocab_size`."""

    def __init__(self, token_ids: Collection[int], vocab_size: int) -> None:
        allowed = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
        allowed[list(token_ids)] = True
        bitmask = np.packbits(allowed, bitorder="little").view("<i4").astype(np.int32)
        self._data = HostData(bitmask=bitmask)

    def host_data_after(self, choice: int, output: Output, answer: Future[HostData]) -> None:
        """The mask, which is there already."""
        give(answer, self._data)
