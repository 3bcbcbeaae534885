"""Steps of output tokens as CUDA graphs: one launch instead of hundreds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ops.attention import AttentionMetadata
from ops.sampling import SamplingArrays
from runtime.config.resolve.graph_sizes import Buckets
from runtime.kv_cache.pools import KVPool
from runtime.kv_cache.registry import KINDS
from runtime.layers.forward_batch import ForwardBatch, KindInputs
from runtime.sampling_params import ROW_ARRAYS
from runtime.worker.device import Device, Event, Graph, collector_paused
from runtime.worker.step_inputs import Forward, kind_inputs

logger = logging.getLogger("penstock.core")

PROFILE_ROWS = 20  # of the table that --enable-profile-cuda-graph prints


Replans = list[dict[Hashable, Callable[[AttentionMetadata], None]]]  # one for each of `_tables`


@dataclass(frozen=True, slots=True)
class Choice:
    """How tokens follow from hidden states, where that is captured too."""

    logits: Callable[[Tensor], Tensor]  # hidden [R, E] -> float32 [R, V]
    choose: Callable[..., tuple[Tensor, Tensor]]
    # `choose` is planned on the host, so that only one plan is captured: that of greedy rows.
    greedy_only: bool


@dataclass(frozen=True, slots=True)
class _Captured:
    """One graph."""

    graph: Graph
    results: tuple[Tensor, ...]  # what each replay writes: hidden states, or ids and whether rows are sound
    replans: Replans


class CudaGraphRunner:
    """Replays a captured forward where every row computes one token and a graph is large enough; else `eager`.

    Captured is `eager`, a model as a rule, with a batch of fixed buffers, into which a step's inputs are copied. Rows
    beyond the step's own write to the cache's scratch page and read position 0 of it. Until `capture_next` has been
    called for a size, batches of that size run eagerly. The attention must read nothing of the rows on the host, for
    that is captured too, or leave what is called with each step's rows before the replay
    (`AttentionMetadata.replans`).

    With a `choice` graphs go on from hidden states to tokens (`choose`). Others of the same sizes, which end there, are
    for steps whose rows want more; they are captured once there was such a step.

    All buffers are of the largest size and shared; smaller graphs use their first rows.
    """

    def __init__(
        self,
        eager: Forward,
        cache: KVPool,
        device: Device,
        buckets: Buckets,
        *,
        max_pages: int,
        choice: Choice | None = None,
        collect_garbage: bool = False,
        profile: bool = False,
    ) -> None:
        """`max_pages` is the length of a row's page table; longer rows run eagerly."""
        self._eager = eager
        self._device = device
        self._buckets = buckets
        self._cache = cache
        # Of other kinds of caches only those can be captured that have page tables and nothing else.
        self._capturable = all([*KINDS[kind].scratch_arrays([], 0)] == ["page_table"] for kind in cache.kinds)
        self._choice = choice
        # (size, whether tokens are chosen); the last one is captured next
        self._waiting: list[tuple[int, bool]] = []
        self._wanted: set[bool] = set()
        if self._capturable:
            self._want(choice is not None)
        if not self._capturable:
            logger.info("No CUDA graphs are captured: not with %s caches.", ", ".join(cache.kinds))
        self._graphs: dict[tuple[int, bool], _Captured] = {}
        # By size: reached when what was planned last is on the device. Both graphs of a size share their plans.
        self._planned: dict[int, Event] = {}
        self._collect_garbage = collect_garbage
        self._profile = profile
        self._seconds = 0.0
        with torch.inference_mode(), device.forward():
            self._buffers = self._make_buffers(max(buckets.sizes, default=0), max_pages)
            self._sampling = self._make_sampling(max(buckets.sizes, default=0))
        self._num_real = 0  # leading rows of the buffers that may hold a step's own values

    def __call__(self, batch: ForwardBatch) -> Tensor:
        replayed = self._replay(batch, None)
        return self._eager(batch) if replayed is None else replayed[0]

    def choose(
        self, batch: ForwardBatch, arrays: SamplingArrays, *, greedy: bool
    ) -> tuple[Tensor, Tensor] | None:
        """As `choose` of `ops.sampling`, for steps all of whose rows sample; None: no graph does that.

        `greedy`: all rows are. What is returned is the caller's until the next call.
        """
        if self._choice is None or (self._choice.greedy_only and not greedy):
            return None
        replayed = self._replay(batch, arrays)
        return None if replayed is None else (replayed[0], replayed[1])

    def is_waiting(self) -> bool:
        """Whether graphs are left to be captured; may be asked on any thread."""
        return bool(self._waiting)

    @property
    def captured(self) -> frozenset[int]:
        """The sizes whose graphs are all ready."""
        waiting = {size for size, _ in self._waiting}
        return frozenset(size for size, _ in self._graphs) - waiting

    def capture_next(self) -> bool:
        """Capture the largest size that waits, on the thread that enqueues; whether more wait."""
        if not self._waiting:
            return False
        size, chooses = self._waiting.pop()
        began = time.perf_counter()
        with torch.inference_mode(), self._device.forward(), self._around(size):
            self._reset(0)
            replans: Replans = [{} for _ in _tables(self._buffers)]
            run = partial(self._run, size, replans, chooses=chooses)
            if size in self._planned:  # the run that warms up plans again, in the same memory of the host
                self._planned[size].wait()
            run()  # compiles and loads kernels, which a capture cannot
            graph, results = self._device.capture(run)
            self._graphs[size, chooses] = _Captured(graph, results, replans)
            self._planned[size] = self._device.record()
        self._seconds += time.perf_counter() - began
        if not self._waiting:
            logger.info("Captured %d CUDA graphs in %.1f s of work.", len(self._graphs), self._seconds)
        return bool(self._waiting)

    def _replay(self, batch: ForwardBatch, arrays: SamplingArrays | None) -> tuple[Tensor, ...] | None:
        """What the graph for this step wrote for its rows; with `arrays`, of the graph that chooses tokens."""
        size = self._fitting(batch)
        if size is None:
            return None
        captured = self._graphs.get((size, arrays is not None))
        if captured is None:
            self._want(arrays is not None)
            return None
        self._fill(batch, arrays)
        if any(captured.replans):
            self._replan(size, captured.replans, batch.attention.starts_host)
        captured.graph.replay()
        return tuple(result[: batch.num_tokens] for result in captured.results)

    def _want(self, chooses: bool) -> None:
        """Have such graphs of all sizes captured, behind those that wait already."""
        if chooses not in self._wanted:
            self._wanted.add(chooses)
            self._waiting = [(size, chooses) for size in self._buckets.sizes] + self._waiting

    def _fitting(self, batch: ForwardBatch) -> int | None:
        """The size of the graphs for a step with these rows."""
        attention = batch.attention
        if not self._capturable or not batch.is_plain or any(count != 1 for count in attention.counts_host):
            return None
        if attention.page_table.shape[1] > self._buffers.attention.page_table.shape[1]:
            return None
        return self._buckets.take(len(attention.counts_host))

    def _fill(self, batch: ForwardBatch, arrays: SamplingArrays | None) -> None:
        """Copy a step's inputs into the buffers: one launch for each dtype, and one for each page table."""
        num_rows, width = batch.attention.page_table.shape
        buffers = self._buffers
        pairs = [
            (buffers.token_ids, batch.token_ids),
            (buffers.positions, batch.positions),
            (buffers.attention.starts, batch.attention.starts),
        ]
        for own, given in zip(_tables(buffers), _tables(batch), strict=True):
            pairs.append((own.slot_mapping, given.slot_mapping))
            own.page_table[:num_rows, :width].copy_(given.page_table)
        if arrays is not None:
            pairs += zip(self._sampling, arrays, strict=True)
        for dtype in {own.dtype: None for own, _ in pairs}:
            alike = [(own[:num_rows], given) for own, given in pairs if own.dtype == dtype]
            torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
                [own for own, _ in alike], [given for _, given in alike]
            )
        if num_rows < self._num_real:
            self._reset(num_rows)
        self._num_real = num_rows

    def _reset(self, first: int) -> None:
        """Make rows from `first` on padding."""
        rows = slice(first, self._num_real)
        buffers = self._buffers
        buffers.token_ids[rows].fill_(0)
        buffers.positions[rows].fill_(0)
        buffers.attention.starts[rows].fill_(0)
        scratch_pages = [self._cache.scratch_page, *self._cache.kinds.values()]
        for own, scratch_page in zip(_tables(buffers), scratch_pages, strict=True):
            own.slot_mapping[rows].fill_(scratch_page * self._cache.page_size)
            own.page_table[rows].fill_(scratch_page)
        self._sampling.greedy[rows].fill_(True)  # the quickest way to choose
        self._num_real = min(first, self._num_real)

    def _replan(self, size: int, replans: Replans, starts: Sequence[int]) -> None:
        """Bring a step's rows to where the captured attention looks for them, behind earlier replays."""
        self._planned[
            size
        ].wait()  # host memory of the last plan is read; a step or more ago, so mostly long since
        starts = [*starts, *[0] * (size - len(starts))]
        for own, of_layers in zip(_tables(self._buffers), replans, strict=True):
            metadata = _first_rows(own, starts)
            for replan in of_layers.values():
                replan(metadata)
        self._planned[size] = self._device.record()

    def _run(self, size: int, replans: Replans, *, chooses: bool) -> tuple[Tensor, ...]:
        """The first `size` rows of the buffers, eagerly. Nothing derived from earlier rows is kept."""
        buffers = self._buffers
        attention, *others = (
            replace(_first_rows(own, [0] * size), replans=left)
            for own, left in zip(_tables(buffers), replans, strict=True)
        )
        hidden = self._eager(
            replace(
                buffers,
                token_ids=buffers.token_ids[:size],
                positions=buffers.positions[:size],
                attention=attention,
                kinds={
                    name: KindInputs({"page_table": own.page_table}, own)
                    for name, own in zip(buffers.kinds, others, strict=True)
                },
            )
        )
        choice = self._choice
        if choice is None or not chooses:
            return (hidden,)
        arrays = SamplingArrays(*(array[:size] for array in self._sampling))
        return choice.choose(choice.logits(hidden), arrays, _all_greedy(size))

    def _make_sampling(self, num_rows: int) -> SamplingArrays:
        """How the rows of the buffers choose: greedily, until a step says otherwise."""
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

    def _make_buffers(self, num_rows: int, max_pages: int) -> ForwardBatch:
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
        kinds = {
            name: kind_inputs(
                {"page_table": filled(scratch_page, num_rows, max_pages, dtype=torch.int32)},
                filled(scratch_page * cache.page_size, num_rows),
                attention,
            )
            for name, scratch_page in cache.kinds.items()
            if self._capturable
        }
        return ForwardBatch(
            token_ids=filled(0, num_rows),
            positions=filled(0, num_rows),
            attention=attention,
            cache=cache,
            kinds=kinds,
        )

    def _around(self, size: int) -> ExitStack:
        """What surrounds the capture of a size."""
        around = ExitStack()
        if not self._collect_garbage:
            around.enter_context(collector_paused())
        if self._profile:
            around.enter_context(_profiled(f"Capture of the CUDA graph for {size} rows"))
        return around


def _all_greedy(num_rows: int) -> SamplingArrays:
    """The plan of greedy rows, on the host."""
    unread = torch.zeros(0)
    return SamplingArrays(torch.ones(num_rows, dtype=torch.bool), unread, unread, unread, unread, unread)


def _tables(batch: ForwardBatch) -> list[AttentionMetadata]:
    """What names pages: that of all layers, then those of the kinds with pages of their own."""
    return [batch.attention, *(kind.attention for kind in batch.kinds.values())]


def _first_rows(attention: AttentionMetadata, starts: Sequence[int]) -> AttentionMetadata:
    """As many rows of the buffers as there are `starts`, which are what the host knows of them."""
    size = len(starts)
    return replace(
        attention,
        page_table=attention.page_table[:size],
        starts=attention.starts[:size],
        counts=attention.counts[:size],
        query_starts=attention.query_starts[: size + 1],
        slot_mapping=attention.slot_mapping[:size],
        starts_host=starts,
        counts_host=[1] * size,
        plan_cache={},
    )


@contextmanager
def _profiled(title: str) -> Iterator[None]:
    """Log what the host and the device spent most time on inside."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as recorded:
        yield
    table = recorded.key_averages().table(sort_by="self_cpu_time_total", row_limit=PROFILE_ROWS)
    logger.info("%s\n%s", title, table)
