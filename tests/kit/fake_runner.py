"""A runner without a model: its tokens are a pure function of the history that it reads through the pages.

Like KV, what a step stores at a slot depends on the token *and* on everything before it. A wrong page, a
stale page, a page shared too early or a token that was not computed again therefore gives a wrong token, or
is reported at once as an `AssertionError`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any
from zlib import crc32

import numpy as np

from runtime.batch import UNKNOWN, Batch, StepOutput
from runtime.config.plan import SchedulerPlan
from runtime.constraint import Constraint
from runtime.kv_cache.kinds import CacheKind
from runtime.kv_cache.prefix_cache import PrefixCache
from runtime.kv_cache.states import StateKind
from runtime.kv_cache.windowed import WindowedPages, pages_held
from runtime.layers.forward_batch import KVSpec
from runtime.request import Delta, LogprobParams, Logprobs, Request
from runtime.sampling_params import SamplingParams
from runtime.scheduler.scheduler import Scheduler
from runtime.sequence import Sequence
from runtime.worker.device import CpuDevice
from runtime.worker.host_data import HostDataGate

_MASK = 2**61 - 1


def advance(state: int, token: int) -> int:
    """The state of a history that is longer by one token."""
    return (state * 1_000_003 + token + 7) * 2_654_435_761 % _MASK


def next_token(state: int, seed: int, vocab_size: int) -> int:
    """The token that follows a history, for one seed."""
    return (state ^ (seed * 0x9E37_79B9)) % 1_000_000_007 % vocab_size


def first_state(sequence: Sequence) -> int:
    """The state before the first token: KV of another namespace differs from the start."""
    return crc32(repr(sequence.namespace).encode())


def reference_embedding(sequence: Sequence) -> list[float]:
    """The vector of a sequence's prompt when it is computed alone: its state, as a float can hold it."""
    state = first_state(sequence)
    for token in sequence.ids[: sequence.num_prompt]:
        state = advance(state, token)
    return [float(state % 1_000_003), 1.0]


def reference_output(sequence: Sequence, vocab_size: int) -> list[int]:
    """What a sequence produces when it is computed alone."""
    state, output = first_state(sequence), []
    for token in sequence.ids[: sequence.num_prompt]:
        state = advance(state, token)
    while len(output) < sequence.max_tokens - sequence.num_prompt:
        token = next_token(state, sequence.seed, vocab_size)
        output.append(token)
        if token in sequence.stop_ids:
            break
        state = advance(state, token)
    return output


class FakeRunner:
    """Runs steps in order, each only when its tokens are asked for, so that aliased tables show."""

    def __init__(self, num_pages: int, page_size: int, num_sequences: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.num_tokens_computed = 0
        self.tokens_per_step = 1  # of every row that samples
        self.failed_requests: set[int] = set()  # their logits are "not finite" from now on
        self.last_batch: Batch | None = None
        self._page_size = page_size
        self._tokens = np.full(num_pages * page_size, UNKNOWN, np.int64)
        self._states: list[int | None] = [None] * (num_pages * page_size)
        self._last = [UNKNOWN] * num_sequences
        self._windowed: dict[int, int] = {}  # as `_states`, of layers that hold a window only
        self._window: int | None = None
        self._lines: dict[int, int] = {}  # of recurrent layers: the state of a history as a whole
        self._queue: deque[Batch] = deque()
        self._gate = HostDataGate(CpuDevice(), vocab_size, grace_s=0.0)

    @property
    def num_in_flight(self) -> int:
        return len(self._queue)

    @property
    def oldest(self) -> Batch | None:
        return self._queue[0] if self._queue else None

    def use_window(self, window: int) -> None:
        """Read and write windowed pages too, and expect every token to find its window there."""
        self._window = window

    def launch(self, batch: Batch) -> None:
        self.last_batch = batch
        self._queue.append(batch)

    def finish_oldest(self) -> tuple[Batch, StepOutput]:
        """Run the oldest step in flight and return its batch and output."""
        batch = self._queue.popleft()
        return batch, self._run(batch)

    def drop(self) -> list[Batch]:
        """A step failed: nothing in flight will arrive, and the pages hold anything."""
        batches = list(self._queue)
        self._queue.clear()
        self._states = [None] * len(self._states)
        self._tokens.fill(UNKNOWN)
        self._lines.clear()
        return batches

    def _run(self, batch: Batch) -> StepOutput:
        slots = [self._slots(batch, row) for row in range(len(batch.sequences))]
        self._store(batch, slots)
        states = [self._attend(batch, row, slots[row]) for row in range(len(batch.sequences))]
        self._check(slots, states)
        if self._window is not None:
            self._check_windows(batch, states, self._window)
        if "state" in batch.kinds:
            self._go_on(batch, states)
        return self._sample(batch, states)

    def _slots(self, batch: Batch, row: int) -> list[int]:
        """Where each position of a row's history lies, by page and offset."""
        size, table = self._page_size, batch.page_table[row]
        end = int(batch.starts[row] + batch.counts[row])
        assert not table[-(-end // size) :].any(), "the page table is not padded with 0"
        return [int(table[position // size]) * size + position % size for position in range(end)]

    def _store(self, batch: Batch, slots: list[list[int]]) -> None:
        """Like KV: all rows store before any row attends."""
        ids = iter(batch.token_ids.tolist())
        written: set[int] = set()
        for row, sequence_index in enumerate(batch.sequence_indices.tolist()):
            for slot in slots[row][int(batch.starts[row]) :]:
                token = next(ids)
                token = self._last[sequence_index] if token == UNKNOWN else token
                assert 0 <= token < self.vocab_size, "a token is used before it is known"
                assert slot not in written, "two rows of a step write the same slot"
                written.add(slot)
                self._tokens[slot] = token
                self._states[slot] = None
        assert next(ids, None) is None, "token_ids is longer than the rows"

    def _attend(self, batch: Batch, row: int, slots: list[int]) -> list[int]:
        state, states, start = first_state(batch.sequences[row]), [], int(batch.starts[row])
        for position, slot in enumerate(slots):
            state = advance(state, int(self._tokens[slot]))
            states.append(state)
            if position >= start:
                self._states[slot] = state
        self.num_tokens_computed += int(batch.counts[row])
        return states

    def _check(self, slots: list[list[int]], states: list[list[int]]) -> None:
        for row_slots, row_states in zip(slots, states):
            for slot, state in zip(row_slots, row_states):
                assert self._states[slot] == state, "a page holds another history than its reader has"

    def _check_windows(self, batch: Batch, states: list[list[int]], window: int) -> None:
        """All rows store their states in windowed pages, before any row reads those of its window."""
        size, table = self._page_size, batch.kinds["windowed"]["page_table"]
        slots = [
            [int(table[row, position // size]) * size + position % size for position in range(len(own))]
            for row, own in enumerate(states)
        ]
        starts = batch.starts.tolist()
        written = [slot for own, start in zip(slots, starts) for slot in own[start:]]
        assert len(written) == len(set(written)), "two rows of a step write the same windowed slot"
        for own, known, start in zip(slots, states, starts):
            self._windowed |= zip(own[start:], known[start:])
        for own, known, start in zip(slots, states, starts):
            first = max(0, start - window + 1)
            found = [self._windowed.get(slot) for slot in own[first:]]
            assert found == known[first:], "a windowed page holds another history than its reader has"

    def _go_on(self, batch: Batch, states: list[list[int]]) -> None:
        """Each span goes on from the history behind the tokens before it, and leaves its own."""
        spans = iter(batch.kinds["state"]["spans"].tolist())
        slot = 0
        for row, start, count in zip(states, batch.starts.tolist(), batch.counts.tolist()):
            position, end = start, start + count
            while position < end:
                read, write, first, length = next(spans)
                assert first == slot + position - start, "a span is of another row"
                assert write > 0, "the zeros are overwritten"
                known = self._lines.get(read) if read else None
                assert known == (row[position - 1] if position else None), "a state is of another history"
                position += length
                self._lines[write] = row[position - 1]
            assert position == end, "a span goes on beyond its row"
            slot += count
        assert next(spans, None) is None

    def _sample(self, batch: Batch, states: list[list[int]]) -> StepOutput:
        tokens: list[list[int]] = [[] for _ in batch.sequences]
        failed = [
            row for row, sequence in enumerate(batch.sequences) if sequence.request.id in self.failed_requests
        ]
        logprobs: list[Logprobs | None] | None = None
        if batch.sampling is not None:
            late = self._gate.arrived(batch).without_token
            wanted = batch.sampling.logprobs
            if wanted is not None:
                logprobs = [None for _ in batch.sequences]
            for index, row in enumerate(batch.sampling.rows.tolist()):
                if index in late:  # the device holds some id there
                    self._last[int(batch.sequence_indices[row])] = 0
                    continue
                state = states[row][-1]
                for _ in range(self.tokens_per_step):
                    tokens[row].append(next_token(state, batch.sequences[row].seed, self.vocab_size))
                    state = advance(state, tokens[row][-1])
                self._last[int(batch.sequence_indices[row])] = tokens[row][-1]
                if logprobs is not None and wanted is not None and wanted[index] is not None:
                    logprobs[row] = _logprobs(tokens[row], wanted[index])
        prompts = [
            (asked.row, _logprobs(asked.targets.tolist(), asked.params)) for asked in batch.prompt_logprobs
        ]
        return StepOutput(tokens, failed, logprobs, prompts, self._embed(batch, states))

    def _embed(self, batch: Batch, states: list[list[int]]) -> list[list[float] | None] | None:
        if batch.embedding_rows is None:
            return None
        embeddings: list[list[float] | None] = [None for _ in batch.sequences]
        for row in batch.embedding_rows.tolist():
            embeddings[row] = [float(states[row][-1] % 1_000_003), 1.0]
        return embeddings


def _logprobs(ids: list[int], params: LogprobParams | None) -> Logprobs:
    """The logprob of a token is minus its id: easy to recognise."""
    top = [[(-float(token), token)] for token in ids] if params is not None and params.top else []
    return Logprobs([(-float(token), token) for token in ids], list(top), [])


def make_plan(**changes: object) -> SchedulerPlan:
    """A schedule plan for tests: small, chunking off, mixed, with overlap."""
    values: dict[str, object] = {
        "max_running": 8,
        "max_queued": 1000,
        "chunk_tokens": None,
        "max_prefill_tokens": 16384,
        "policy": "fcfs",
        "mixed": True,
        "overlap": True,
        "new_token_ratio": 0.7,
        "min_new_token_ratio": 0.1,
        "new_token_ratio_decay": 0.001,
        "stream_interval": 1,
        "log_interval_steps": 40,
        "watchdog_timeout_s": 300.0,
    }
    return SchedulerPlan(**(values | changes))  # type: ignore[arg-type]


def make_sequence(
    prompt: Iterable[int],
    *,
    max_new_tokens: int | None = 4,
    index: int = 0,
    seed: int = 0,
    stop_ids: Iterable[int] = (),
    request: Request | None = None,
    logprobs: LogprobParams | None = None,
    namespace: str | None = None,
    urgency: int = 0,
    wants_embedding: bool = False,
    constraint: Constraint | None = None,
    **sampling: object,
) -> Sequence:
    """A sequence with a request of its own, unless one is given (for several choices)."""
    ids = tuple(prompt)
    if request is None:
        params = SamplingParams(max_new_tokens=max_new_tokens, **sampling)  # type: ignore[arg-type]
        request = Request(
            ids=ids,
            sampling=params,
            logprobs=logprobs,
            wants_embedding=wants_embedding,
            constraint=constraint,
        )
    limit = 0 if request.wants_embedding else request.sampling.max_new_tokens
    return Sequence(
        request,
        index,
        ids,
        max_tokens=len(ids) + (limit if limit is not None else 1 << 30),
        stop_ids=frozenset(stop_ids),
        seed=seed,
        namespace=namespace,
        urgency=urgency,
    )


class Drive:
    """A schedule with a fake runner, or another like it, and `depth` steps in flight, checked after every change."""

    def __init__(
        self,
        plan: SchedulerPlan | None = None,
        *,
        num_pages: int = 64,
        page_size: int = 4,
        prefix: bool = True,
        depth: int = 1,
        vocab_size: int = 50,
        context_length: int = 4096,
        watch: Callable[[Batch], None] | None = None,
        runner: Any = None,
        window: int | None = None,
        num_windowed: int = 0,
        num_states: int = 0,
    ) -> None:
        """With a `window` there are layers that hold no more, in so many pages, or few more than one sequence needs."""
        # With `num_states` there are layers that have so many lines of states.
        plan = plan or make_plan()
        kinds: list[CacheKind] = []
        if window is not None:
            least = min(num_pages, pages_held(window, page_size) + 1)
            specs = {0: KVSpec(1, 1, window)}
            kinds = [WindowedPages(specs, max(least, num_windowed), num_pages, page_size)]
        if num_states:
            states = StateKind({}, 1 + num_states, num_pages, page_size)
            plan = replace(plan, max_running=min(plan.max_running, states.max_sequences))
            kinds.append(states)
        self.cache = PrefixCache(num_pages, page_size, enabled=prefix, kinds=kinds)
        self.scheduler = Scheduler(plan, self.cache, vocab_size=vocab_size, context_length=context_length)
        self.runner = runner or FakeRunner(num_pages, page_size, plan.max_running, vocab_size)
        if window is not None:
            self.runner.use_window(window)
        self.depth = depth
        self.deltas: list[Delta] = []
        self._watch = watch

    def add(self, *sequences: Sequence) -> None:
        self.scheduler.add(*sequences)
        self.scheduler.check()

    def step(self) -> Batch | None:
        """Fill and launch one batch, then apply the oldest while more than `depth` are in flight."""
        batch = self.scheduler.fill()
        self.scheduler.check()
        if batch is not None:
            if self._watch is not None:
                self._watch(batch)
            self.runner.launch(batch)
        if self.runner.num_in_flight > (self.depth if batch is not None else 0):
            self.apply()
        return batch

    def apply(self) -> list[Delta]:
        batch, output = self.runner.finish_oldest()
        deltas = self.scheduler.apply(batch, output)
        self.deltas += deltas
        self.scheduler.check()
        return deltas

    def run(self, max_steps: int = 2000) -> list[Delta]:
        """Step until nothing runs or waits and nothing is in flight; returns all deltas so far."""
        for _ in range(max_steps):
            idle = not self.runner.num_in_flight
            if self.step() is None and idle:
                assert self.scheduler.num_waiting == self.scheduler.num_running == 0, "the schedule is stuck"
                return self.deltas
        raise AssertionError(f"not finished after {max_steps} steps")

    def output(self, sequence: Sequence) -> list[int]:
        """All ids that the deltas brought for a sequence."""
        key = (sequence.request.id, sequence.index)
        return [token for delta in self.deltas if delta[:2] == key for token in delta.ids]

    def expected(self, sequence: Sequence) -> list[int]:
        """What the sequence produces when it is computed alone."""
        return reference_output(sequence, self.runner.vocab_size)
