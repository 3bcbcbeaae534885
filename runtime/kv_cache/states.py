"""Caches of layers that keep one state of fixed size per sequence (see `ops.recurrence`).

A pool has slots, each of which holds one state. A running sequence owns two slots and writes them in turn, so that its
last token can be computed again from the state before it. With speculation, it owns as many further slots as a row has
draft tokens. Every token of a row with draft tokens is a span of its own, so that the states after all its tokens are
kept. The sequence's next row reads the state after the last accepted token. If only the device knows how many tokens
were accepted, the device chooses the slots to read and write from the row's *window*. The window has a slot for each
length at which the row, or one of its spans, may begin or end.

A *snapshot* is the state at the end of a page. A sequence that matches this page in the prefix tree resumes from the
snapshot. States are never copied. Instead, a row that passes the end of a page with a snapshot is split into two spans:
the first span writes the snapshot, and the second one reads it.

A prompt row writes snapshots at the end of its last full page, and at the end of the last page before its last token.
Decoding writes a snapshot at the end of each page, and only the two newest ones are kept. If slots run out, the least
recently used snapshot is dropped. A prefix matches only up to its last snapshot. Slot 0 holds zeros, which are the
initial state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from runtime.batch import Ints
from runtime.errors import ConfigurationError
from runtime.kv_cache.kinds import CacheKind, Specs
from runtime.sequence import Sequence

if TYPE_CHECKING:
    import torch

    from runtime.config.plan import Plan
    from runtime.layers.recurrent import StateCache, StateSpec

ZEROS = 0
MIB = 2**20
OWN_SLOTS = 2  # slots that a running sequence owns without speculation
# Minimum and maximum number of snapshot slots per running sequence, unless the plan sets the number of all slots.
MIN_SNAPSHOTS, MAX_SNAPSHOTS = 1, 2
MAX_SPANS = 4  # maximum number of spans per row without draft tokens


@dataclass(slots=True)
class _States:
    """The slots of one sequence: its own slots (allocated with its first row), and the slots of its last states."""

    # Number of tokens -> slot of the state after them, for all states from which the next row may continue.
    slots: dict[int, int] = field(default_factory=dict)
    own: list[int] = field(default_factory=list)
    base: int = 0  # the state after p tokens is in own[(p + base) % len(own)], unless it is a snapshot
    # Pages with output tokens that have snapshots, the newest last.
    output_pages: list[int] = field(default_factory=list)

    def rewind(self, start: int) -> int:
        """Return the slot of the state after `start` tokens, and forget the others. Raises RuntimeError if it is gone.

        The row's spans add their states to `slots`.
        """
        slot = self.slots.get(start)
        if slot is None:
            raise RuntimeError(f"The state after {start} tokens is gone; there are those after {[*self.slots]}.")
        self.slots = {start: slot}
        return slot

    def keep(self, low: int, high: int) -> list[int]:
        """Forget all states except those after `low` .. `high` tokens. Return the slots of those before `high`.

        Raises RuntimeError if one of them is gone.
        """
        kept = {length: self.slots[length] for length in range(low, high + 1) if length in self.slots}
        if len(kept) <= high - low:
            raise RuntimeError(f"A state after {low} to {high} tokens is gone; there are those after {[*self.slots]}.")
        self.slots = kept
        return [kept[length] for length in range(low, high)]

    def next_own(self, start: int, end: int) -> int:
        """Return the own slot for the state after `end` tokens. A span computes it from the state after `start` tokens.

        It is the next of the own slots in turn, so that the last states are in different slots.
        """
        self.base += start + 1 - end
        return self.own[(end + self.base) % len(self.own)]

    def add(self, end: int, slot: int, *, forgets: bool) -> None:
        """Record that `slot` gets the state after `end` tokens. With `forgets`, forget the state that it overwrites."""
        # A long row writes the same slot in several spans, so forget the lengths whose state is overwritten. With an
        # unknown start (`forgets` is false), two lengths may share a slot, because the row reaches only one of them.
        if forgets and len(self.slots) >= len(self.own):
            self.slots = {length: other for length, other in self.slots.items() if other != slot}
        self.slots[end] = slot

    def substitute(self, slot: int, same: int) -> None:
        """Read slot `same` instead of `slot`. Both hold the same state."""
        self.slots = {length: same if other == slot else other for length, other in self.slots.items()}


def own_slots(max_drafts: int) -> int:
    """Return how many slots a running sequence owns: one for the state before a row, and one for each of its tokens."""
    return OWN_SLOTS + max_drafts


def _windows(spans: Ints, ends: Seq[int], earlier: Seq[Seq[int]]) -> dict[str, Ints]:
    """Return the arrays from which the device chooses slots, for S spans of B rows.

    - windows [B, W]: slots of the states before and after each of the row's spans, in the order of lengths. All rows
      are aligned at the last possible start of the row.
    - span_rows [S]: the row of each span
    - span_places [S]: the place, in the row's window, of the state that the span reads
    """
    before = max(map(len, earlier), default=0)
    firsts = [0, *ends[:-1]]
    width = before + 1 + max(end - first for first, end in zip(firsts, ends, strict=True))
    windows = np.zeros((len(ends), width), np.int32)
    for row, (first, end) in enumerate(zip(firsts, ends, strict=True)):
        windows[row, before - len(earlier[row]) : before] = earlier[row]
        windows[row, before] = spans[first, 0]
        windows[row, before + 1 : before + 1 + end - first] = spans[first:end, 1]
    counts = np.diff(ends, prepend=0)
    rows = np.repeat(np.arange(len(ends), dtype=np.int32), counts)
    places = np.arange(len(spans), dtype=np.int32) - np.array(firsts, np.int32)[rows] + np.int32(before)
    return {"windows": windows, "span_rows": rows, "span_places": places}


class StateKind(CacheKind):
    """Allocates the state slots of running sequences and snapshots."""

    name = "state"
    less_memory = "set a smaller --max-mamba-cache-size: states of recurrent layers take"

    @staticmethod
    def num_units(specs: Specs, plan: Plan, num_pages: int) -> int:
        """Return the number of slots: one for the zeros, plus the configured or planned number.

        Raises `ConfigurationError` if a running sequence needs more than the configured number.
        """
        spec, own, most = next(iter(specs.values())), own_slots(plan.scheduler.max_drafts), plan.cache.max_states
        if most is not None and most < own:
            raise ConfigurationError(
                f"--max-mamba-cache-size {most}: with {plan.scheduler.max_drafts} draft tokens, a running request "
                f"takes {own} states; set at least {own}, or fewer draft tokens."
            )
        if most is not None:
            return 1 + most
        num_tokens = num_pages * plan.cache.page_size * (own + MIN_SNAPSHOTS) // (OWN_SLOTS + MIN_SNAPSHOTS)
        by_tokens = spec.min_slots + num_tokens // spec.tokens_per_slot
        most = (own + MAX_SNAPSHOTS) * plan.scheduler.max_running
        return 1 + max(own + MIN_SNAPSHOTS, min(most, by_tokens))

    @staticmethod
    def unit_bytes(specs: Specs, plan: Plan) -> int:
        return sum(spec.num_bytes for spec in specs.values())

    @staticmethod
    def per_sequence(specs: Specs, plan: Plan) -> str:
        own = own_slots(plan.scheduler.max_drafts)
        return f"{own} of {StateKind.unit_bytes(specs, plan) / MIB:.2f} MiB for each running sequence"

    @staticmethod
    def make_layer(
        spec: StateSpec, num_units: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> StateCache:
        return spec.make(num_units + 1, device)

    @staticmethod
    def buffer_sizes(max_rows: int, max_pages: int, max_drafts: int = 0) -> Mapping[str, int]:
        return {"spans": (max_rows * MAX_SPANS + max_drafts) * 4}

    @staticmethod
    def scratch_arrays(counts: Seq[int], num_units: int) -> dict[str, Ints]:
        starts = accumulate(counts, initial=0)
        spans = [(ZEROS, num_units, start, count) for start, count in zip(starts, counts, strict=False)]
        return {"spans": np.array(spans, np.int32).reshape(-1, 4)}

    def __init__(self, specs: Specs, num_units: int, num_pages: int, page_size: int, max_drafts: int = 0) -> None:
        super().__init__(specs, num_units, num_pages, page_size, max_drafts)
        self._size = page_size
        self.num_own = own_slots(max_drafts)  # slots that a running sequence owns
        self.steps_back = self.num_own - 1
        self.reset()

    def reset(self) -> None:
        self._free = list(range(self.count - 1, ZEROS, -1))
        self._states: dict[Sequence, _States] = {}
        self._snapshots: dict[int, int] = {}  # page -> slot of its snapshot; least recently used first
        self._in_step: set[int] = set()  # slots that the step being built reads or writes

    @property
    def max_sequences(self) -> int:
        return max(1, (self.count - 1) // (self.num_own + MIN_SNAPSHOTS))

    def resumable(self, pages: Seq[int], count: int) -> int:
        while count and pages[count - 1] not in self._snapshots:
            count -= 1
        return count

    def enter(self, sequence: Sequence) -> None:
        states, slot = _States(), ZEROS
        if sequence.pages:
            page = sequence.pages[-1]
            slot = self._snapshots[page] = self._snapshots.pop(page)  # makes the snapshot the most recently used one
        states.slots[len(sequence.pages) * self._size] = slot
        self._states[sequence] = states

    def step_arrays(
        self, sequences: Seq[Sequence], starts: Ints, counts: Ints, page_table: Ints, unknown: Collection[int] = ()
    ) -> dict[str, Ints]:
        """Return `spans` [S, 4]: slot to read, slot to write, first token in the flat batch, number of tokens.

        If there are `unknown` rows, the arrays of `with_starts` are added.
        """
        spans: list[tuple[int, int, int, int]] = []
        earlier: list[list[int]] = []  # row -> slots of the states before an unknown row's last possible start
        first, ends = 0, list[int]()  # `ends`: number of spans after each row
        self._in_step.clear()
        unknown = frozenset(unknown)
        for row, (sequence, start, count) in enumerate(zip(sequences, starts.tolist(), counts.tolist(), strict=True)):
            states = self._states[sequence]
            if not states.own:
                # Snapshots never take the slots that sequences own.
                states.own = [self._free.pop() for _ in range(self.num_own)]
            if row in unknown:
                in_flight = sequence.num_drafted - (count - 1)
                earlier.append(states.keep(start - in_flight, start))
                read = states.slots[start]
            else:
                page = self._page_after(sequence, states, start)
                read = states.rewind(start)
                earlier.append([])
                if page is not None:
                    self._drop_rejected(states, page)
            self._in_step.add(read)
            for end in self._cuts(sequence, start, start + count):
                own = states.next_own(start, end)
                snapshot = self._snapshot(sequence, states, end) if end % self._size == 0 else None
                slot = own if snapshot is None else snapshot
                spans.append((read, slot, first, end - start))
                self._in_step.add(slot)
                states.add(end, slot, forgets=not earlier[-1])
                first += end - start
                read, start = slot, end
            ends.append(len(spans))
        arrays = {"spans": np.array(spans, np.int32)}
        return arrays | _windows(arrays["spans"], ends, earlier) if unknown else arrays

    @staticmethod
    def with_starts(arrays: Mapping[str, Any], rejected: Any) -> dict[str, Any]:
        """Return `spans` with the slots of rows that begin `rejected` tokens earlier."""
        if "windows" not in arrays:
            return {}
        windows, rows = arrays["windows"], arrays["span_rows"]
        place = arrays["span_places"] - rejected[rows]
        spans = arrays["spans"] + 0  # a copy
        spans[:, 0], spans[:, 1] = windows[rows, place], windows[rows, place + 1]
        return {"spans": spans}

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

    def _cuts(self, sequence: Sequence, start: int, end: int) -> Iterable[int]:
        """Return the ends of a row's spans.

        A row ends a span at these positions:
        - after every token, if it has draft tokens
        - the end of its last full page
        - the end of the last full page that a sequence with the same tokens could share
        - before its last token, if this token may be computed again
        - the end of the row
        """
        if sequence.num_drafted or end == start + 1:
            return range(start + 1, end + 1)
        size = self._size
        cuts = {end // size * size, (end - 1) // size * size, end}
        if sequence.constraint is not None:
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

    def _page_after(self, sequence: Sequence, states: _States, start: int) -> int | None:
        """Return the page of position `start` if the previous row passed the page's end, otherwise None."""
        index = start // self._size
        return sequence.pages[index] if (index + 1) * self._size in states.slots else None

    def _drop_rejected(self, states: _States, page: int) -> None:
        """Drop the snapshot of a page that may have rejected tokens, because the next row may not overwrite it."""
        self._drop_one([page])
        if page in states.output_pages and page not in self._snapshots:
            states.output_pages.remove(page)

    @property
    def _num_available_snapshots(self) -> int:
        """Number of additional snapshots that fit while enough slots remain for the running sequences."""
        return self.count - 1 - self.num_own * self.max_sequences - len(self._snapshots)

    def _drop_one(self, pages: Iterable[int]) -> None:
        """Drop the first snapshot of these pages that is used neither by a sequence nor by the step being built."""
        needed = {slot for states in self._states.values() for slot in states.slots.values()}
        needed |= self._in_step
        unread = next((page for page in pages if self._snapshots.get(page, ZEROS) not in needed | {ZEROS}), None)
        if unread is not None:
            self._drop(unread)

    def _drop(self, page: int) -> None:
        slot = self._snapshots.pop(page, None)
        if slot is not None:
            self._free.append(slot)
