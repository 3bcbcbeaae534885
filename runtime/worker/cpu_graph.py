"""A step as one native call: the model's own forward, captured once, its kernels in C++ run one after the other.

The counterpart on a CPU of what a CUDA graph is on a GPU. A step of a small model is hundreds of operations, each of
which costs Python and torch microseconds and asks for Python's lock, for which the loop competes. Captured they
cost one call, without the lock, for any batch of up to `capacity` tokens: from the batch's arrays to its tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ops import captured_step
from ops.cpp.kernel_launcher import KernelGraph, NotCapturable
from ops.cpp.structures import Step
from ops.select import Kernels
from runtime.batch import Batch, Ints
from runtime.kv_cache.pools import KVPool
from runtime.kv_cache.registry import KINDS
from runtime.layers.forward_batch import ForwardBatch, KindInputs
from runtime.models.decoder import Decoder
from runtime.models.encoder import Encoder

NO_ROWS = np.zeros(0, np.int32)


class CpuGraph:
    """Computes steps of up to `capacity` tokens and `max_rows` rows. Belongs to the thread that computes.

    Captured is `model(batch)`, with a batch whose tensors every step writes first. Raises `NotCapturable` for a model
    of which torch computes a part.
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
    ) -> None:
        """`context_length` is that of the longest row; it matters to caches of other kinds than pages alone."""
        launcher, head = kernels.launcher, model.head
        if model.embedding is None and not isinstance(model, Encoder):
            raise NotCapturable("this model is no decoder of ours")
        if launcher is None or model.dtype not in launcher.dtypes:
            raise NotCapturable(f"the kernels in C++ compute nothing in {model.dtype}")
        self.profiled = False  # show each kernel in the profile that is being taken
        self._launcher = launcher
        self._model, self._cache = model, cache  # the graph holds addresses in both
        self._head = head
        self._capacity, self._max_rows, self._context_length = capacity, max_rows, context_length
        with torch.inference_mode():
            self._inputs = captured_step.Inputs.empty(capacity, max_rows)
            # Of the rows asked for.
            self._hidden = torch.empty(max_rows, model.hidden_size, dtype=model.dtype)
            self._pooled = np.empty((max_rows, model.hidden_size), np.float32)  # of each text, where `pools`
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
            )
            own_pages = [
                Step(page_size=cache.page_size, **inputs.addresses()) for inputs in self._own_pages.values()
            ]
            forward = launcher.capture(capacity, lambda: self._compute(captured), self._step, own_pages)
            self._to_hidden = forward
            self._to_tokens: KernelGraph | None = None
            if head is not None and head.is_plain:
                chosen = launcher.capture(capacity, self._choose, self._step)
                self._to_tokens = forward.followed_by(chosen)

    def takes(self, batch: Batch) -> bool:
        """Whether the batch fits, and says nothing that was not captured, such as where second texts begin.
        Log-probabilities of prompts need hidden states that the graph does not give.
        """
        fits = len(batch.token_ids) <= self._capacity and len(batch.starts) <= self._max_rows
        return (
            fits
            and not batch.prompt_logprobs
            and not batch.row_values
            and batch.second_starts is None
            and all(
                batch.kinds[kind][name].size <= buffer.numel()
                for kind, buffers in self._kinds.items()
                for name, buffer in buffers.items()
            )
        )

    @property
    def chooses(self) -> bool:
        """Whether `choose` is there: not where something is done to logits before they are compared."""
        return self._to_tokens is not None

    def run(self, batch: Batch, last_tokens: Tensor) -> None:
        """Compute a step of which nobody wants tokens."""
        self._run(self._to_hidden, batch, last_tokens, NO_ROWS)

    def choose(self, batch: Batch, last_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Compute a step -> the likeliest token of each sampling row, int64 [R], and whether it is sound, bool [R].

        Reads and writes `last_tokens`, int64 by sequence. What is returned is overwritten by the next step.
        """
        if self._to_tokens is None:
            raise RuntimeError("The tokens of this model are not chosen by the graph.")
        rows = batch.sampling.rows if batch.sampling is not None else NO_ROWS
        self._run(self._to_tokens, batch, last_tokens, rows)
        return self._ids[: len(rows)], self._sound[: len(rows)]

    def hidden(self, batch: Batch, last_tokens: Tensor, rows: Ints) -> Tensor:
        """Compute a step -> the hidden states [n, E] at the last positions of these rows, the final norm applied.

        Reads `last_tokens`, int64 by sequence. What is returned is overwritten by the next step.
        """
        self._run(self._to_hidden, batch, last_tokens, rows)
        return self._hidden[: len(rows)]

    def hidden_of_all(self, batch: Batch, last_tokens: Tensor) -> Tensor:
        """Compute a step -> the hidden states [T, E] of all its tokens, which the next step overwrites.

        For models whose vectors are pooled of more than a text's last token.
        """
        if self._hidden_of_all is None:
            raise RuntimeError("Of this model the last hidden states are kept alone.")
        self._run(self._to_hidden, batch, last_tokens, NO_ROWS)
        return self._hidden_of_all[: len(batch.token_ids)]

    @property
    def pools(self) -> bool:
        """Whether `vectors` is there: of the means of texts, or of their first tokens."""
        return self._model.pooler.pooling.modes in (("mean",), ("cls",))

    def vectors(self, batch: Batch, last_tokens: Tensor, rows: Ints) -> Tensor:
        """Compute a step -> the vectors of these rows, float32 [M, D]."""
        if not self.pools:
            raise RuntimeError("The texts of this model are not pooled by the graph.")
        self._run(self._to_hidden, batch, last_tokens, NO_ROWS)
        pooled = torch.from_numpy(self._pooled[rows])  # by NumPy, which keeps Python's lock for so little
        pooler = self._model.pooler
        return pooled if pooler.only_scales else pooler.finish(pooled)

    def close(self) -> None:
        """End the threads that compute."""
        self._launcher.close()

    def _compute(self, batch: ForwardBatch) -> None:
        """From the batch's arrays to the hidden states of the rows asked for."""
        for inputs in (self._inputs, *self._own_pages.values()):
            captured_step.begin(self._launcher, inputs, self._model.dtype)
        hidden = self._model(batch)
        pooler = self._model.pooler
        self._hidden_of_all = hidden if pooler.pooling.needs_all else None
        if self.pools:
            captured_step.pool_texts(
                self._launcher,
                hidden,
                torch.from_numpy(self._pooled),
                mean=pooler.pooling.modes == ("mean",),
                normalized=pooler.only_scales and pooler.pooling.normalize,
            )
        captured_step.last(self._launcher, hidden, self._hidden)

    def _choose(self) -> None:
        if self._head is None:
            raise RuntimeError("This model writes no tokens.")
        self._ids, self._sound = captured_step.likeliest(self._launcher, self._hidden, self._head.prepared)

    def time(self, batch: Batch, last_tokens: Tensor) -> list[tuple[str, float]]:
        """Compute a step kernel by kernel -> the name of each and the seconds that it took."""
        rows = batch.sampling.rows if batch.sampling is not None else NO_ROWS
        _kept = self._hand_over(batch, last_tokens, rows)
        return (self._to_tokens or self._to_hidden).time(self._step)

    def _run(self, graph: KernelGraph, batch: Batch, last_tokens: Tensor, rows: Ints) -> None:
        """Compute the batch; `rows` are those whose last hidden state is wanted."""
        _kept = self._hand_over(batch, last_tokens, rows)
        if self.profiled:
            graph.record(self._step)
        else:
            graph.run(self._step)

    def _buffers(self, kind: str) -> dict[str, Tensor]:
        """Where every step puts what it tells the caches of a kind."""
        pages = min(self._cache.num_pages, -(-self._context_length // self._cache.page_size))
        sizes = KINDS[kind].buffer_sizes(self._max_rows, pages)
        if sizes is None:
            raise NotCapturable(f"steps with {kind} caches are not captured")
        return {name: torch.zeros(size, dtype=torch.int32) for name, size in sizes.items()}

    def _hand_over(self, batch: Batch, last_tokens: Tensor, rows: Ints) -> list[np.ndarray]:
        """Put the batch's addresses into the step -> the arrays that must live as long as it is computed."""
        step = self._step
        for kind, buffers in self._kinds.items():
            for name, buffer in buffers.items():
                array = torch.from_numpy(batch.kinds[kind][name]).reshape(-1)
                buffer[: len(array)] = array
        given = (batch.token_ids, batch.starts, batch.counts, batch.sequence_indices, rows, batch.page_table)
        arrays = [np.ascontiguousarray(array, np.int32) for array in given]
        step.num_tokens, step.num_rows, step.num_samples = (len(arrays[index]) for index in (0, 1, 4))
        step.table_width = arrays[-1].shape[1]
        step.given_ids, step.starts, step.counts, step.sequence_indices, step.sample_rows, step.page_table = (
            array.ctypes.data for array in arrays
        )
        step.last_tokens = last_tokens.data_ptr()
        return arrays
