"""Layers that keep one state for each sequence, whatever its length (see `ops.recurrence`).

States lie in lines of a pool. A running sequence has two of its own, which it writes by turns, so that its last token
can be computed once more. Behind some pages a state is kept as a *snapshot*: a sequence that finds the page in the
prefix tree goes on from there. Nothing is ever copied: a row that passes the end of such a page is cut in two, the
first part writes the snapshot and the second goes on from it.

A row of a prompt leaves snapshots at the end of its last whole page and of the last page before its last token, an
output at the end of each page, of which the two newest are kept. Where lines are short, the snapshot that was used
least recently makes room, and a prefix is found as far as the last one that is left. Line 0 holds zeros, which every
sequence begins with.
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
OWN_LINES = 2
LINES = 3  # for each sequence that may run: its own, and one for a snapshot
MOST_LINES = 4  # of which there are never more for each
MAX_SPANS = 4  # of a row


@dataclass(slots=True)
class _Held:
    """What a sequence has: two lines from its first row on, and where the states behind its last tokens are."""

    line: int = ZEROS  # of the state behind `length` tokens
    length: int = 0
    line_before: int = ZEROS  # of that at the beginning of the last span
    length_before: int = 0
    own: list[int] = field(default_factory=list)
    output_pages: list[int] = field(default_factory=list)  # with snapshots, the newest last

    def go_back(self, start: int) -> None:
        """Its next row begins here. Raises RuntimeError where no state is left of so many tokens."""
        if start == self.length:
            return
        if start != self.length_before:
            raise RuntimeError(f"There is no state of {start} tokens, only of {self.length}.")
        self.line, self.length = self.line_before, self.length_before

    def advance(self, line: int, end: int) -> None:
        self.line_before, self.length_before = self.line, self.length
        self.line, self.length = line, end

    def other(self) -> int:
        """The own line that is not read next."""
        return self.own[self.line == self.own[0]]

    def reads_instead(self, line: int, same: int) -> None:
        """Another line has the same state."""
        self.line = same if self.line == line else self.line
        self.line_before = same if self.line_before == line else self.line_before


class StateKind(CacheKind):
    """Hands out the lines of states."""

    name = "state"
    one_step_back = True
    less_memory = "set a smaller --max-mamba-cache-size: states of recurrent layers take"

    @staticmethod
    def num_units(specs: Specs, plan: Plan, num_pages: int) -> int:
        """The line of zeros, and as many as were asked for, or as the pages and the sequences that may run suggest."""
        if plan.cache.max_states is not None:
            return 1 + plan.cache.max_states
        spec = next(iter(specs.values()))
        by_tokens = spec.first_lines + num_pages * plan.cache.page_size // spec.tokens_a_line
        return 1 + max(LINES, min(MOST_LINES * plan.scheduler.max_running, by_tokens))

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
        self._held: dict[Sequence, _Held] = {}
        self._snapshots: dict[int, int] = {}  # page -> line; least recently used first
        self._in_step: set[int] = set()  # lines of the spans of the step that is being filled

    @property
    def max_sequences(self) -> int:
        return max(1, (self.count - 1) // LINES)

    def resumable(self, pages: Seq[int], count: int) -> int:
        while count and pages[count - 1] not in self._snapshots:
            count -= 1
        return count

    def enter(self, sequence: Sequence) -> None:
        held = self._held[sequence] = _Held()
        if sequence.pages:
            page = sequence.pages[-1]
            line = self._snapshots[page] = self._snapshots.pop(page)  # the most recently used one
            held.line = held.line_before = line
            held.length = held.length_before = len(sequence.pages) * self._size

    def step_arrays(
        self, sequences: Seq[Sequence], starts: Ints, counts: Ints, page_table: Ints
    ) -> dict[str, Ints]:
        """`spans` [S, 4]: the line read, the line written, the first token in the flat batch, how many tokens."""
        spans: list[tuple[int, int, int, int]] = []
        first = 0
        self._in_step.clear()
        for sequence, start, count in zip(sequences, starts.tolist(), counts.tolist(), strict=True):
            held = self._held[sequence]
            if not held.own:
                held.own = [self._free.pop() for _ in range(OWN_LINES)]  # which snapshots have left
            held.go_back(start)
            for end in self._cuts(sequence, start, start + count):
                line = self._snapshot(sequence, held, end) if end % self._size == 0 else None
                line = held.other() if line is None else line
                spans.append((held.line, line, first, end - held.length))
                self._in_step |= {held.line, line}
                first += end - held.length
                held.advance(line, end)
        return {"spans": np.array(spans, np.int32)}

    def replace(self, sequence: Sequence, first: int, own: Seq[int], kept: Seq[int]) -> None:
        held = self._held[sequence]
        for ours, trees in zip(own, kept, strict=True):
            line = self._snapshots.get(ours)
            if line is None:
                continue
            if trees in self._snapshots:
                held.reads_instead(line, self._snapshots[trees])
                self._drop(ours)
            else:
                self._snapshots[trees] = self._snapshots.pop(ours)
            if ours in held.output_pages:
                held.output_pages.remove(ours)

    def leave(self, sequence: Sequence) -> None:
        self._free += self._held.pop(sequence).own

    def free(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._drop(page)

    def check(self, sequences: Iterable[Sequence], tree_pages: Iterable[int]) -> None:
        sequences = list(sequences)
        if self._held.keys() != set(sequences):
            raise ValueError("The states are not those of the running sequences.")
        pages = {page for sequence in sequences for page in sequence.pages} | set(tree_pages)
        if not self._snapshots.keys() <= pages:
            raise ValueError("There are snapshots behind pages that nobody has.")
        own = [line for held in self._held.values() for line in held.own]
        if sorted([*self._free, *own, *self._snapshots.values()]) != list(range(1, self.count)):
            raise ValueError("The lines of states do not balance.")

    def _cuts(self, sequence: Sequence, start: int, end: int) -> list[int]:
        """Where spans of a row end: behind its last whole page, behind the last one that another sequence with the
        same tokens would use, and before a token that may be computed once more.
        """
        size = self._size
        cuts = {end // size * size, (end - 1) // size * size, end}
        if sequence.constraint is not None:
            cuts.add(end - 1)
        return sorted(cut for cut in cuts if cut > start)

    def _snapshot(self, sequence: Sequence, held: _Held, end: int) -> int | None:
        """A line for the snapshot behind the page that ends here; None where there is no room."""
        page = sequence.pages[end // self._size - 1]
        if page in self._snapshots:
            return self._snapshots[page]
        if end > sequence.num_prompt:
            if len(held.output_pages) > 1:
                self._drop_one([held.output_pages.pop(0)])
            held.output_pages.append(page)
        if not self._room:
            self._drop_one(self._snapshots)
        if not self._room:
            return None
        line = self._snapshots[page] = self._free.pop()
        return line

    @property
    def _room(self) -> int:
        """How many more snapshots there may be."""
        return self.count - 1 - OWN_LINES * self.max_sequences - len(self._snapshots)

    def _drop_one(self, pages: Iterable[int]) -> None:
        """Drop the first snapshot behind these pages that nobody goes on from."""
        needed = {line for held in self._held.values() for line in (held.line, held.line_before)}
        needed |= self._in_step
        found = next(
            (page for page in pages if self._snapshots.get(page, ZEROS) not in needed | {ZEROS}), None
        )
        if found is not None:
            self._drop(found)

    def _drop(self, page: int) -> None:
        line = self._snapshots.pop(page, None)
        if line is not None:
            self._free.append(line)
