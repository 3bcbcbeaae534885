"""Tells decode servers which prompts this prefill server is still computing, and which have ended.

A decode server waits for the pages of a pending prompt, however long the prefill server's queue is. After a prompt has
ended, no more of its pages will come, so the decode server computes the missing ones at once.
"""

from __future__ import annotations

from collections.abc import Iterable

from runtime.kv_cache.page_keys import is_portable, page_keys
from runtime.kv_cache.storage_tier import StorageTier
from runtime.scheduler.scheduler import Scheduler
from runtime.sequence import Sequence


def prompt_keys(sequence: Sequence, page_size: int) -> list[bytes]:
    """Return the keys of the full pages before the prompt's last token.

    The last key identifies the prompt on all servers. Returns an empty list if there is no full page, or if only this
    process can use the pages.
    """
    if not is_portable(sequence):
        return []
    return page_keys(sequence, (sequence.num_prompt - 1) // page_size, page_size)


class PromptNotes:
    """The pending and ended prompts of a prefill server. `take` returns the changes since the last call."""

    def __init__(self, tier: StorageTier, scheduler: Scheduler, page_size: int) -> None:
        self._tier = tier
        self._scheduler = scheduler
        self._page_size = page_size
        self._pending: dict[Sequence, tuple[bytes, frozenset[bytes]]] = {}  # last key and all keys of each prompt
        self._begun: list[bytes] = []
        self._ended: list[bytes] = []

    def begin(self, sequences: Iterable[Sequence]) -> None:
        """Record prompts that arrive. Also called for prompts that are then refused."""
        for sequence in sequences:
            keys = prompt_keys(sequence, self._page_size)
            if keys and sequence not in self._pending:
                self._pending[sequence] = keys[-1], frozenset(keys)
                self._begun.append(keys[-1])

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """Return the keys of prompts that began, and of prompts that will have no more pages, since the last call."""
        ended = [
            sequence
            for sequence, (_, keys) in self._pending.items()
            if sequence not in self._scheduler and not self._tier.has_leaving(keys)
        ]
        self._ended += [self._pending.pop(sequence)[0] for sequence in ended]
        notes = self._begun, self._ended
        self._begun, self._ended = [], []
        return notes
