"""Caches of layers that keep one state of fixed size per sequence (see `ops.recurrence`).

A pool has slots, each of which holds one state. A running sequence owns two slots and writes them alternately, so that
its last token can be computed again from the state before it. A *snapshot* is the state at the end of a page. A
sequence that matches this page in the prefix tree resumes from the snapshot. States are never copied. Instead, a row
that passes the end of a page with a snapshot is split into two spans: the first span writes the snapshot, and the
second one reads it.

A prompt row writes snapshots at the end of its last full page, and at the end of the last page before its last token.
Decoding writes a snapshot at the end of each page, and only the two newest ones are kept. If slots run out, the least
recently used snapshot is dropped. A prefix matches only up to its last snapshot. Slot 0 holds zeros, which are the
initial state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from runtime.batch import Ints
from runtime.kv_cache.kinds import CacheKind, Specs
from runtime.sequence import Sequence

if TYPE_CHECKING:
    import torch

    from runtime.config.plan import Plan
    from runtime.layers.recurrent import StateCache, StateSpec

ZEROS = 0
OWN_SLOTS = 2
MIN_SLOTS = 3  # minimum number of slots per running sequence: its two own slots and one for a snapshot
MAX_SLOTS = 4  # maximum number of slots per running sequence, unless the number is configured
MAX_SPANS = 4  # maximum number of spans per row


@dataclass(slots=True)
class _States:
    """The slots of one sequence: its two own slots (allocated with its first row), and those of its last two states."""

    slot: int = ZEROS  # slot of the state after `length` tokens
    length: int = 0
    previous_slot: int = ZEROS  # slot of the state after `previous_length` tokens; the last span read this state
    previous_length: int = 0
    own: list[int] = field(default_factory=list)
    # Pages with output tokens that have snapshots, the newest last.
    output_pages: list[int] = field(default_factory=list)

    def rewind(self, start: int) -> None:
        """Continue from the state after `start` tokens. Raises RuntimeError if this state was overwritten."""
        if start == self.length:
            return
        if start != self.previous_length:
            raise RuntimeError(f"The state after {start} tokens is gone; the current one is after {self.length}.")
        self.slot, self.length = self.previous_slot, self.previous_length

    def advance(self, slot: int, end: int) -> None:
        self.previous_slot, self.previous_length = self.slot, self.length
        self.slot, self.length = slot, end

    def other(self) -> int:
        """Return the own slot to which the next span may write: the one that does not hold the current state."""
        return self.own[self.slot == self.own[0]]

    def substitute(self, slot: int, same: int) -> None:
        """Read slot `same` instead of `slot`. Both hold the same state."""
        self.slot = same if self.slot == slot else self.slot
        self.previous_slot = same if self.previous_slot == slot else self.previous_slot


class StateKind(CacheKind):
    """Allocates the state slots of running sequences and snapshots."""

    name = "state"
    steps_back = 1
    less_memory = "set a smaller --max-mamba-cache-size: states of recurrent layers take"

    @staticmethod
    def num_units(specs: Specs, plan: Plan, num_pages: int) -> int:
        """Return the number of slots: one for the zeros, plus the configured or planned number."""
        if plan.cache.max_states is not None:
            return 1 + plan.cache.max_states
        spec = next(iter(specs.values()))
        by_tokens = spec.min_slots + num_pages * plan.cache.page_size // spec.tokens_per_slot
        return 1 + max(MIN_SLOTS, min(MAX_SLOTS * plan.scheduler.max_running, by_tokens))

    @staticmethod
    def unit_bytes(specs: Specs, plan: Plan) -> int:
        return sum(spec.num_bytes for spec in specs.values())

    @staticmethod
    def make_layer(
        spec: StateSpec, num_units: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> StateCache:
        return spec.make(num_units + 1, device)

    @staticmethod
    def buffer_sizes(max_rows: int, max_pages: int) -> Mapping[str, int]:
        return {"spans": max_rows * MAX_SPANS * 4}

    @staticmethod
    def scratch_arrays(counts: Seq[int], num_units: int) -> dict[str, Ints]:
        starts = accumulate(counts, initial=0)
        spans = [(ZEROS, num_units, start, count) for start, count in zip(starts, counts, strict=False)]
        return {"spans": np.array(spans, np.int32).reshape(-1, 4)}

    def __init__(self, specs: Specs, num_units: int, num_pages: int, page_size: int) -> None:
        super().__init__(specs, num_units, num_pages, page_size)
        self._size = page_size
        self.reset()

    def reset(self) -> None:
        self._free = list(range(self.count - 1, ZEROS, -1))
        self._states: dict[Sequence, _States] = {}
        self._snapshots: dict[int, int] = {}  # page -> slot of its snapshot; least recently used first
        self._in_step: set[int] = set()  # slots that the step being built reads or writes

    @property
    def max_sequences(self) -> int:
        return max(1, (self.count - 1) // MIN_SLOTS)

    def resumable(self, pages: Seq[int], count: int) -> int:
        while count and pages[count - 1] not in self._snapshots:
            count -= 1
        return count

    def enter(self, sequence: Sequence) -> None:
        states = self._states[sequence] = _States()
        if sequence.pages:
            page = sequence.pages[-1]
            slot = self._snapshots[page] = self._snapshots.pop(page)  # makes the snapshot the most recently used one
            states.slot = states.previous_slot = slot
            states.length = states.previous_length = len(sequence.pages) * self._size

    def step_arrays(self, sequences: Seq[Sequence], starts: Ints, counts: Ints, page_table: Ints) -> dict[str, Ints]:
        """Return `spans` [S, 4]: slot to read, slot to write, first token in the flat batch, number of tokens."""
        spans: list[tuple[int, int, int, int]] = []
        first = 0
        self._in_step.clear()
        for sequence, start, count in zip(sequences, starts.tolist(), counts.tolist(), strict=True):
            states = self._states[sequence]
            if not states.own:
                # Snapshots never take the slots that sequences own.
                states.own = [self._free.pop() for _ in range(OWN_SLOTS)]
            states.rewind(start)
            for end in self._cuts(sequence, start, start + count):
                slot = self._snapshot(sequence, states, end) if end % self._size == 0 else None
                slot = states.other() if slot is None else slot
                spans.append((states.slot, slot, first, end - states.length))
                self._in_step |= {states.slot, slot}
                first += end - states.length
                states.advance(slot, end)
        return {"spans": np.array(spans, np.int32)}

    def replace(self, sequence: Sequence, first: int, private: Seq[int], shared: Seq[int]) -> None:
        states = self._states[sequence]
        for old, new in zip(private, shared, strict=True):
            slot = self._snapshots.get(old)
            if slot is None:
                continue
            if new in self._snapshots:
                states.substitute(slot, self._snapshots[new])
                self._drop(old)
            else:
                self._snapshots[new] = self._snapshots.pop(old)
            if old in states.output_pages:
                states.output_pages.remove(old)

    def leave(self, sequence: Sequence) -> None:
        self._free += self._states.pop(sequence).own

    def free(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._drop(page)

    def check(self, sequences: Iterable[Sequence], tree_pages: Iterable[int]) -> None:
        sequences = list(sequences)
        if self._states.keys() != set(sequences):
            raise ValueError("The sequences with states are not the running sequences.")
        pages = {page for sequence in sequences for page in sequence.pages} | set(tree_pages)
        if not self._snapshots.keys() <= pages:
            raise ValueError("There are snapshots of free pages.")
        own = [slot for states in self._states.values() for slot in states.own]
        if sorted([*self._free, *own, *self._snapshots.values()]) != list(range(1, self.count)):
            raise ValueError("The state slots do not balance.")

    def _cuts(self, sequence: Sequence, start: int, end: int) -> list[int]:
        """Return the ends of a row's spans.

        A row ends a span at these positions:
        - the end of its last full page
        - the end of the last full page that a sequence with the same tokens could share
        - before its last token, if this token may be computed again
        - the end of the row
        """
        size = self._size
        cuts = {end // size * size, (end - 1) // size * size, end}
        if sequence.constraint is not None or sequence.num_drafted:
            cuts.add(end - 1)
        return sorted(cut for cut in cuts if cut > start)

    def _snapshot(self, sequence: Sequence, states: _States, end: int) -> int | None:
        """Return a slot for a snapshot at `end`, the end position of a page, or None if no slot is available."""
        page = sequence.pages[end // self._size - 1]
        if page in self._snapshots:
            return self._snapshots[page]
        if end > sequence.num_prompt:
            if len(states.output_pages) > 1:
                self._drop_one([states.output_pages.pop(0)])
            states.output_pages.append(page)
        if not self._num_available_snapshots:
            self._drop_one(self._snapshots)
        if not self._num_available_snapshots:
            return None
        slot = self._snapshots[page] = self._free.pop()
        return slot

    @property
    def _num_available_snapshots(self) -> int:
        """Number of additional snapshots that fit while enough slots remain for the running sequences."""
        return self.count - 1 - OWN_SLOTS * self.max_sequences - len(self._snapshots)

    def _drop_one(self, pages: Iterable[int]) -> None:
        """Drop the first snapshot of these pages that is used neither by a sequence nor by the step being built."""
        needed = {slot for states in self._states.values() for slot in (states.slot, states.previous_slot)}
        needed |= self._in_step
        unread = next((page for page in pages if self._snapshots.get(page, ZEROS) not in needed | {ZEROS}), None)
        if unread is not None:
            self._drop(unread)

    def _drop(self, page: int) -> None:
        slot = self._snapshots.pop(page, None)
        if slot is not None:
            self._free.append(slot)
