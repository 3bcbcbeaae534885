"""A runner without a model, whose tokens are a pure function of the history that it reads through the pages.

Like KV, the value that a step stores in a slot depends on the token and on all tokens before it. Therefore a wrong
page, a stale page, a page that is shared too early or a token that is not recomputed gives a wrong token, or raises
`AssertionError` immediately.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from runtime.batch import ADAPTER, UNKNOWN, Batch, PageCopy, StepOutput
from runtime.config.plan import SchedulerPlan
from runtime.constraint import Constraint
from runtime.kv_cache.host_tier import HostTier
from runtime.kv_cache.kinds import CacheKind
from runtime.kv_cache.prefix_cache import PrefixCache
from runtime.kv_cache.registry import KINDS
from runtime.kv_cache.states import StateKind
from runtime.kv_cache.storage_tier import StorageTier
from runtime.kv_cache.windowed import WindowedPages, pages_held
from runtime.layers.forward_batch import KVSpec
from runtime.replay.recorder import RecordedScheduler, RecordWriter
from runtime.request import USUAL, Adapter, Delta, LogprobParams, Logprobs, Request, Service
from runtime.sampling_params import SamplingParams
from runtime.scheduler.scheduler import Scheduler
from runtime.sequence import Sequence
from runtime.speculative.model_drafts import DRAFT
from runtime.worker.device import CpuDevice
from runtime.worker.drafts import with_proposals
from runtime.worker.host_data import HostDataGate

_MASK = 2**61 - 1


def advance(state: int, token: int) -> int:
    """Return the state after one more token."""
    return (state * 1_000_003 + token + 7) * 2_654_435_761 % _MASK


def next_token(state: int, seed: int, vocab_size: int) -> int:
    """Return the token that follows a history, for one seed."""
    return (state ^ (seed * 0x9E37_79B9)) % 1_000_000_007 % vocab_size


def first_state(sequence: Sequence) -> int:
    """Return the state before the first token. It depends on the namespace, like KV."""
    return crc32(repr(sequence.namespace).encode())


def reference_embedding(sequence: Sequence) -> list[float]:
    """Return the embedding of a prompt that is computed alone: its state as a float."""
    state = first_state(sequence)
    for token in sequence.ids[: sequence.num_prompt]:
        state = advance(state, token)
    return [float(state % 1_000_003), 1.0]


def reference_output(sequence: Sequence, vocab_size: int) -> list[int]:
    """Return the output of a sequence that is computed alone."""
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
    """Runs steps in order, each only when its tokens are requested, so that aliased page tables are detected."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_sequences: int,
        vocab_size: int,
        *,
        num_host_pages: int = 0,
    ) -> None:
        self.vocab_size = vocab_size
        self.num_tokens_computed = 0
        self.tokens_per_step = 1  # number of tokens of every row that samples
        self.failed_requests: set[int] = set()  # requests whose logits are "not finite" from now on
        self.last_batch: Batch | None = None
        self.page_size = self._page_size = page_size
        self._tokens = np.full(num_pages * page_size, UNKNOWN, np.int64)
        self._states: list[int | None] = [None] * (num_pages * page_size)
        self._host_tokens = np.full(num_host_pages * page_size, UNKNOWN, np.int64)
        self._host_states: list[int | None] = [None] * (num_host_pages * page_size)
        self._last = [UNKNOWN] * num_sequences
        # number of computed tokens of each sequence after its newest drafts
        self._lengths: list[int | None] = [None] * num_sequences
        self.num_unknown_starts = 0  # number of rows with unknown starts so far
        self._taken: dict[int, int] = {}  # `StepOutput.taken` of the newest step
        self._windowed: dict[int, int] = {}  # like `_states`, for sliding-window layers
        self._window: int | None = None
        self._lines: dict[int, int] = {}  # state slots of recurrent layers: slot -> state of the whole history
        self._adapters: dict[int, int] = {}  # slot -> id of the adapter in it
        self._queue: deque[Batch | Callable[[], None]] = deque()
        self._gate = HostDataGate(CpuDevice(), vocab_size, grace_s=0.0)

    @property
    def num_in_flight(self) -> int:
        return sum(isinstance(each, Batch) for each in self._queue)

    @property
    def oldest(self) -> Batch | None:
        return next((each for each in self._queue if isinstance(each, Batch)), None)

    def call(self, work: Callable[[], None]) -> None:
        """Run `work` after the steps that are in flight, and before later ones."""
        self._queue.append(work)

    def run_calls(self) -> None:
        """Run the work that waits for no step."""
        while self._queue and not isinstance(self._queue[0], Batch):
            self._queue.popleft()()  # type: ignore[operator]

    def use_window(self, window: int) -> None:
        """Read and write windowed pages too, and check that every token finds its window there."""
        self._window = window

    def launch(self, batch: Batch) -> None:
        self.last_batch = batch
        self._queue.append(batch)

    def finish_oldest(self) -> tuple[Batch, StepOutput]:
        """Run the oldest step in flight, and return its batch and output."""
        self.run_calls()
        batch = self._queue.popleft()
        assert isinstance(batch, Batch)
        return batch, self._run(batch)

    def drop(self, kept: Iterable[int] = ()) -> list[Batch]:
        """Drop all steps in flight after a failed step. The contents of pages are then undefined.

        Only the host pages `kept` keep their contents.
        """
        known = {page: self.read_host(page) for page in kept}
        batches = [each for each in self._queue if isinstance(each, Batch)]
        calls = [each for each in self._queue if not isinstance(each, Batch)]
        self._queue.clear()
        for call in calls:
            call()
        self._states = [None] * len(self._states)
        self._tokens.fill(UNKNOWN)
        self._host_states = [None] * len(self._host_states)
        self._host_tokens.fill(UNKNOWN)
        for page, values in known.items():
            self.write_host(page, values)
        self._lines.clear()
        self._adapters.clear()
        return batches

    def read_host(self, page: int) -> np.ndarray:
        """Return the tokens and states of a host page, int64 [2, page_size]. Unknown states are -1."""
        slots = slice(page * self._page_size, (page + 1) * self._page_size)
        states = [-1 if state is None else state for state in self._host_states[slots]]
        return np.stack([self._host_tokens[slots], np.array(states, np.int64)])

    def write_host(self, page: int, values: np.ndarray) -> None:
        """Set the tokens and states of a host page, like `read_host` returns them."""
        slots = slice(page * self._page_size, (page + 1) * self._page_size)
        self._host_tokens[slots] = values[0]
        self._host_states[slots] = values[1].tolist()

    def forget_host(self, pages: Iterable[int]) -> None:
        """Make the contents of these host pages unknown."""
        for page in pages:
            self.write_host(page, np.full((2, self._page_size), -1, np.int64))

    def _run(self, batch: Batch) -> StepOutput:
        for copy in batch.copies:
            self.copy(copy)
        self._check_adapters(batch)
        bounds = batch.starts + batch.counts
        batch = self._with_exact_starts(batch)
        batch = with_proposals(batch, self._with_proposals(batch))
        slots = [self._slots(batch, row, int(bounds[row])) for row in range(len(batch.sequences))]
        self._store(batch, slots)
        self._repeat(batch, slots)
        states = [self._attend(batch, row, slots[row]) for row in range(len(batch.sequences))]
        self._repeat(batch, slots)
        self._check(slots, states)
        if self._window is not None:
            self._check_windows(batch, states, self._window)
        if "state" in batch.kinds:
            self._go_on(batch, states)
        return self._sample(batch, states)

    def _check_adapters(self, batch: Batch) -> None:
        """Check that each row names a slot that holds the adapter of its request, or none without an adapter."""
        self._adapters |= {placement.slot: placement.adapter_id for placement in batch.adapters}
        slots = batch.row_values.get(ADAPTER, np.zeros(len(batch.sequences), np.int32))
        for slot, sequence in zip(slots.tolist(), batch.sequences, strict=True):
            adapter = sequence.request.adapter
            assert self._adapters.get(slot) == (None if adapter is None else adapter.id), "the slot of another adapter"

    def copy(self, copy: PageCopy) -> None:
        """Copy all slots of each page."""
        pools = {"device": (self._tokens, self._states), "host": (self._host_tokens, self._host_states)}
        sources, targets = copy.source_pages.tolist(), copy.target_pages.tolist()
        assert len(set(targets)) == len(targets) == len(sources), "a page is copied to twice"
        (tokens, states), (other_tokens, other_states) = pools[copy.source], pools[copy.target]
        for source, target in zip(sources, targets, strict=True):
            for offset in range(self._page_size):
                at, to = source * self._page_size + offset, target * self._page_size + offset
                other_tokens[to], other_states[to] = tokens[at], states[at]

    def _with_exact_starts(self, batch: Batch) -> Batch:
        if batch.unknown_starts is None:
            return batch
        starts = batch.starts.copy()
        for row in np.flatnonzero(batch.unknown_starts).tolist():
            length = self._lengths[int(batch.sequence_indices[row])]
            assert length is not None, "a row follows no drafts"
            drafted = batch.token_ids[batch.counts.cumsum()[row] - batch.counts[row] + 1 :][: batch.counts[row] - 1]
            assert (drafted == DRAFT).all(), "a row after drafts computes one token, and those of a draft model"
            assert length <= starts[row], "a start is not the upper bound of its row"
            starts[row] = length
            self.num_unknown_starts += 1
        rejected = batch.starts - starts
        kinds = {kind: {**arrays, **KINDS[kind].with_starts(arrays, rejected)} for kind, arrays in batch.kinds.items()}
        return replace(batch, starts=starts, kinds=kinds, unknown_starts=None)

    def _with_proposals(self, batch: Batch) -> Batch:
        """Propose the ids that a draft model must propose: some of them are right."""
        if batch.drafts is None or DRAFT not in batch.token_ids:
            return batch
        ids, ends = batch.token_ids.copy(), np.cumsum(batch.counts).tolist()
        for row, count in zip(batch.drafts.rows.tolist(), batch.drafts.counts.tolist(), strict=True):
            if ids[ends[row] - count] != DRAFT:  # prompt lookup proposed its drafts
                continue
            start, sequence = int(batch.starts[row]), batch.sequences[row]
            state: int | None = first_state(sequence)
            if start:
                page, offset = divmod(start - 1, self._page_size)
                state = self._states[int(batch.page_table[row, page]) * self._page_size + offset]
            assert state is not None, "a draft model follows tokens that are not computed"
            last = int(ids[ends[row] - count - 1])
            state = advance(state, self._last[int(batch.sequence_indices[row])] if last == UNKNOWN else last)
            for number in range(ends[row] - count, ends[row]):
                assert ids[number] == DRAFT
                is_wrong = crc32(bytes([start % 256, number % 256, sequence.seed % 256])) % 4 == 0
                right = next_token(state, sequence.seed, self.vocab_size)
                ids[number] = (right + is_wrong) % self.vocab_size
                depth = number - ends[row] + count + 1
                for offset, branch in enumerate(self._branches_at(batch, row, depth)):
                    ids[ends[branch] - 1] = (right + (offset + 1) * (1 if not is_wrong else 2) - is_wrong * 2) % (
                        self.vocab_size
                    )
                state = advance(state, int(ids[number]))
        return replace(batch, token_ids=ids)

    def _branches_at(self, batch: Batch, row: int, depth: int) -> list[int]:
        """Return the branches of a row with alternatives to its draft with this number."""
        branches = batch.drafts.branches if batch.drafts is not None else None
        if branches is None:
            return []
        chosen = (branches.owners == row) & (branches.depths == depth)
        return branches.rows[chosen].tolist()

    def _slots(self, batch: Batch, row: int, bound: int) -> list[int]:
        """Return the slot (page and offset) of each position of a row's history. The row has pages up to its upper
        bound.
        """
        size, table = self._page_size, batch.page_table[row]
        end = int(batch.starts[row] + batch.counts[row])
        assert not table[-(-bound // size) :].any(), "the page table is not padded with 0"
        return [int(table[position // size]) * size + position % size for position in range(end)]

    def _store(self, batch: Batch, slots: list[list[int]]) -> None:
        """Store the states of all rows before any row attends, like KV."""
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

    def _repeat(self, batch: Batch, slots: list[list[int]]) -> None:
        """Store the tokens of this step before each branch in the branch's first page, too."""
        if batch.drafts is None or batch.drafts.branches is None:
            return
        for row, owner, depth in zip(*(each.tolist() for each in batch.drafts.branches)):
            start, first = int(batch.starts[owner]), int(batch.starts[row])
            assert first == start + depth, "a branch begins elsewhere"
            for position in range(max(start, first // self._page_size * self._page_size), first):
                source, target = slots[owner][position], slots[row][position]
                assert source != target, "a branch has no page of its own"
                self._tokens[target], self._states[target] = self._tokens[source], self._states[source]

    def _take(self, batch: Batch, states: list[list[int]], row: int, count: int, tokens: list[int]) -> None:
        """Append the tokens of the branch whose first id equals the row's last token, if there is such a branch."""
        branches = batch.drafts.branches if batch.drafts is not None else None
        if branches is None or len(tokens) > count:
            return
        ends = np.cumsum(batch.counts).tolist()
        for branch, owner, depth in zip(*(each.tolist() for each in branches)):
            ids = batch.token_ids[ends[branch] - int(batch.counts[branch]) : ends[branch]].tolist()
            if (owner, depth, ids[0]) != (row, len(tokens), tokens[-1]):
                continue
            for state, draft in zip(states[branch][-len(ids) :], [*ids[1:], UNKNOWN], strict=True):
                tokens.append(next_token(state, batch.sequences[row].seed, self.vocab_size))
                if tokens[-1] != draft:
                    break
            self._taken[row] = branch - row - 1
            return

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
        """Store the states of all rows in windowed pages, before any row reads its window."""
        size, table = self._page_size, batch.kinds["windowed"]["page_table"]
        slots = [
            [int(table[row, position // size]) * size + position % size for position in range(len(own))]
            for row, own in enumerate(states)
        ]
        starts = batch.starts.tolist()
        written = [slot for own, start in zip(slots, starts) for slot in own[start:]]
        assert len(written) == len(set(written)), "two rows of a step write the same windowed slot"
        if batch.drafts is not None and batch.drafts.branches is not None:
            # As the worker does: tokens before a branch are stored in its first page, too.
            for row, owner, _ in zip(*(each.tolist() for each in batch.drafts.branches)):
                for position in range(starts[row] // size * size, starts[row]):
                    assert slots[row][position] != slots[owner][position], "a branch has no windowed page of its own"
                    if position < starts[owner]:
                        copied = self._windowed.get(slots[owner][position])
                        self._windowed[slots[row][position]] = -1 if copied is None else copied
                    else:
                        self._windowed[slots[row][position]] = states[owner][position]
        for own, known, start in zip(slots, states, starts):
            self._windowed |= zip(own[start:], known[start:])
        for own, known, start in zip(slots, states, starts):
            first = max(0, start - window + 1)
            found = [self._windowed.get(slot) for slot in own[first:]]
            assert found == known[first:], "a windowed page holds another history than its reader has"

    def _go_on(self, batch: Batch, states: list[list[int]]) -> None:
        """Let each span continue from its state slot, and write the new state."""
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
        failed = [row for row, sequence in enumerate(batch.sequences) if sequence.request.id in self.failed_requests]
        logprobs: list[Logprobs | None] | None = None
        if batch.sampling is not None:
            late = self._gate.arrived(batch).without_token
            wanted = batch.sampling.logprobs
            if wanted is not None:
                logprobs = [None for _ in batch.sequences]
            drafted: dict[int, int] = {}
            self._taken = {}
            branches: Collection[int] = ()
            if batch.drafts is not None and batch.drafts.branches is not None:
                branches = batch.drafts.branches.rows.tolist()
            if batch.drafts is not None:
                drafted = dict(zip(batch.drafts.rows.tolist(), batch.drafts.counts.tolist(), strict=True))
                self._verify(batch, states, drafted, tokens, late)
            for index, row in enumerate(batch.sampling.row_of.tolist()):
                if row in drafted or row in branches:
                    continue
                if index in late:  # the device has an arbitrary id here
                    self._last[int(batch.sequence_indices[row])] = 0
                    continue
                state = states[row][-1]
                for _ in range(self.tokens_per_step):
                    tokens[row].append(next_token(state, batch.sequences[row].seed, self.vocab_size))
                    state = advance(state, tokens[row][-1])
                self._last[int(batch.sequence_indices[row])] = tokens[row][-1]
                if logprobs is not None and wanted is not None and wanted[index] is not None:
                    logprobs[row] = _logprobs(tokens[row], wanted[index])
        prompts = [(asked.row, _logprobs(asked.targets.tolist(), asked.params)) for asked in batch.prompt_logprobs]
        return StepOutput(tokens, failed, logprobs, prompts, self._embed(batch, states), taken=self._taken)

    def _verify(
        self,
        batch: Batch,
        states: list[list[int]],
        drafted: dict[int, int],
        tokens: list[list[int]],
        late: Collection[int],
    ) -> None:
        """Choose a token at each position of rows with drafts, and keep the tokens after accepted drafts.

        The row ends before a position whose host data is late.
        """
        ends = np.cumsum(batch.counts).tolist()
        for row, count in drafted.items():
            assert batch.sampling is not None
            positions = batch.sampling.positions[batch.sampling.row_of == row].tolist()
            assert positions == list(range(ends[row] - count - 1, ends[row])), "all positions choose"
            sequence = batch.sequences[row]
            drafts = batch.token_ids[ends[row] - count : ends[row]].tolist()
            first = int(np.searchsorted(batch.sampling.row_of, row))
            for place, (state, draft) in enumerate(zip(states[row][-1 - count :], [*drafts, UNKNOWN], strict=True)):
                if first + place in late:
                    break
                tokens[row].append(next_token(state, sequence.seed, self.vocab_size))
                if tokens[row][-1] != draft:
                    break
            if not any(first + place in late for place in range(count + 1)):
                self._take(batch, states, row, count, tokens[row])
            index = int(batch.sequence_indices[row])
            self._last[index] = tokens[row][-1] if tokens[row] else 0
            self._lengths[index] = int(batch.starts[row]) + len(tokens[row])

    def _embed(self, batch: Batch, states: list[list[int]]) -> list[list[float] | None] | None:
        if batch.embedding_rows is None:
            return None
        embeddings: list[list[float] | None] = [None for _ in batch.sequences]
        for row in batch.embedding_rows.tolist():
            embeddings[row] = [float(states[row][-1] % 1_000_003), 1.0]
        return embeddings


def _logprobs(ids: list[int], params: LogprobParams | None) -> Logprobs:
    """Return logprobs that are easy to recognise: minus the token's id."""
    top = [[(-float(token), token)] for token in ids] if params is not None and params.top else []
    return Logprobs([(-float(token), token) for token in ids], list(top), [])


def make_plan(**changes: object) -> SchedulerPlan:
    """Return a small scheduler plan for tests: no chunking, mixed steps, with overlap.

    `draft_methods` says who proposes `max_drafts`: "lookup" (the default), "model" or "both".
    """
    methods, most = changes.pop("draft_methods", "lookup"), changes.get("max_drafts", 0)
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
        "max_lookup_drafts": 0 if methods == "model" else most,
        "max_model_drafts": 0 if methods == "lookup" else most,
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
    namespace: Hashable = None,
    urgency: int = 0,
    wants_embedding: bool = False,
    constraint: Constraint | None = None,
    adapter: Adapter | None = None,
    owner: str = "",
    service: Service = USUAL,
    **sampling: object,
) -> Sequence:
    """Return a sequence with its own request, or with the given request (for several choices)."""
    ids = tuple(prompt)
    if request is None:
        params = SamplingParams(max_new_tokens=max_new_tokens, **sampling)  # type: ignore[arg-type]
        request = Request(
            ids=ids,
            sampling=params,
            logprobs=logprobs,
            wants_embedding=wants_embedding,
            constraint=constraint,
            adapter=adapter,
            owner=owner,
            service=service,
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
    """A scheduler with a fake runner (or a similar one) and `depth` steps in flight, checked after every change."""

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
        num_host_pages: int = 0,
        num_tier_pages: int = 0,
        write_policy: str = "write_through",
        step_pages: int = 64,
        num_pinnable: int = 0,
        storage: Callable[[HostTier], StorageTier] | None = None,
        record: Path | None = None,
    ) -> None:
        """With a `window`, some layers keep only their window, in this number of pages; the default is little more
        than one sequence needs.
        """
        # With `num_states`, some layers have this number of state slots.
        plan = plan or make_plan()
        kinds: list[CacheKind] = []
        if window is not None:
            least = min(num_pages, pages_held(window, page_size) + 1)
            specs = {0: KVSpec(1, 1, window)}
            kinds = [WindowedPages(specs, max(least, num_windowed), num_pages, page_size)]
        if num_states:
            states = StateKind({}, 1 + num_states, num_pages, page_size, plan.max_drafts)
            plan = replace(plan, max_running=min(plan.max_running, states.max_sequences))
            kinds.append(states)
        self.cache = PrefixCache(
            num_pages,
            page_size,
            enabled=prefix,
            kinds=kinds,
            num_host_pages=num_host_pages,
            num_tier_pages=num_tier_pages,
            write_policy=write_policy,
            step_pages=step_pages,
            num_pinnable=num_pinnable,
        )
        if storage is not None and self.cache.tier is not None:
            self.cache.storage = storage(self.cache.tier)
        self.on_idle: Callable[[], bool] = lambda: False  # called when nothing can run; returns whether it helped
        self.num_steps = 0
        sizes = {"vocab_size": vocab_size, "context_length": context_length}
        if record is None:
            self.scheduler = Scheduler(plan, self.cache, **sizes)
        else:
            self.scheduler = RecordedScheduler(
                plan,
                self.cache,
                RecordWriter(record),
                num_host_pages=num_host_pages,
                num_tier_pages=num_tier_pages,
                write_policy=write_policy,
                step_pages=step_pages,
                **sizes,
            )
        self.runner = runner or FakeRunner(
            num_pages, page_size, plan.max_running, vocab_size, num_host_pages=num_host_pages + num_tier_pages
        )
        if window is not None:
            self.runner.use_window(window)
        self.depth = depth
        self.deltas: list[Delta] = []
        self._watch = watch

    def add(self, *sequences: Sequence) -> None:
        self.scheduler.add(*sequences)
        self.scheduler.check()

    def step(self) -> Batch | None:
        """Fill and launch one batch, then apply the oldest step while more than `depth` are in flight."""
        self.num_steps += 1
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
        """Step until no sequence runs or waits and no step is in flight. Return all deltas so far."""
        for _ in range(max_steps):
            idle = not self.runner.num_in_flight
            if self.step() is None and idle and not self.on_idle():
                assert self.scheduler.num_waiting == self.scheduler.num_running == 0, "the schedule is stuck"
                return self.deltas
        raise AssertionError(f"not finished after {max_steps} steps")

    def output(self, sequence: Sequence) -> list[int]:
        """Return all ids that the deltas have brought for a sequence."""
        key = (sequence.request.id, sequence.index)
        return [token for delta in self.deltas if delta[:2] == key for token in delta.ids]

    def expected(self, sequence: Sequence) -> list[int]:
        """Return the output of the sequence when it is computed alone."""
        return reference_output(sequence, self.runner.vocab_size)
