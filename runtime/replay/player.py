"""Replays a record: the same scheduler makes the same decisions, with the recorded tokens or those of a model."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from runtime.batch import Batch, StepOutput
from runtime.errors import ConfigurationError, PenstockError
from runtime.replay.record_format import VERSION, digest, make_cache, make_plan, make_sequences
from runtime.request import Delta, Finish, Logprobs
from runtime.scheduler.scheduler import Scheduler
from runtime.sequence import Sequence

FAILURE = b'["!"'  # begin of a line that records an exception of the scheduler


class Difference(Exception):
    """The replay made another decision than the record, or the scheduler's tables are inconsistent."""

    def __init__(self, line: int, step: int, message: str) -> None:
        self.line, self.step = line, step
        super().__init__(f"line {line}, step {step}: {message}")


class Launched(NamedTuple):
    """Event: a batch was built. It equals the recorded batch."""

    batch: Batch


class Added(NamedTuple):
    """Event: a request was added."""

    time_s: float  # seconds since the record began
    sequences: list[Sequence]


class Applied(NamedTuple):
    """Event: a step was applied, with the recorded tokens of each row."""

    batch: Batch
    tokens: list[list[int]]
    deltas: list[Delta]
    time_s: float


class Timed(NamedTuple):
    """Event: the time of the last applied step was measured."""

    batch: Batch
    seconds: float


class Dropped(NamedTuple):
    """Event: all steps in flight were dropped, so their results will be ignored."""


Event = Added | Launched | Applied | Timed | Dropped


@dataclass(slots=True)
class Counts:
    """How often each event occurred in a replay."""

    steps: int = 0
    requests: int = 0
    tokens: int = 0  # generated tokens
    # Exceptions of the scheduler that occurred in the record and again in the replay.
    failures: list[str] = field(default_factory=list)


class Player:
    """Replays one record. `events` may be called only once."""

    def __init__(self, path: str | Path, *, check: bool = True) -> None:
        """Open a record. With `check`, the scheduler's tables are checked after every step.

        Raises `ConfigurationError` if the file is not a record of this version.
        """
        self.path = Path(path)
        self.counts = Counts()
        self._check = check
        try:
            self._lines = self.path.read_bytes().split(b"\n")
        except OSError as error:
            raise ConfigurationError(f"The record {path} cannot be read: {error.strerror}.") from error
        self.header = self._header()
        self.cache = make_cache(self.header)
        self.scheduler = Scheduler(
            make_plan(self.header),
            self.cache,
            vocab_size=self.header["vocab_size"],
            context_length=self.header["context_length"],
        )
        self._sequences: dict[tuple[int, int], Sequence] = {}
        self._in_flight: deque[Batch] = deque()
        self._applied: Batch | None = None  # last applied batch
        self.line = 1  # number of lines read so far

    def _header(self) -> dict[str, Any]:
        try:
            first = orjson.loads(self._lines[0])
            version = first["penstock_record"]
            make_plan(first)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(f"{self.path} is not a record of this version of Penstock: {error}.") from error
        if version != VERSION:
            raise ConfigurationError(f"{self.path} is a record of version {version}, not {VERSION}.")
        return first

    def events(self) -> Iterator[Event]:
        """Repeat the recorded calls, and yield each step.

        Raises `Difference` at the first difference, and `ConfigurationError` if a line cannot be read. An incomplete
        last line, which a killed process may leave, is ignored.
        """
        last = len(self._lines) - 1
        while self.line < last:
            event = self._read(self.line)
            self.line += 1
            try:
                happened = self._repeat(event)
            except Exception as error:
                self._compare_failure(error)
                continue
            if self._lines[self.line].startswith(FAILURE):
                raise self._expected()
            if happened is not None:
                yield happened

    def _read(self, number: int) -> list[Any]:
        try:
            return orjson.loads(self._lines[number])
        except ValueError as error:
            raise ConfigurationError(f"{self.path}, line {number + 1}: {error}.") from error

    def _expected(self) -> Difference:
        """Return the `Difference` for a call that succeeds now, but failed in the record."""
        _, kind, message = self._read(self.line)
        return self._difference(f"the record has {kind}: {message}")

    def _compare_failure(self, error: Exception) -> None:
        """Accept an exception that is also in the record. Raise `Difference` for any other exception."""
        failed = self._lines[self.line].startswith(FAILURE)
        if isinstance(error, Difference):
            raise self._expected() if failed else error
        if not failed:
            raise self._difference(f"{type(error).__name__}: {error}") from error
        _, kind, message = self._read(self.line)
        self.line += 1
        if type(error).__name__ != kind:
            raise self._difference(f"{type(error).__name__}: {error}, but the record has {kind}: {message}") from error
        if not isinstance(error, PenstockError):
            self.counts.failures.append(f"line {self.line}, step {self.counts.steps}: {kind}: {error}")

    def _difference(self, message: str) -> Difference:
        return Difference(self.line, self.counts.steps, message)

    def _repeat(self, event: list[Any]) -> Event | None:
        """Make a recorded call again. Return its event, or None."""
        kind, *values = event
        match kind:
            case "f" | "n":
                return self._fill(kind, values)
            case "t":
                return self._apply(*values)
            case "a":
                return self._add(*values)
            case "s":
                if self._applied is not None:
                    late_us = values[2] if len(values) > 2 else 0
                    self.scheduler.note_step(self._applied, values[1], values[0] / 1e6, late_us / 1e6)
                    return Timed(self._applied, values[0] / 1e6)
            case "i":
                self._measure(*values)
            case "x":
                self.scheduler.abort(self._named(values[1]), Finish(values[2]))
            case "e":
                for sequence in self._named([values[1]]):  # empty if the sequence has already ended
                    self.scheduler.end(sequence)
            case "w":
                self.scheduler.withdraw(self._named(values[0]))
            case "c":
                self.scheduler.flush()
            case "h":
                self.scheduler.touch(*values)
            case "u":
                self.scheduler.forget_adapter(*values)
            case "b" | "d" | "o" | "r":
                return self._recover(kind, values)
            case _:
                raise self._difference(f"the event {kind!r} is unknown")
        return None

    def _add(self, time_us: int, values: dict[str, Any]) -> Added:
        sequences = make_sequences(values)
        self.counts.requests += 1
        for sequence in sequences:
            self._sequences[sequence.request.id, sequence.index] = sequence
        self.scheduler.add(*sequences)
        return Added(time_us / 1e6, sequences)

    def _named(self, names: list[Any]) -> list[Sequence]:
        keys = [tuple(name) if isinstance(name, list) else (name, 0) for name in names]
        return [self._sequences[key] for key in keys if key in self._sequences]

    def _fill(self, kind: str, values: list[Any]) -> Launched | None:
        forced, resumed = values[-2:] if len(values) in (2, 7) else ([], [])
        for sequence in self._named(resumed):
            sequence.next_host_data.give()
        for constraint in self.scheduler.constraints:
            constraint.next.forced = ()
        for name, ids in forced:
            [sequence] = self._named([name])
            if sequence.constraint is not None:
                sequence.constraint.force(len(sequence.ids) - sequence.num_prompt, tuple(ids))
        batch = self.scheduler.fill()
        if batch is None or kind == "n":
            if (batch is None) != (kind == "n"):
                raise self._difference("a batch was built" if batch else "no batch could be built")
            return None
        rows, tokens = len(batch.sequences), len(batch.token_ids)
        if digest(batch) != values[1]:
            was = f"{values[2]} rows, {values[3]} tokens, prompts {values[4]}"
            raise self._difference(f"the batch has {rows} rows and {tokens} tokens; recorded: {was}")
        self._in_flight.append(batch)
        self._verify()
        return Launched(batch)

    def _apply(self, time_us: int, tokens: list[Any], more: dict[str, Any] | None = None) -> Applied:
        batch, more = self._in_flight.popleft(), more or {}
        rows = [row if isinstance(row, list) else [row] for row in tokens]
        embeddings: list[list[float] | None] | None = None
        if "embedded" in more:
            embeddings = [[0.0] if row in more["embedded"] else None for row in range(len(rows))]
        scored = [(row, Logprobs([(0.0, 0)] * count, [], [])) for row, count in more.get("scored", ())]
        output = StepOutput(
            rows,
            more.get("failed", []),
            None,
            scored,
            embeddings,
            more.get("stuck", ()),
            [(row, np.zeros((count, 1), np.float32)) for row, count in more.get("hidden", ())],
            [(row, np.zeros((count, 1, 1), np.int16)) for row, count in more.get("experts", ())],
            dict(more.get("taken", ())),
        )
        self._applied = batch
        deltas = self.scheduler.apply(batch, output)
        self.counts.steps += 1
        self.counts.tokens += sum(len(delta.ids) for delta in deltas)
        for delta in deltas:
            if delta.finish is not None:
                self._sequences.pop((delta.request_id, delta.index), None)
        self._verify()
        return Applied(batch, rows, deltas, time_us / 1e6)

    def _recover(self, kind: str, values: list[Any]) -> Dropped:
        batches = list(self._in_flight)
        self._in_flight.clear()
        if kind == "b":
            self.scheduler.rebuild(values[0])
        elif kind == "d":
            self.scheduler.fail(batches)
        elif kind == "o":
            self.scheduler.give_up_newest(batches)
        else:
            self.scheduler.recompute()
        self._verify()
        return Dropped()

    def _measure(self, name: str, value: Any) -> None:
        scheduler = self.scheduler
        if name == "limits":
            prefill, mixed, scored = value
            scheduler.limit_steps(prefill, mixed, scored=tuple(scored) if scored else None)
        elif name == "mixed":
            scheduler.limit_mixed_steps(value)
        elif name == "step_s":
            scheduler.note_step_time(value)
        elif name == "token_s":
            scheduler.note_prompt_time(value)

    def _verify(self) -> None:
        if self._check:
            try:
                self.scheduler.check()
            except ValueError as error:
                raise self._difference(str(error)) from error


def replay(path: str | Path, *, check: bool = True) -> Counts:
    """Replay a record with the recorded tokens. Return how often each event occurred.

    Raises `Difference` at the first difference. The record of a failure can serve as a test: until the bug is fixed,
    `replay(path)` raises an exception or returns `failures`.
    """
    player = Player(path, check=check)
    for _ in player.events():
        pass
    return player.counts
