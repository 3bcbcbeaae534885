"""A constraint whose host data arrives when the test delivers it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from runtime.constraint import DraftData, HostData, Output

Allowed = Callable[[tuple[int, ...]], list[int]]
Forced = Callable[[int, Output], tuple[int, ...]]  # (choice, output) -> the forced tokens that follow


def bitmask(allowed: list[int], vocab_size: int) -> np.ndarray:
    """Return a bitmask, int32 [ceil(V / 32)]."""
    words = np.zeros(-(-vocab_size // 32), np.uint32)
    for token_id in allowed:
        words[token_id // 32] |= np.uint32(1 << token_id % 32)
    return words.view(np.int32)


class LateHostData:
    """Allows the tokens that `allowed` returns for an output, or all tokens. Holds data back while `is_held(output
    ids)`.
    """

    def __init__(
        self,
        vocab_size: int,
        allowed: Allowed | None = None,
        is_held: Callable[[tuple[int, ...]], bool] = lambda output_ids: False,
    ) -> None:
        self.asked: list[tuple[int, tuple[int, ...]]] = []
        self.is_held = is_held
        self._vocab_size = vocab_size
        self._allowed = allowed
        self._held: list[tuple[tuple[int, ...], tuple[int, ...], HostData]] = []

    @property
    def num_held(self) -> int:
        return len(self._held)

    def host_data_after(self, choice: int, output: Output, data: HostData, forced: tuple[int, ...] = ()) -> None:
        output_ids = output.output_ids
        self.asked.append((choice, output_ids))
        self._held.append((output_ids, forced, data))
        if not self.is_held(output_ids):
            self.deliver(-1)

    def deliver(self, which: int = 0) -> None:
        """Deliver one data object that is held back, by default the oldest."""
        output_ids, forced, data = self._held.pop(which)
        mask = None if self._allowed is None else bitmask(self._allowed(output_ids), self._vocab_size)
        data.give(mask, forced)

    @property
    def takes_drafts(self) -> bool:
        return True

    def draft_data_after(self, choice: int, output: Output, first: HostData, drafts: DraftData) -> None:
        """Hold the data after each draft back like other data. Data after a draft that is not allowed is skipped."""

        def hold() -> None:
            known = output.output_ids
            for number, (token_id, data) in enumerate(zip(drafts.ids or (), drafts.after, strict=True)):
                if self._allowed is not None and token_id not in self._allowed(known):
                    drafts.skip_from(number)
                    return
                known = (*known, token_id)
                self._held.append((known, (), data))
                if not self.is_held(known):
                    self.deliver(-1)

        drafts.when_proposed(hold)

    def deliver_all(self) -> None:
        """Deliver all data that is held back, and from now on deliver immediately."""
        self.is_held = lambda output_ids: False
        while self._held:
            self.deliver()


class LateForcedTokens:
    """A constraint whose host data `late` holds back, and which also returns forced tokens."""

    def __init__(self, late: LateHostData, forced: Forced) -> None:
        self._late = late
        self._forced = forced

    def host_data_after(self, choice: int, output: Output, data: HostData) -> None:
        self._late.host_data_after(choice, output, data, self._forced(choice, output))

    @property
    def takes_drafts(self) -> bool:
        return True

    def draft_data_after(self, choice: int, output: Output, first: HostData, drafts: DraftData) -> None:
        self._late.draft_data_after(choice, output, first, drafts)
