"""CUDA graphs of decode steps: one launch instead of hundreds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ops.attention import AttentionMetadata
from ops.recurrence import ZEROS, independent, single_tokens
from ops.sampling import SamplingArrays
from runtime.config.resolve.graph_sizes import Buckets
from runtime.kv_cache.pools import KVPool
from runtime.kv_cache.registry import KINDS
from runtime.layers.batch_reads import BatchReads
from runtime.layers.forward_batch import ForwardBatch, KindInputs
from runtime.sampling_params import ROW_ARRAYS
from runtime.worker.device import Device, Event, Graph, collector_paused
from runtime.worker.prompt_graphs import SPANS, PromptGraphs
from runtime.worker.step_inputs import Forward, kind_inputs

logger = logging.getLogger("penstock.core")

PROFILE_ROWS = 20  # maximum number of rows in the table that --enable-profile-cuda-graph logs
REPEATS_PER_ROW = 2  # tokens per row for which a graph's `AttentionMetadata.repeated` has room
NOTHING_MORE = BatchReads()
# For each page table (see `_tables`), the functions that write the attention plan of a step before the replay.
Replans = list[dict[Hashable, Callable[[AttentionMetadata], None]]]


@dataclass(frozen=True, slots=True)
class Choice:
    """The sampling part of a captured step."""

    logits: Callable[[Tensor], Tensor]  # hidden [R, E] -> float32 [R, V]
    choose: Callable[..., tuple[Tensor, Tensor]]
    # Whether `choose` can be captured only for greedy rows, because for other rows it reads parameters on the host.
    greedy_only: bool
    limits: frozenset[str]  # sampling limits (for example "top_k") that a captured `choose` supports


class _Kind(NamedTuple):
    """The parts of a step that a graph computes besides hidden states."""

    chooses: bool  # whether it samples tokens
    repeats: bool = False  # whether it also stores the KV of some tokens in a second slot, for branches of drafts
    # Whether rows may continue from the recurrent states of other rows, as the tokens of a row with draft tokens do.
    chained: bool = False


@dataclass(frozen=True, slots=True)
class _Captured:
    """A captured graph."""

    graph: Graph
    # Buffers that each replay writes: hidden states, or (if the graph samples) ids and their validity.
    results: tuple[Tensor, ...]
    replans: Replans


class CudaGraphRunner:
    """Replays captured forward passes of steps with decode rows and rows with draft tokens.

    A batch that is too large or has prompt rows is computed by `prompts` if it fits one of its sizes, otherwise by
    `eager`. If the graph of the right size is not captured yet, `eager` computes the batch too.

    Every row of a graph computes one token. A row of several tokens (a batch with `token_rows`) becomes one row for
    each token, with the same pages. This is correct because every layer stores the KV of all rows before any row
    attends. Recurrent layers compute the rows of a sequence in order (`_Kind.chained`).

    A graph captures `eager` (usually the model) with a batch of fixed buffers, into which a step's inputs are copied.
    Padding rows write to the cache's scratch page and read its position 0. An attention backend that plans with the
    rows on the host must register a function during the capture (`AttentionMetadata.replans`), which is called with the
    rows of each step before the replay. Buffers for row values, axes and media vectors exist only if the model reads
    them.

    The argument `states` maps the hidden states [R, E] to the states that a draft head reads (or, if the model is a
    draft head, to its own states). Every step stores the result in the attribute `states`. `prompts` must have been
    created with the same function.

    With a `choice`, graphs also sample tokens (`choose`). Steps that need more than tokens, such as log-probabilities,
    use a second graph of each size, which ends at the hidden states. With `takes_branches`, steps with branches of
    drafts have graphs of their own, which store the KV of some tokens twice. The graphs of a kind are captured after
    the first step that needs this kind.

    All graphs share buffers of the largest size. Smaller graphs use the first rows.
    """

    def __init__(
        self,
        eager: Forward,
        cache: KVPool,
        device: Device,
        buckets: Buckets,
        *,
        max_pages: int,
        reads: BatchReads = NOTHING_MORE,
        choice: Choice | None = None,
        prompts: PromptGraphs | None = None,
        states: Callable[[Tensor], Tensor] | None = None,
        takes_branches: bool = False,
        takes_drafts: bool = False,
        collect_garbage: bool = False,
        profile: bool = False,
    ) -> None:
        """Allocate the buffers. `max_pages` is the width of the page tables; batches with longer rows run eagerly.

        `reads` are the optional inputs that the model reads. A batch must have no other optional inputs. With
        `takes_drafts`, `request_all` also requests the graphs of drafts on recurrent layers.
        """
        self._eager = eager
        self._device = device
        self._buckets = buckets
        self._cache = cache
        # Steps can be captured only if each other cache kind has exactly one array: a page table or spans.
        self._capturable = all(
            [*KINDS[kind].scratch_arrays([], 0)] in (["page_table"], [SPANS]) for kind in cache.kinds
        )
        self._choice = choice
        self._prompts = prompts
        self._states_of = states
        # See `states` above: [T, S] of the last step's tokens, valid until the next step.
        self.states: Tensor | None = None
        self._takes_branches, self._takes_drafts = takes_branches, takes_drafts
        self._waiting: list[tuple[int, _Kind]] = []  # sizes and kinds of the graphs to capture, the next one last
        self._num_missed = 0  # number of steps since the last capture that ran eagerly because their graph was missing
        self._requested: set[_Kind] = set()
        if self._capturable:
            self._request_capture(_Kind(choice is not None))
        if not self._capturable:
            logger.info(
                "No CUDA graphs are captured: steps with %s caches cannot be captured.",
                ", ".join(cache.kinds),
            )
        self._graphs: dict[tuple[int, _Kind], _Captured] = {}
        # Graph size -> event after the size's last attention plan was copied to the device. The graphs of a size share
        # the plan's host memory.
        self._planned: dict[int, Event] = {}
        self._collect_garbage = collect_garbage
        self._profile = profile
        self._seconds = 0.0
        with torch.inference_mode(), device.forward():
            self._buffers = self._make_buffers(max(buckets.sizes, default=0), max_pages, reads)
            self._nonzero_values: set[str] = set()  # names of row values whose buffers may contain values other than 0
            self._sampling = self._make_sampling(max(buckets.sizes, default=0))
        self._num_real = 0  # number of leading buffer rows that may contain values of an earlier step
        self._num_repeated = 0  # number of leading entries of the buffers for `repeated` that an earlier step filled
        self._missed: ForwardBatch | None = None  # the step for which `choose` has just requested a graph

    def __call__(self, batch: ForwardBatch) -> Tensor:
        missed, self._missed = self._missed, None
        replayed = self._replay(batch, None, is_requested=batch is missed)
        if replayed is not None:
            return replayed[0]
        if self._prompts is not None and self._fitting(batch) is None:
            hidden = self._prompts(batch)
            if hidden is not None:
                self.states = self._prompts.states
                return hidden
        hidden = self._eager(batch)
        if self._states_of is not None:
            self.states = self._states_of(hidden)
        return hidden

    def choose(
        self, batch: ForwardBatch, arrays: SamplingArrays, *, greedy: bool, limits: Collection[str] = ()
    ) -> tuple[Tensor, Tensor] | None:
        """Compute a step and sample a token for every row.

        Return ids and their validity, like `choose` of `ops.sampling`. Returns None if no graph can sample this step.
        `greedy` says whether all rows are greedy. `limits` are the limits (for example "top_k") that at least one row
        uses. The result is valid until the next call.
        """
        choice = self._choice
        if choice is None or not (greedy or (not choice.greedy_only and choice.limits.issuperset(limits))):
            return None
        replayed = self._replay(batch, arrays)
        if replayed is None:
            self._missed = batch
            return None
        return replayed[0], replayed[1]

    def is_waiting(self) -> bool:
        """Return whether some graphs have not been captured yet. May be called on any thread."""
        return bool(self._waiting) or (self._prompts is not None and self._prompts.is_waiting())

    def num_missed(self) -> int:
        """Return how many steps lacked their graph since the last capture. May be called on any thread."""
        return max(self._num_missed, 0 if self._prompts is None else self._prompts.num_missed())

    @property
    def num_waiting(self) -> int:
        """Number of graphs that have not been captured yet."""
        return len(self._waiting)

    @property
    def captured(self) -> frozenset[int]:
        """Sizes whose graphs are all captured."""
        waiting = {size for size, _ in self._waiting}
        return frozenset(size for size, _ in self._graphs) - waiting

    def capture_next(self) -> bool:
        """Capture one graph, on the thread that enqueues. Return whether more graphs remain.

        The largest size is captured first, then the size that a step lacked last, then the largest remaining size.
        If more steps lacked a graph for prompts than one of these graphs, a graph for prompts is captured instead.
        """
        prompts = self._prompts
        prompts_first = not self._waiting or (prompts is not None and prompts.num_missed() > self._num_missed)
        if prompts is not None and prompts.is_waiting() and prompts_first:
            self._capture_prompts(prompts)
            return self.is_waiting()
        if self._waiting:
            self._capture_decode()
        return self.is_waiting()

    def request_all(self) -> int:
        """Request graphs of all sizes and kinds, also for prompts. Return the number of captures that remain."""
        if self._takes_branches and self._capturable:
            self._request_capture(_Kind(self._choice is not None, repeats=True))
        if self._takes_drafts and self._capturable and _spans(self._buffers):
            self._request_capture(_Kind(self._choice is not None, chained=True))
        if self._prompts is None:
            return self.num_waiting
        self._prompts.request_all()
        return self.num_waiting + self._prompts.num_waiting

    def capture_requested(self) -> Iterator[None]:
        """Capture all requested graphs, and yield after each of them. Raises the error of a failed capture.

        Ranks that share layers call this method at the same time, because their captures contain collectives.
        """
        while self._waiting:
            self._capture_decode()
            yield
        prompts = self._prompts
        while prompts is not None and prompts.is_waiting():
            with self._prompt_context():
                prompts.capture_next()
            yield

    def _capture_decode(self) -> None:
        size, kind = self._waiting.pop()
        self._num_missed = 0
        began = time.perf_counter()
        with (
            torch.inference_mode(),
            self._device.forward(),
            self._capture_context(f"Capture of the CUDA graph for {size} rows"),
        ):
            self._reset(0)
            self._fill_repeated([None] * len(_tables(self._buffers)))
            replans: Replans = [{} for _ in _tables(self._buffers)]
            run = partial(self._run, size, replans, kind)
            # The warm-up run must not overwrite a plan in host memory that the device still reads.
            if size in self._planned:
                self._planned[size].wait()
            run()  # compiles and loads kernels, which cannot be done during a capture
            graph, results = self._device.capture(run)
            self._graphs[size, kind] = _Captured(graph, results, replans)
            self._planned[size] = self._device.record()
        self._seconds += time.perf_counter() - began
        if not self._waiting:
            logger.info("Captured %d CUDA graphs in %.1f s of work.", len(self._graphs), self._seconds)

    def _capture_prompts(self, prompts: PromptGraphs) -> None:
        """Capture graphs of prompts. If this fails, steps with prompts run eagerly from then on."""
        try:
            with self._prompt_context():
                prompts.capture_next()
        except Exception:  # drivers and kernels raise many types of errors
            logger.exception("The graphs of prompts could not be captured. Steps with prompts run without graphs.")
            self._prompts = None

    def _replay(
        self, batch: ForwardBatch, arrays: SamplingArrays | None, *, is_requested: bool = False
    ) -> tuple[Tensor, ...] | None:
        """Replay the graph for this step. Return its results, or None if it is missing.

        With `arrays`, the graph samples. A missing graph is requested, so that it is captured soon, unless
        `is_requested` says that this step has already requested a graph.
        """
        size = self._fitting(batch)
        if size is None:
            return None
        # Without `token_rows`, `_fitting` has found that the spans are independent.
        is_chained = batch.token_rows is not None and _is_chained(batch)
        kind = _Kind(arrays is not None, batch.attention.repeated is not None, is_chained)
        if batch.token_rows is not None:
            batch = _one_token_per_row(batch, batch.token_rows)
        captured = self._graphs.get((size, kind))
        if captured is None:
            if not is_requested:
                self._request_capture(kind)
                self._capture_soon((size, kind))
                self._num_missed += 1
            return None
        self._fill(batch, arrays)
        if any(captured.replans):
            self._replan(size, captured.replans, batch.attention.starts_host)
        captured.graph.replay()
        results = tuple(result[: batch.num_tokens] for result in captured.results)
        if self._states_of is not None:
            *results, self.states = results
        return tuple(results)

    def _request_capture(self, kind: _Kind) -> None:
        """Queue the capture of graphs of all sizes after the graphs that are already queued."""
        if kind not in self._requested:
            self._requested.add(kind)
            self._waiting = [(size, kind) for size in self._buckets.sizes] + self._waiting

    def _capture_soon(self, key: tuple[int, _Kind]) -> None:
        """Capture this graph next, because a step ran without it.

        The largest size is still captured first, because the other graphs share its memory.
        """
        if self._graphs and key in self._waiting:
            self._waiting.remove(key)
            self._waiting.append(key)

    def _fitting(self, batch: ForwardBatch) -> int | None:
        """Return the size of the graph for this step, or None if no graph fits."""
        attention = batch.attention
        if batch.media_levels or attention.mutual_spans:
            return None
        num_rows = batch.num_tokens
        if attention.repeated is not None:
            if not self._takes_branches:
                return None
            num_rows = max(num_rows, -(-len(attention.repeated[0]) // REPEATS_PER_ROW))
        has_several = any(count != 1 for count in attention.counts_host)
        if not self._capturable or (has_several and batch.token_rows is None):
            return None
        if attention.page_table.shape[1] > self._buffers.attention.page_table.shape[1]:
            return None
        for inputs in batch.kinds.values():
            if SPANS not in inputs.arrays:
                continue
            if inputs.host is None or not single_tokens(inputs.host[SPANS]):
                return None
            if batch.token_rows is None and not independent(inputs.host[SPANS]):
                return None
        return self._buckets.take(num_rows)

    def _fill(self, batch: ForwardBatch, arrays: SamplingArrays | None) -> None:
        """Copy a step's inputs into the buffers, with one launch per dtype and one per page table."""
        num_rows, width = batch.attention.page_table.shape
        buffers = self._buffers
        pairs = [
            (buffers.token_ids, batch.token_ids),
            (buffers.positions, batch.positions),
            (buffers.attention.starts, batch.attention.starts),
            *self._optional_pairs(batch),
        ]
        for own, given in zip(_tables(buffers), _tables(batch), strict=True):
            pairs.append((own.slot_mapping, given.slot_mapping))
            own.page_table[:num_rows, :width].copy_(given.page_table)
        repeated = [given.repeated for given in _tables(batch)]
        if repeated[0] is not None:
            self._fill_repeated(repeated)
        pairs += [(own, batch.kinds[name].arrays[SPANS].t()) for name, own in _spans(buffers)]
        if arrays is not None:
            pairs += zip(self._sampling, arrays, strict=True)
        for dtype in {own.dtype: None for own, _ in pairs}:
            alike = [(own[..., :num_rows], given) for own, given in pairs if own.dtype == dtype]
            torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
                [own for own, _ in alike], [given for _, given in alike]
            )
        if num_rows < self._num_real:
            self._reset(num_rows)
        self._num_real = num_rows

    def _fill_repeated(self, repeated: Sequence[tuple[Tensor, AttentionMetadata] | None]) -> None:
        """Copy `repeated` of each page table into the buffers. Entries left from an earlier step get scratch slots."""
        count = 0
        for own, given, scratch_page in zip(_tables(self._buffers), repeated, self._scratch_pages, strict=True):
            if own.repeated is None:
                continue
            tokens, again = own.repeated
            if given is not None:
                count = len(given[0])
                tokens[:count].copy_(given[0])
                again.slot_mapping[:count].copy_(given[1].slot_mapping)
            rest = slice(count, self._num_repeated)
            tokens[rest].fill_(0)
            again.slot_mapping[rest].fill_(scratch_page * self._cache.page_size)
        self._num_repeated = count

    def _optional_pairs(self, batch: ForwardBatch) -> list[tuple[Tensor, Tensor]]:
        """Return (buffer, input) pairs of the optional inputs."""
        buffers, pairs = self._buffers, []
        for name, own in buffers.row_values.items():
            if name in batch.row_values:
                pairs.append((own, batch.row_values[name]))
            elif name in self._nonzero_values:
                own.zero_()
        self._nonzero_values = set(batch.row_values)
        if buffers.states is not None and batch.states is not None:
            pairs.append((buffers.states.t(), batch.states.t()))
        if buffers.position_axes is not None:
            axes = batch.position_axes
            axes = batch.positions.expand(3, -1) if axes is None else axes
            pairs.append((buffers.position_axes, axes))
        if buffers.input_embeds is not None and buffers.embeds_mask is not None:
            buffers.embeds_mask.zero_()
            if batch.media is not None:
                vectors, mask = batch.media
                buffers.input_embeds[: len(vectors)].copy_(vectors)
                buffers.embeds_mask[: len(mask)].copy_(mask)
        return pairs

    def _reset(self, first: int) -> None:
        """Turn the rows from index `first` on into padding rows."""
        rows = slice(first, self._num_real)
        buffers = self._buffers
        buffers.token_ids[rows].fill_(0)
        buffers.positions[rows].fill_(0)
        buffers.attention.starts[rows].fill_(0)
        for values in buffers.row_values.values():
            values[rows].fill_(0)
        if buffers.position_axes is not None:
            buffers.position_axes[:, rows].fill_(0)
        if buffers.states is not None:
            buffers.states[rows].fill_(0)
        for name, spans in _spans(buffers):
            spans[0, rows].fill_(ZEROS)
            spans[1, rows].fill_(self._cache.kinds[name])
        for own, scratch_page in zip(_tables(buffers), self._scratch_pages, strict=True):
            own.slot_mapping[rows].fill_(scratch_page * self._cache.page_size)
            own.page_table[rows].fill_(scratch_page)
        self._sampling.greedy[rows].fill_(True)  # greedy rows are sampled fastest
        self._num_real = min(first, self._num_real)

    @property
    def _scratch_pages(self) -> list[int]:
        """The scratch page of each page table (see `_tables`)."""
        kinds = self._buffers.kinds.items()
        return [
            self._cache.scratch_page,
            *(self._cache.kinds[name] for name, kind in kinds if SPANS not in kind.arrays),
        ]

    def _replan(self, size: int, replans: Replans, starts: Sequence[int]) -> None:
        """Write the attention plan of a step's rows into the memory that the captured attention kernels read.

        Waits until the device has read the previous plan.
        """
        self._planned[size].wait()
        starts = [*starts, *[0] * (size - len(starts))]
        for own, layer_replans in zip(_tables(self._buffers), replans, strict=True):
            metadata = _first_rows(own, starts)
            for replan in layer_replans.values():
                replan(metadata)
        self._planned[size] = self._device.record()

    def _run(self, size: int, replans: Replans, kind: _Kind) -> tuple[Tensor, ...]:
        """Run the first `size` rows of the buffers without a graph, with an empty `plan_cache`."""
        buffers = self._buffers
        attention, *others = (
            replace(_first_rows(own, [0] * size, repeats=kind.repeats), replans=left)
            for own, left in zip(_tables(buffers), replans, strict=True)
        )
        hidden = self._eager(
            replace(
                buffers,
                token_ids=buffers.token_ids[:size],
                positions=buffers.positions[:size],
                attention=attention,
                **_first_optional(buffers, size),
                kinds=_first_kinds(buffers, attention, others, chained=kind.chained),
            )
        )
        states = () if self._states_of is None else (self._states_of(hidden),)
        choice = self._choice
        if choice is None or not kind.chooses:
            return (hidden, *states)
        arrays = SamplingArrays(*(array[:size] for array in self._sampling))
        return (*choice.choose(choice.logits(hidden), arrays, _all_greedy(size)), *states)

    def _make_sampling(self, num_rows: int) -> SamplingArrays:
        """Create the sampling buffers. Initially all rows are greedy."""
        device = self._device.torch_device
        neutral = {"greedy": (True, torch.bool), "uniform": (0.0, torch.float32)} | {
            name: (array.neutral, getattr(torch, array.dtype)) for name, array in ROW_ARRAYS.items()
        }
        return SamplingArrays(
            *(
                torch.full((num_rows,), value, dtype=dtype, device=device)
                for value, dtype in (neutral[name] for name in SamplingArrays._fields)
            )
        )

    def _make_buffers(self, num_rows: int, max_pages: int, reads: BatchReads) -> ForwardBatch:
        cache, device = self._cache, self._device.torch_device

        def filled(value: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        attention = AttentionMetadata(
            page_table=filled(cache.scratch_page, num_rows, max_pages, dtype=torch.int32),
            starts=filled(0, num_rows, dtype=torch.int32),
            counts=filled(1, num_rows, dtype=torch.int32),
            query_starts=torch.arange(num_rows + 1, dtype=torch.int32, device=device),
            slot_mapping=filled(cache.scratch_page * cache.page_size, num_rows),
            page_size=cache.page_size,
            starts_host=[],
            counts_host=[],
        )

        def repeated(scratch: int) -> tuple[Tensor, AttentionMetadata] | None:
            if not self._takes_branches:
                return None
            twice = REPEATS_PER_ROW * num_rows
            slots = filled(scratch * cache.page_size, twice)
            return filled(0, twice), replace(attention, slot_mapping=slots, repeated=None)

        attention = replace(attention, repeated=repeated(cache.scratch_page))
        kinds = {}
        for name, scratch in cache.kinds.items() if self._capturable else ():
            if SPANS in KINDS[name].scratch_arrays([], 0):
                columns = [filled(value, num_rows) for value in (ZEROS, scratch, 0, 1)]
                columns[2] = torch.arange(num_rows, device=device)
                kinds[name] = KindInputs({SPANS: torch.stack(columns).int()}, attention)
                continue
            table = filled(scratch, num_rows, max_pages, dtype=torch.int32)
            slots = filled(scratch * cache.page_size, num_rows)
            kinds[name] = kind_inputs({"page_table": table}, slots, attention, repeated(scratch))
        return ForwardBatch(
            token_ids=filled(0, num_rows),
            positions=filled(0, num_rows),
            attention=attention,
            cache=cache,
            kinds=kinds,
            row_values={name: filled(0, num_rows, dtype=torch.int32) for name in reads.row_values},
            position_axes=filled(0, 3, num_rows) if reads.position_axes else None,
            input_embeds=filled(0, num_rows, reads.media_size, dtype=torch.float32) if reads.media_size else None,
            embeds_mask=filled(False, num_rows, dtype=torch.bool) if reads.media_size else None,
            states=filled(0, num_rows, reads.state_size, dtype=reads.state_dtype) if reads.state_size else None,
            in_graph=True,
        )

    def _prompt_context(self) -> ExitStack:
        return self._capture_context("Capture of the CUDA graphs for a step with prompts")

    def _capture_context(self, title: str) -> ExitStack:
        """Return the context of a capture: without garbage collection, and profiled if configured."""
        context = ExitStack()
        if not self._collect_garbage:
            context.enter_context(collector_paused())
        if self._profile:
            context.enter_context(_profiled(title))
        return context


def _first_optional(buffers: ForwardBatch, size: int) -> dict[str, Any]:
    """Return the first `size` rows of the buffers for optional inputs. Each row has one token."""
    values = {name: own[:size] for name, own in buffers.row_values.items()}
    axes, vectors, mask = buffers.position_axes, buffers.input_embeds, buffers.embeds_mask
    return {
        # A copy, because a draft head overwrites it: in padding rows, the values would grow with every replay.
        "states": None if buffers.states is None else buffers.states[:size].clone(),
        "row_values": values,
        "token_values": values,
        "position_axes": None if axes is None else axes[:, :size],
        "input_embeds": None if vectors is None else vectors[:size],
        "embeds_mask": None if mask is None else mask[:size],
    }


def _one_token_per_row(batch: ForwardBatch, rows: Tensor) -> ForwardBatch:
    """Return the batch with a row for each of its T tokens. `rows` int64 [T] maps a token to its row.

    Every span must have one token.
    """
    attention = batch.attention
    starts = [
        start + offset
        for start, count in zip(attention.starts_host, attention.counts_host, strict=True)
        for offset in range(count)
    ]
    attention = replace(
        attention,
        page_table=attention.page_table[rows],
        starts=batch.positions.int(),
        counts=torch.ones_like(rows, dtype=torch.int32),
        query_starts=torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device),
        starts_host=starts,
        counts_host=[1] * len(starts),
        plan_cache={},
    )
    kinds = {
        name: kind._replace(attention=attention)
        if SPANS in kind.arrays
        else kind_inputs({"page_table": own.page_table[rows]}, own.slot_mapping, attention, own.repeated)
        for name, kind in batch.kinds.items()
        for own in (kind.attention,)
    }
    return replace(batch, token_rows=None, row_values=batch.token_values, attention=attention, kinds=kinds)


def _is_chained(batch: ForwardBatch) -> bool:
    """Return whether the spans of a step depend on each other."""
    hosts = (kind.host for kind in batch.kinds.values() if SPANS in kind.arrays)
    return any(host is not None and not independent(host[SPANS]) for host in hosts)


def _all_greedy(num_rows: int) -> SamplingArrays:
    """Return sampling arrays on the host with only greedy rows."""
    unread = torch.zeros(0)
    return SamplingArrays(*[unread] * len(SamplingArrays._fields))._replace(
        greedy=torch.ones(num_rows, dtype=torch.bool)
    )


def _tables(batch: ForwardBatch) -> list[AttentionMetadata]:
    """Return the metadata of all page tables: paged layers first, then each cache kind with its own pages."""
    return [batch.attention, *(kind.attention for kind in batch.kinds.values() if SPANS not in kind.arrays)]


def _spans(buffers: ForwardBatch) -> list[tuple[str, Tensor]]:
    """Return the names of the cache kinds with spans, and their buffers: int32 [4, B], one column per row."""
    return [(name, kind.arrays[SPANS]) for name, kind in buffers.kinds.items() if SPANS in kind.arrays]


def _first_kinds(
    buffers: ForwardBatch, attention: AttentionMetadata, tables: Sequence[AttentionMetadata], *, chained: bool
) -> dict[str, KindInputs]:
    """Return the inputs of the cache kinds for the rows of `attention`.

    `tables` are the page tables of these rows: one for each cache kind that has its own pages. `chained` says whether
    spans may depend on each other.
    """
    size, own = len(attention.counts_host), iter(tables)
    kinds = {}
    for name, kind in buffers.kinds.items():
        if SPANS in kind.arrays:
            kinds[name] = KindInputs({SPANS: kind.arrays[SPANS][:, :size].t()}, attention, chained=chained)
        else:
            table = next(own)
            kinds[name] = KindInputs({"page_table": table.page_table}, table)
    return kinds


def _first_rows(attention: AttentionMetadata, starts: Sequence[int], *, repeats: bool = False) -> AttentionMetadata:
    """Return the first `len(starts)` rows of the buffers. `starts` are the rows' starts on the host.

    The result has `repeated` only if `repeats` is true.
    """
    size, repeated = len(starts), None
    if repeats and attention.repeated is not None:
        tokens, again = attention.repeated
        count = REPEATS_PER_ROW * size
        repeated = tokens[:count], replace(again, slot_mapping=again.slot_mapping[:count], plan_cache={})
    return replace(
        attention,
        page_table=attention.page_table[:size],
        starts=attention.starts[:size],
        counts=attention.counts[:size],
        query_starts=attention.query_starts[: size + 1],
        slot_mapping=attention.slot_mapping[:size],
        starts_host=starts,
        counts_host=[1] * size,
        repeated=repeated,
        plan_cache={},
    )


@contextmanager
def _profiled(title: str) -> Iterator[None]:
    """Profile the body of the `with` statement, and log the operations that took the most time."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as recorded:
        yield
    table = recorded.key_averages().table(sort_by="self_cpu_time_total", row_limit=PROFILE_ROWS)
    logger.info("%s\n%s", title, table)
