"""The CPU graph: the C++ kernels of a step, captured from the model's forward pass, and run by one call.

It is the CPU's counterpart of a CUDA graph. A step of a small model has hundreds of operations. In Python, each one
takes microseconds and holds the GIL, which the event loop also needs. A captured step is a single call without the GIL,
from the batch's arrays to its tokens. It works for any batch of up to `capacity` tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from ops import captured_step
from ops.cpp.kernel_launcher import KernelGraph, NotCapturable
from ops.cpp.structures import Step
from ops.low_rank.with_cpp import KERNELS as ADD_LOW_RANK
from ops.select import Kernels
from runtime.batch import ADAPTER, Batch, Ints, MediaSpan
from runtime.kv_cache.pools import KVPool
from runtime.kv_cache.registry import KINDS
from runtime.layers.batch_reads import batch_reads
from runtime.layers.forward_batch import ForwardBatch, KindInputs
from runtime.layers.moe import mixtures
from runtime.modeling.decoder import Decoder, states_for_draft_head
from runtime.modeling.draft_head import DraftHead
from runtime.modeling.encoder import Encoder

NO_POSITIONS = np.zeros(0, np.int32)


class CpuGraph:
    """Computes steps of up to `capacity` tokens and `max_rows` rows. Must be called on the thread that computes.

    `model(batch)` is captured with a batch of fixed buffers, into which the inputs of every step are copied. Raises
    `NotCapturable` if torch computes a part of the model.
    """

    def __init__(
        self,
        model: Decoder,
        cache: KVPool,
        kernels: Kernels,
        capacity: int,
        max_rows: int,
        *,
        context_length: int = 0,
        max_samples: int = 0,
    ) -> None:
        """Capture the graph. At most max(`max_samples`, `max_rows`) positions can be sampled.

        `context_length` is needed for the page tables of cache kinds with their own pages.
        """
        launcher, head = kernels.launcher, model.head
        if model.embedding is None and not isinstance(model, Encoder):
            raise NotCapturable("its architecture is not one of Penstock's decoders or encoders")
        if launcher is None or model.dtype not in launcher.dtypes:
            raise NotCapturable(f"the kernels in C++ do not support {model.dtype}")
        self.profiled = False  # whether each kernel is recorded in the running profile
        self._launcher = launcher
        self._model, self._cache = model, cache  # kept alive, because the graph has the addresses of their memory
        self._head = head
        self._capacity, self._max_rows, self._context_length = capacity, max_rows, context_length
        self._max_samples = max(max_rows, max_samples)
        with torch.inference_mode():
            reads = batch_reads(model)
            self._value_names = reads.row_values
            self._nonzero_values: set[str] = set()  # names of row values whose buffers may contain values other than 0
            self._inputs = captured_step.Inputs.empty(
                capacity, max_rows, len(reads.row_values), with_axes=reads.position_axes
            )
            self._embeds = self._embeds_mask = None
            if reads.media_size:
                self._embeds = torch.zeros(capacity, reads.media_size, dtype=model.dtype)
                self._embeds_mask = torch.zeros(capacity, dtype=torch.bool)
            self._states = torch.zeros(capacity, reads.state_size, dtype=model.dtype) if reads.state_size else None
            # Hidden states of the positions that a step needs.
            self._hidden = torch.empty(self._max_samples, model.hidden_size, dtype=model.dtype)
            self._pooled = np.empty((max_rows, model.hidden_size), np.float32)  # one vector per text, if `_pools`
            self._step = Step(page_size=cache.page_size, **self._inputs.addresses())
            attention = self._inputs.attention(self._step)
            self._kinds = {name: self._buffers(name) for name in cache.kinds}
            self._own_pages = {
                name: self._inputs.with_own_pages(buffers["page_table"])
                for name, buffers in self._kinds.items()
                if "page_table" in buffers
            }
            captured = ForwardBatch(
                token_ids=self._inputs.token_ids,
                positions=self._inputs.positions,
                attention=attention,
                cache=cache,
                kinds={
                    name: KindInputs(
                        buffers,
                        self._own_pages[name].attention(self._step) if name in self._own_pages else attention,
                    )
                    for name, buffers in self._kinds.items()
                },
                row_values=dict(zip(reads.row_values, self._inputs.row_values, strict=True)),
                token_values=dict(zip(reads.row_values, self._inputs.token_values, strict=True)),
                position_axes=self._inputs.position_axes,
                input_embeds=self._embeds,
                embeds_mask=self._embeds_mask,
                states=self._states,
            )
            own_pages = [Step(page_size=cache.page_size, **inputs.addresses()) for inputs in self._own_pages.values()]
            forward = launcher.capture(capacity, lambda: self._compute(captured), self._step, own_pages)
            # layer -> buffer to which every step writes the chosen experts; empty unless experts are recorded
            self.chosen_experts = {
                layer: chosen
                for layer, mixture in mixtures(model).items()
                if (chosen := mixture.recorded(capacity)) is not None
            }
            # Buffers to which every step writes the states that a draft head reads.
            self._tapped = model.tapped
            self._own_states = model.states if isinstance(model, DraftHead) else None
            self._to_hidden = forward
            self._to_tokens: KernelGraph | None = None
            if head is not None and head.is_plain:
                chosen = launcher.capture(capacity, self._choose, self._step)
                self._to_tokens = forward.followed_by(chosen)
            # graph -> graph on the same memory without adapter kernels, for batches without adapters
            self._without_adapters: dict[KernelGraph, KernelGraph] = {}
            if ADAPTER in reads.row_values:
                graphs = (graph for graph in (forward, self._to_tokens) if graph is not None)
                self._without_adapters = {graph: graph.without(ADD_LOW_RANK) for graph in graphs}

    def takes(self, batch: Batch) -> bool:
        """Return whether the graph can compute the batch."""
        fits = len(batch.token_ids) <= self._capacity and len(batch.starts) <= self._max_rows
        if batch.sampling is not None:
            fits = fits and len(batch.sampling.positions) <= self._max_samples
        # The KV of tokens before branches is stored twice, which is not captured.
        if batch.drafts is not None and batch.drafts.branches is not None:
            fits = False
        if batch.media:  # vectors added after layers, and attention within images, are not captured
            size = 0 if self._embeds is None else self._embeds.shape[1]
            fits = fits and batch.mutual_spans is None and all(span.vectors.shape[1] == size for span in batch.media)
        return fits and all(
            batch.kinds[kind][name].size <= buffer.numel()
            for kind, buffers in self._kinds.items()
            for name, buffer in buffers.items()
        )

    @property
    def chooses(self) -> bool:
        """Whether `choose` can be used: the model needs an LM head and must not transform its logits."""
        return self._to_tokens is not None

    def choose(self, batch: Batch, last_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Compute a step. Return each sampled position's likeliest token, int64 [N], and its validity, bool [N].

        Reads and writes `last_tokens`, int64 by sequence index; rows with draft tokens do not write it. The results are
        valid until the next step.
        """
        if self._to_tokens is None:
            raise RuntimeError("The graph does not sample this model's tokens.")
        positions = sampled_positions(batch)
        self._run(self._to_tokens, batch, last_tokens, positions)
        return self._ids[: len(positions)], self._sound[: len(positions)]

    def hidden(self, batch: Batch, last_tokens: Tensor, positions: Ints) -> Tensor:
        """Compute a step. Return the hidden states [n, E] after the final norm at `positions` [n] of the flat batch.

        Reads `last_tokens`, int64 by sequence index. The result is valid until the next step.
        """
        self._run(self._to_hidden, batch, last_tokens, positions)
        return self._hidden[: len(positions)]

    def states(self, batch: Batch, last_tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Compute a step. Return the hidden states [N, E] of its sampled positions, after the final norm.

        Also return the vectors of the batch's `embedding_rows`, float32 [M, D], or None if there are no such rows.
        """
        positions, rows, pooler = sampled_positions(batch), batch.embedding_rows, self._model.pooler
        if rows is None:
            return self.hidden(batch, last_tokens, positions), None
        if not pooler.pooling.needs_all:
            ends = np.cumsum(batch.counts, dtype=np.int32)[rows]
            hidden = self.hidden(batch, last_tokens, np.concatenate([positions, ends - 1]))
            return hidden[: len(positions)], pooler.finish(hidden[len(positions) :])
        hidden = self.hidden(batch, last_tokens, positions)
        if self._pools:
            # NumPy is used because torch would release the GIL for this operation, and then wait to acquire it again.
            pooled = torch.from_numpy(self._pooled[rows])
            return hidden, pooled if pooler.only_scales else pooler.finish(pooled)
        return hidden, pooler(self._hidden_of_all[: len(batch.token_ids)], batch.counts, rows)

    def write_states(self, states: Tensor) -> None:
        """Set the states [T, E] of the target, which a draft head reads in the next step."""
        if self._states is None:
            raise RuntimeError("This model reads no states.")
        self._states[: len(states)] = states

    def states_of(self, positions: Ints) -> Tensor:
        """Return the states [n, E] that a draft head computed at these positions of the last step."""
        if self._own_states is None:
            raise RuntimeError("This model is not a draft head.")
        return self._own_states[torch.from_numpy(positions).long()]

    def hidden_of_all(self, count: int) -> Tensor:
        """Return the hidden states [count, E] after the final norm of all tokens of the last step."""
        return self._hidden_of_all[:count]

    def states_of_all(self, count: int) -> Tensor:
        """Return the states of the last step's `count` tokens that a draft head reads (see `states_for_draft_head`)."""
        return states_for_draft_head(self._hidden_of_all, self._tapped, count)

    @property
    def _pools(self) -> bool:
        """Whether the graph pools the hidden states of each text, to their mean or to their first token."""
        return self._model.pooler.pooling.modes in (("mean",), ("cls",))

    def close(self) -> None:
        """End the threads of the graph."""
        self._launcher.close()

    def _compute(self, batch: ForwardBatch) -> None:
        """Compute the hidden states of the needed positions from the batch's arrays."""
        for inputs in (self._inputs, *self._own_pages.values()):
            captured_step.derive_inputs(self._launcher, inputs, self._model.dtype)
        self._hidden_of_all = hidden = self._model(batch)
        pooler = self._model.pooler
        if self._pools:
            captured_step.pool_rows(
                self._launcher,
                hidden,
                torch.from_numpy(self._pooled),
                mean=pooler.pooling.modes == ("mean",),
                normalized=pooler.only_scales and pooler.pooling.normalize,
            )
        captured_step.select_sampled(self._launcher, hidden, self._hidden)

    def _choose(self) -> None:
        if self._head is None:
            raise RuntimeError("This model has no LM head.")
        self._ids, self._sound = captured_step.choose_greedy(self._launcher, self._hidden, self._head.prepared)

    def time(self, batch: Batch, last_tokens: Tensor) -> list[tuple[str, float]]:
        """Compute a step one kernel at a time. Return each kernel's name and its time in seconds."""
        _kept = self._set_inputs(batch, last_tokens, sampled_positions(batch))
        return (self._to_tokens or self._to_hidden).time(self._step)

    def _run(self, graph: KernelGraph, batch: Batch, last_tokens: Tensor, positions: Ints) -> None:
        """Compute the batch. Writes the hidden states at `positions` of the flat batch to a buffer."""
        _kept = self._set_inputs(batch, last_tokens, positions)
        if ADAPTER not in batch.row_values:
            graph = self._without_adapters.get(graph, graph)
        if self.profiled:
            graph.record(self._step)
        else:
            graph.run(self._step)

    def _buffers(self, kind: str) -> dict[str, Tensor]:
        """Allocate the buffers for the arrays of a cache kind, by name."""
        pages = min(self._cache.num_pages, -(-self._context_length // self._cache.page_size))
        sizes = KINDS[kind].buffer_sizes(self._max_rows, pages, self._max_samples - self._max_rows)
        if sizes is None:
            raise NotCapturable(f"steps with {kind} caches are not captured")
        return {name: torch.zeros(size, dtype=torch.int32) for name, size in sizes.items()}

    def _set_inputs(self, batch: Batch, last_tokens: Tensor, positions: Ints) -> list[np.ndarray]:
        """Give the addresses of the batch's arrays to the graph.

        The returned arrays must stay alive until the step ends.
        """
        step = self._step
        for kind, buffers in self._kinds.items():
            for name, buffer in buffers.items():
                array = torch.from_numpy(batch.kinds[kind][name]).reshape(-1)
                buffer[: len(array)] = array
        if batch.row_values or self._nonzero_values:
            self._write_row_values(batch.row_values)
        if self._embeds is not None and self._embeds_mask is not None:
            _write_media(batch.media, self._embeds, self._embeds_mask)
        sequences = NO_POSITIONS
        if batch.sampling is not None:
            sequences = batch.sequence_indices[batch.sampling.row_of]
            # The last token of rows with draft tokens is unknown until the draft tokens are verified. With sequence
            # index -1, the graph does not store it.
            if batch.drafts is not None:
                sequences[np.isin(batch.sampling.row_of, batch.drafts.rows)] = -1
        given = (batch.token_ids, batch.starts, batch.counts, batch.sequence_indices, positions, sequences)
        arrays = [np.ascontiguousarray(array, np.int32) for array in (*given, batch.page_table)]
        (
            step.given_ids,
            step.starts,
            step.counts,
            step.sequence_indices,
            step.sample_positions,
            step.sample_sequences,
            step.page_table,
        ) = [array.ctypes.data for array in arrays]
        step.num_tokens, step.num_rows, step.num_samples = len(batch.token_ids), len(batch.starts), len(positions)
        step.table_width = batch.page_table.shape[1]
        step.last_tokens = last_tokens.data_ptr()
        if self._inputs.position_axes is not None:
            step.position_offsets = None
            if batch.position_offsets is not None:
                arrays.append(np.ascontiguousarray(batch.position_offsets, np.int32))
                step.position_offsets = arrays[-1].ctypes.data
        return arrays

    def _write_row_values(self, values: Mapping[str, Ints]) -> None:
        """Write a step's row values into their buffers. Other buffers that may contain values are set to 0."""
        for name, buffer in zip(self._value_names, self._inputs.row_values, strict=True):
            if name in values:
                buffer[: len(values[name])] = torch.from_numpy(values[name])
            elif name in self._nonzero_values:
                buffer.zero_()
        self._nonzero_values = set(values)


def sampled_positions(batch: Batch) -> Ints:
    """Return the positions [N] of the flat batch at which a token is sampled."""
    return batch.sampling.positions if batch.sampling is not None else NO_POSITIONS


def _write_media(media: Iterable[MediaSpan], vectors: Tensor, mask: Tensor) -> None:
    """Write the media vectors and their mask into the buffers that the embedding layer reads."""
    mask.zero_()
    for span in media:
        positions = slice(span.offset, span.offset + len(span.vectors))
        vectors[positions] = torch.from_numpy(span.vectors)
        mask[positions] = True
