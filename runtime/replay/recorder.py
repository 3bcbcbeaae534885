"""A scheduler that writes all calls and decisions to a file (`--record`)."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Container, Hashable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import orjson

from runtime.batch import Batch, StepOutput
from runtime.config.plan import SchedulerPlan
from runtime.kv_cache.prefix_cache import PrefixCache
from runtime.replay.record_format import digest, header, name_of, request_fields
from runtime.request import Delta, Finish
from runtime.scheduler.scheduler import Scheduler
from runtime.sequence import Sequence

logger = logging.getLogger("penstock.scheduler")
T = TypeVar("T")


class RecordWriter:
    """Appends lines to a new file. Each line is written immediately, so none is lost if the process is killed."""

    def __init__(self, path: str | Path) -> None:
        """Create the file. If the name is in use, a number is added to it. Raises `OSError` if this fails."""
        self.path = path = Path(path)
        number = 1
        while path.exists():
            number += 1
            path = self.path.with_name(f"{self.path.name}.{number}")
        self.path = path
        # The file contains the tokens of prompts and answers, so other users of this machine must not be able to read
        # it.
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._file: BinaryIO | None = os.fdopen(opened, "wb", buffering=0)

    def write(self, value: object) -> None:
        """Append a line. If the file cannot be written, log an error and stop recording."""
        if self._file is None:
            return
        try:
            self._file.write(orjson.dumps(value) + b"\n")
        except (OSError, TypeError) as error:
            logger.error("The record %s ends here: %s", self.path, error)
            self._file.close()
            self._file = None


class RecordedScheduler(Scheduler):
    """A `Scheduler` that records its calls, so that `Player` can repeat them.

    Measured times are rounded before the scheduler uses them, so that the record contains exactly the values used.
    """

    def __init__(
        self,
        plan: SchedulerPlan,
        cache: PrefixCache,
        writer: RecordWriter,
        *,
        vocab_size: int,
        context_length: int,
        **settings: Any,
    ) -> None:
        """Create the scheduler. `settings` are those of `record_format.header`."""
        super().__init__(plan, cache, vocab_size=vocab_size, context_length=context_length)
        self._writer = writer
        self._began_s = time.monotonic()
        self._values: dict[str, Any] = {}  # name -> last value of a measurement
        self._resumed: list[Sequence] = []  # sequences whose late host data arrived before the step that is being built
        self._running.on_resume = self._resumed.append
        self._forced: list[tuple[Sequence, tuple[int, ...]]] = []  # forced tokens that may be appended before the step
        self._fast_forward.on_runs = self._forced.extend
        # Whether the last line says that no batch could be built, and no sequence ran or waited at that time. The next
        # such line is then left out.
        self._was_idle = False
        sizes = {"vocab_size": vocab_size, "context_length": context_length}
        writer.write(header(plan, cache, **sizes, **settings))

    # --- requests ---

    def add(self, *sequences: Sequence) -> None:
        self._write(["a", self._now_us(), request_fields(sequences)])
        self._guard(super().add, *sequences)

    def abort(self, sequences: Iterable[Sequence], finish: Finish) -> list[Delta]:
        sequences = list(sequences)
        self._write(["x", self._now_us(), [name_of(each) for each in sequences], finish.kind])
        return self._guard(super().abort, sequences, finish)

    def end(self, sequence: Sequence) -> None:
        self._write(["e", self._now_us(), name_of(sequence)])
        self._guard(super().end, sequence)

    def withdraw(self, sequences: Iterable[Sequence]) -> None:
        sequences = list(sequences)
        self._write(["w", [name_of(each) for each in sequences]])
        self._guard(super().withdraw, sequences)

    # --- steps ---

    def fill(self) -> Batch | None:
        self._resumed.clear()
        self._forced.clear()
        try:
            batch = super().fill()
        except Exception as error:
            self._write(["n", *self._host_data()])
            self._write(["!", type(error).__name__, str(error)])
            raise
        forced, resumed = self._host_data()
        if batch is None:
            if not self._was_idle:
                self._write(["n", forced, resumed] if forced or resumed else ["n"])
                self._was_idle = not self.num_running and not self.num_waiting
            return None
        tokens, rows = len(batch.token_ids), len(batch.sequences)
        prompts: list[list[Any]] = []
        if tokens > rows:
            starts, counts = batch.starts.tolist(), batch.counts.tolist()
            lines = zip(batch.sequences, starts, counts)
            prompts = [[name_of(each), start, count] for each, start, count in lines if count > 1]
        event: list[Any] = ["f", self._now_us(), digest(batch), rows, tokens, prompts]
        self._write([*event, forced, resumed] if forced or resumed else event)
        return batch

    def _host_data(self) -> tuple[list[Any], list[Any]]:
        """Return the forced tokens that may be appended before the step, and the sequences that were resumed."""
        return [[name_of(each), ids] for each, ids in self._forced], [name_of(each) for each in self._resumed]

    def apply(self, batch: Batch, output: StepOutput) -> list[Delta]:
        tokens = [row[0] if len(row) == 1 else row for row in output.tokens]
        more: dict[str, Any] = {}
        if output.failed:
            more = {"failed": list(output.failed), "stuck": list(output.stuck)}
        if output.prompt_logprobs:
            more["scored"] = [[row, len(logprobs.chosen)] for row, logprobs in output.prompt_logprobs]
        if output.embeddings is not None:
            more["embedded"] = [row for row, vector in enumerate(output.embeddings) if vector is not None]
        for name, parts in (("hidden", output.hidden), ("experts", output.experts)):
            if parts:
                more[name] = [[row, len(values)] for row, values in parts]
        if output.taken:
            more["taken"] = [*output.taken.items()]
        event = ["t", self._now_us(), tokens]
        self._write([*event, more] if more else event)
        return self._guard(super().apply, batch, output)

    # --- failures and administration ---

    def fail(self, batches: Iterable[Batch]) -> list[int]:
        self._write(["d"])
        return self._guard(super().fail, batches)

    def give_up_newest(self, batches: Iterable[Batch]) -> list[int]:
        self._write(["o"])
        return self._guard(super().give_up_newest, batches)

    def recompute(self) -> None:
        self._write(["r"])
        self._guard(super().recompute)

    def rebuild(self, lost: Container[int] = ()) -> None:
        ids = {sequence.request.id for sequence in self}
        self._write(["b", [request_id for request_id in ids if request_id in lost]])
        self._guard(super().rebuild, lost)

    def flush(self) -> bool:
        self._write(["c"])
        return super().flush()

    def touch(self, ids: list[int], namespace: Hashable) -> int:
        self._write(["h", ids, None if namespace is None else repr(namespace)])
        return super().touch(ids, namespace)

    def forget_adapter(self, adapter_id: int) -> None:
        self._write(["u", adapter_id])
        super().forget_adapter(adapter_id)

    # --- measurements ---

    def limit_steps(self, prefill: int | None, mixed: int | None, *, scored: tuple[int, int] | None = None) -> None:
        self._note("limits", [prefill, mixed, scored])
        super().limit_steps(prefill, mixed, scored=scored)

    def limit_mixed_steps(self, num_tokens: int | None) -> None:
        self._note("mixed", num_tokens)
        super().limit_mixed_steps(num_tokens)

    def note_step_time(self, step_s: float | None) -> None:
        step_s = None if step_s is None else round(step_s, 5)
        self._note("step_s", step_s)
        super().note_step_time(step_s)

    def note_step(self, batch: Batch, num_tokens: int, seconds: float, late_s: float = 0.0) -> None:
        seconds, late_s = round(seconds, 6), round(late_s, 6)
        late_us = [round(late_s * 1e6)] if late_s else []
        self._write(["s", round(seconds * 1e6), num_tokens, *late_us])
        super().note_step(batch, num_tokens, seconds, late_s)

    def note_prompt_time(self, token_s: float | None) -> None:
        token_s = None if token_s is None else round(token_s, 7)
        self._note("token_s", token_s)
        super().note_prompt_time(token_s)

    def _note(self, name: str, value: Any) -> None:
        """Record a measured value, if it has changed since the last call."""
        if self._values.get(name) != value:
            self._values[name] = value
            self._write(["i", name, value])

    def _write(self, event: object) -> None:
        self._was_idle = False
        self._writer.write(event)

    def _now_us(self) -> int:
        return round((time.monotonic() - self._began_s) * 1e6)

    def _guard(self, function: Callable[..., T], *args: Any) -> T:
        """Call `function`. If it raises an exception, record the exception, and raise it."""
        try:
            return function(*args)
        except Exception as error:
            self._write(["!", type(error).__name__, str(error)])
            raise
