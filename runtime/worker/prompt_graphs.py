"""Piecewise CUDA graphs of steps with prompts: each graph has the operations between two attention calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ops.attention import AttentionMetadata, AttentionOptions
from ops.latent import LatentWeights
from ops.rope import LatentNorm, Rotation
from ops.select import Kernels
from runtime.config.resolve.graph_sizes import Buckets
from runtime.kv_cache.pools import KVPool
from runtime.kv_cache.registry import KINDS
from runtime.layers.batch_reads import BatchReads
from runtime.layers.forward_batch import ForwardBatch, KindInputs, LayerCache
from runtime.layers.recurrent import Recur, StateCache
from runtime.worker.device import Device, Graph
from runtime.worker.step_inputs import Forward, kind_inputs

logger = logging.getLogger("penstock.core")

OUT = "out"  # name of the buffers for the outputs of calls that run eagerly
SPANS = "spans"  # name of the array of cache kinds that have states (`ops.recurrence`)

# Computes attention or recurrence for all tokens of a step, from its inputs (queries) and the rows of this step.
Attention = Callable[[Sequence[Tensor], ForwardBatch], Tensor]


class _Call(NamedTuple):
    """An attention or recurrence call, which runs eagerly between two graphs."""

    inputs: Sequence[Tensor]  # buffers that the graph before the call writes
    out: Tensor  # buffer that the graph after the call reads
    attend: Attention


class _Captured(NamedTuple):
    """The captured forward pass for one number of tokens: graphs, and the eager calls between them."""

    graphs: Sequence[Graph]
    calls: Sequence[_Call]
    hidden: Tensor
    states: Tensor | None  # see `PromptGraphs`


@dataclass(frozen=True, slots=True)
class _Input:
    """A buffer that every step fills. Its last dimension is tokens, or its first one if `by_row` is set."""

    buffer: Tensor
    read: Callable[[ForwardBatch], Tensor | None]  # returns the step's values, or None if all values are `padding`
    padding: int
    by_row: bool = False

    def first(self, end: int, begin: int = 0) -> Tensor:
        return self.buffer[begin:end] if self.by_row else self.buffer[..., begin:end]


class PromptGraphs:
    """Replays the forward pass of steps with prompts, if the number of their tokens fits a captured size.

    Attention and recurrence depend on the number and the lengths of a step's rows. All other operations depend only on
    the number of tokens. A capture therefore ends a graph at every attention call, and at every call that reads
    recurrent states, and begins the next graph after the call. A step replays the graphs, and makes these calls eagerly
    between them. The calls may thus use any backend. Their inputs and outputs are copied to and from buffers that all
    layers and sizes share.

    Steps are padded with tokens that write to the scratch page. Eager calls do not compute padding tokens, whose
    outputs are 0. A size is captured only after a step needed it, or after `request_all`. The same thread must call all
    methods, except `is_waiting` and `num_missed`.

    The argument `states` maps the hidden states [T, E] to the states that a draft head reads (or, if the model is a
    draft head, to its own states). Every replay stores the result in the attribute `states`.

    If several ranks share the layers, the graphs contain their collectives. All ranks must then replay the same graphs.
    They do if every rank has captured all sizes, because the choice of a graph depends only on the batch, which is the
    same on all ranks.
    """

    def __init__(
        self,
        model: Forward,
        cache: KVPool,
        device: Device,
        buckets: Buckets,
        *,
        reads: BatchReads,
        states: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Allocate the buffers. `reads` are the optional inputs that the model reads."""
        self._model, self._cache, self._device, self._buckets = model, cache, device, buckets
        self._states_of = states
        self.states: Tensor | None = None  # [T, S] of the last replay's tokens, valid until the next replay
        self._captured: dict[int, _Captured] = {}
        self._waiting: list[int] = []  # sizes that steps needed; the last one is captured next
        self._num_missed = 0
        self._num_real = 0  # from this token index on, the input buffers hold only padding
        self._between: dict[tuple[Hashable, ...], Tensor] = {}  # buffers for the inputs and outputs of eager calls
        # Each other cache kind must have exactly one array: a page table or spans.
        capturable = all([*KINDS[kind].scratch_arrays([], 0)] in (["page_table"], [SPANS]) for kind in cache.kinds)
        self._largest = max(buckets.sizes, default=0) if capturable else 0
        with torch.inference_mode(), device.forward():
            self._inputs, self._batch = self._make_buffers(self._largest, reads)

    def __call__(self, batch: ForwardBatch) -> Tensor | None:
        """Compute a step. Return hidden states [T, E], valid until the next call, or None if no captured size fits."""
        size = self._fitting(batch)
        if size is None:
            return None
        captured = self._captured.get(size)
        if captured is None:
            self._capture_soon(size)
            return None
        num_tokens = batch.num_tokens
        self._fill(batch)
        if num_tokens < size:
            for (name, *_), buffer in self._between.items():
                if name == OUT:
                    buffer[num_tokens:size].zero_()
        for graph, call in zip(captured.graphs, captured.calls):
            graph.replay()
            call.out[:num_tokens].copy_(call.attend([each[:num_tokens] for each in call.inputs], batch))
        captured.graphs[-1].replay()
        self.states = None if captured.states is None else captured.states[:num_tokens]
        return captured.hidden[:num_tokens]

    def is_waiting(self) -> bool:
        """Return whether a size that a step needed is not captured yet."""
        return bool(self._waiting)

    def num_missed(self) -> int:
        """Return how many steps since the last capture ran eagerly because their size is not captured yet."""
        return self._num_missed

    @property
    def captured(self) -> frozenset[int]:
        """The captured sizes."""
        return frozenset(self._captured)

    @property
    def num_waiting(self) -> int:
        """Number of sizes that are to be captured."""
        return len(self._waiting)

    def request_all(self) -> None:
        """Request the capture of all sizes, the largest first."""
        self._waiting = [size for size in self._buckets.sizes if size <= self._largest and size not in self._captured]

    def capture_next(self) -> bool:
        """Capture the size that a step needed last. Return whether more sizes remain."""
        if not self._waiting:
            return False
        size = self._waiting.pop()
        self._num_missed = 0
        with torch.inference_mode(), self._device.forward():
            self._pad(0)
            self._run(size, [], lambda: None)  # compiles and loads kernels, which cannot be done during a capture
            calls: list[_Call] = []
            graphs, results = self._device.capture_parts(lambda divide: self._run(size, calls, divide))
            self._captured[size] = _Captured(graphs, tuple(calls), *results)
        logger.info("Captured %d CUDA graphs for prompts of up to %d tokens.", len(graphs), size)
        return bool(self._waiting)

    def _fitting(self, batch: ForwardBatch) -> int | None:
        """Return the size for this step, or None if no size fits."""
        attention = batch.attention
        if not self._largest or attention.replans is not None:  # `replans`: another runner captures it
            return None
        if batch.media_levels or batch.adapted or attention.repeated is not None:
            return None
        if (batch.states is None) != (self._batch.states is None):
            return None
        return self._buckets.take(batch.num_tokens)

    def _capture_soon(self, size: int) -> None:
        self._num_missed += 1
        if size in self._waiting:
            self._waiting.remove(size)
        self._waiting.append(size)

    def _fill(self, batch: ForwardBatch) -> None:
        """Copy a step's inputs into the buffers."""
        num_tokens = batch.num_tokens
        for each in self._inputs:
            values = each.read(batch)
            if values is None:
                each.first(num_tokens).fill_(each.padding)
            else:
                each.first(num_tokens).copy_(values)
        self._pad(num_tokens)
        self._num_real = num_tokens

    def _pad(self, num_tokens: int) -> None:
        """Turn all tokens from index `num_tokens` on into padding."""
        if num_tokens < self._num_real:
            for each in self._inputs:
                each.first(self._num_real, num_tokens).fill_(each.padding)
            self._num_real = num_tokens

    def _run(self, size: int, calls: list[_Call], divide: Callable[[], None]) -> tuple[Tensor, Tensor | None]:
        """Run the model for the first `size` tokens of the buffers. Return the hidden states and a draft head's states.

        At each eager call, append to `calls` and call `divide`.
        """

        def pause(inputs: Sequence[Tensor], out_shape: Sequence[int], attend: Attention) -> Tensor:
            kept = [self._buffer(("input", place), each.shape, each.dtype) for place, each in enumerate(inputs)]
            for buffer, each in zip(kept, inputs, strict=True):
                buffer.copy_(each)
            out = self._buffer(OUT, out_shape, inputs[0].dtype)
            calls.append(_Call(kept, out, attend))
            divide()
            return out

        caches: dict[int, Any] = {
            index: _PausingStates(cache, pause) if isinstance(cache, StateCache) else _PausingCache(cache, pause)
            for index, cache in self._cache.items()
        }
        hidden = self._model(_first_tokens(self._batch, size, caches))
        return hidden, None if self._states_of is None else self._states_of(hidden)

    def _buffer(self, name: Hashable, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a buffer of this shape; the first dimension is tokens. Allocates it at the first call."""
        count, *others = shape
        key = name, tuple(others), dtype
        if key not in self._between:
            self._between[key] = torch.zeros(
                (self._largest, *others), dtype=dtype, device=self._device.torch_device
            )  # fmt: skip
        return self._between[key][:count]

    def _make_buffers(self, size: int, reads: BatchReads) -> tuple[list[_Input], ForwardBatch]:
        """Return the buffers, and a batch made of them in which every token has its own row."""
        cache, device = self._cache, self._device.torch_device
        inputs: list[_Input] = []

        def buffer(
            read: Callable[[ForwardBatch], Tensor | None],
            *shape: int,
            padding: int = 0,
            dtype: torch.dtype = torch.int64,
            by_row: bool = False,
        ) -> Tensor:
            made = torch.full(shape or (size,), padding, dtype=dtype, device=device)
            inputs.append(_Input(made, read, padding, by_row))
            return made

        scratch = cache.scratch_page * cache.page_size
        attention = AttentionMetadata(
            page_table=torch.full((size, 1), cache.scratch_page, dtype=torch.int32, device=device),
            starts=torch.zeros(size, dtype=torch.int32, device=device),
            counts=torch.ones(size, dtype=torch.int32, device=device),
            query_starts=torch.arange(size + 1, dtype=torch.int32, device=device),
            slot_mapping=buffer(lambda batch: batch.attention.slot_mapping, padding=scratch),
            page_size=cache.page_size,
            starts_host=[0] * size,
            counts_host=[1] * size,
        )
        kinds = {}
        for name, unit in cache.kinds.items() if size else ():
            if SPANS in KINDS[name].scratch_arrays([], 0):
                continue  # only eager calls read spans
            slots = buffer(
                lambda batch, name=name: batch.kinds[name].attention.slot_mapping, padding=unit * cache.page_size
            )
            table = torch.full((size, 1), unit, dtype=torch.int32, device=device)
            kinds[name] = kind_inputs({"page_table": table}, slots, attention)
        values = {
            name: buffer(lambda batch, name=name: batch.token_values.get(name), dtype=torch.int32)
            for name in reads.row_values
        }
        axes = vectors = mask = None
        if reads.position_axes:
            axes = buffer(
                lambda batch: batch.positions if batch.position_axes is None else batch.position_axes, 3, size
            )
        if reads.media_size:
            shape, wide = (size, reads.media_size), torch.float32
            vectors = buffer(lambda batch: batch.input_embeds, *shape, dtype=wide, by_row=True)
            mask = buffer(lambda batch: batch.embeds_mask, dtype=torch.bool)
        states = None
        if reads.state_size:
            shape, dtype = (size, reads.state_size), reads.state_dtype
            states = buffer(lambda batch: batch.states, *shape, dtype=dtype, by_row=True)
        return inputs, ForwardBatch(
            token_ids=buffer(lambda batch: batch.token_ids),
            positions=buffer(lambda batch: batch.positions),
            attention=attention,
            cache=cache,
            kinds=kinds,
            row_values=values,
            token_values=values,
            position_axes=axes,
            input_embeds=vectors,
            embeds_mask=mask,
            states=states,
            in_graph=True,
        )


class _PausingCache:
    """The cache of a layer during a capture. Attention is not captured: `pause` ends a graph at each attention call."""

    def __init__(
        self, cache: LayerCache, pause: Callable[[Sequence[Tensor], Sequence[int], Attention], Tensor]
    ) -> None:
        self._cache = cache
        self._pause = pause

    def store(self, kernels: Kernels, k: Tensor, v: Tensor, batch: ForwardBatch, scales: Mapping[str, float]) -> None:
        self._cache.store(kernels, k, v, batch, scales)

    def rotate_store(
        self,
        kernels: Kernels,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rotation: Rotation,
        batch: ForwardBatch,
        scales: Mapping[str, float],
    ) -> Tensor:
        return self._cache.rotate_store(kernels, q, k, v, rotation, batch, scales)

    def rotate_store_latent(
        self,
        kernels: Kernels,
        q_pe: Tensor,
        latent: Tensor,
        k_pe: Tensor,
        norm: LatentNorm,
        rotation: Rotation,
        batch: ForwardBatch,
    ) -> Tensor:
        return self._cache.rotate_store_latent(kernels, q_pe, latent, k_pe, norm, rotation, batch)

    def attend(
        self,
        kernels: Kernels,
        q: Tensor,
        batch: ForwardBatch,
        scales: Mapping[str, float],
        options: AttentionOptions,
    ) -> Tensor:
        def attend(inputs: Sequence[Tensor], step: ForwardBatch) -> Tensor:
            return self._cache.attend(kernels, inputs[0], step, scales, options)

        return self._pause([q], q.shape, attend)

    def attend_latent(
        self,
        kernels: Kernels,
        q_nope: Tensor,
        q_pe: Tensor,
        weights: LatentWeights,
        batch: ForwardBatch,
        options: AttentionOptions,
    ) -> Tensor:
        def attend(inputs: Sequence[Tensor], step: ForwardBatch) -> Tensor:
            first, second = inputs
            return self._cache.attend_latent(kernels, first, second, weights, step, options)

        num_tokens, num_heads, _ = q_nope.shape
        return self._pause([q_nope, q_pe], (num_tokens, num_heads * weights.value_dim), attend)

    @property
    def nbytes(self) -> int:
        return self._cache.nbytes


class _PausingStates:
    """The states of a recurrent layer during a capture. Like attention, calls that read them are not captured."""

    def __init__(
        self, cache: StateCache, pause: Callable[[Sequence[Tensor], Sequence[int], Attention], Tensor]
    ) -> None:
        self._cache, self._pause = cache, pause

    def run(self, recur: Recur, inputs: Sequence[Tensor], out_shape: Sequence[int], batch: ForwardBatch) -> Tensor:
        def recur_in(parts: Sequence[Tensor], step: ForwardBatch) -> Tensor:
            return self._cache.run(recur, parts, out_shape, step)

        return self._pause(inputs, out_shape, recur_in)


def _first_tokens(buffers: ForwardBatch, size: int, caches: Mapping[int, LayerCache]) -> ForwardBatch:
    """Return the first `size` tokens of the buffers, with an empty `plan_cache`."""

    def first(attention: AttentionMetadata) -> AttentionMetadata:
        return replace(
            attention,
            page_table=attention.page_table[:size],
            starts=attention.starts[:size],
            counts=attention.counts[:size],
            query_starts=attention.query_starts[: size + 1],
            slot_mapping=attention.slot_mapping[:size],
            starts_host=[0] * size,
            counts_host=[1] * size,
            plan_cache={},
            replans={},
        )

    values = {name: each[:size] for name, each in buffers.token_values.items()}
    axes, vectors, mask = buffers.position_axes, buffers.input_embeds, buffers.embeds_mask
    tables = {name: first(kind.attention) for name, kind in buffers.kinds.items()}
    return replace(
        buffers,
        token_ids=buffers.token_ids[:size],
        positions=buffers.positions[:size],
        attention=first(buffers.attention),
        cache=caches,
        kinds={name: KindInputs({"page_table": table.page_table}, table) for name, table in tables.items()},
        row_values=values,
        token_values=values,
        position_axes=None if axes is None else axes[:, :size],
        input_embeds=None if vectors is None else vectors[:size],
        embeds_mask=None if mask is None else mask[:size],
        # A copy, because a draft head overwrites it: in padding tokens, the values would grow with every replay.
        states=None if buffers.states is None else buffers.states[:size].clone(),
    )
