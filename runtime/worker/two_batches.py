"""Two-batch overlap: a step is computed in two halves. While one half communicates, the other one computes.

The first half has the first rows of the step, so the second half may read pages that the first half has just written.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from ops.attention import AttentionMetadata
from runtime.layers.forward_batch import ForwardBatch
from runtime.mesh.mesh import Mesh
from runtime.mesh.turns import Turns
from runtime.modeling.decoder import Decoder
from runtime.worker.device import Device


class TwoBatchForward:
    """The forward pass of a model whose ranks share every layer. Computes a step in two halves if it can be divided."""

    def __init__(self, model: Decoder, mesh: Mesh, device: Device, threshold: float) -> None:
        """Create the forward pass of a model.

        A row is divided if the step would otherwise have a half with less than the share `threshold` of the tokens.
        """
        self.num_split = 0  # number of steps that were computed in two halves
        self._model, self._mesh, self._device, self._threshold = model, mesh, device, threshold
        self._second = ThreadPoolExecutor(1, thread_name_prefix="penstock-second-half")

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """Return hidden states [T, E]."""
        at = split_point(batch, self._threshold)
        if not at:
            return self._model(batch)
        self.num_split += 1
        first, second = halves(batch, at)
        turns = Turns()
        with self._mesh.in_turns(turns):
            other = self._second.submit(self._compute, second, turns, 1)
            try:
                found = self._compute(first, turns, 0)
            finally:
                other.exception()  # the second half always ends before the step does
        return torch.cat([found, other.result()])

    def _compute(self, half: ForwardBatch, turns: Turns, number: int) -> Tensor:
        turns.enter(number)
        try:
            with torch.inference_mode(), self._device.forward():
                return self._model(half)
        except BaseException:
            # A failed step ends all ranks. This ends the other half's wait for ranks that have failed.
            self._mesh.abort()
            raise
        finally:
            turns.leave(number)


def split_point(batch: ForwardBatch, threshold: float) -> int:
    """Return the number of tokens in the first half, or 0 if the step cannot be split.

    The step is cut between two rows if the smaller half then has at least the share `threshold` of all tokens,
    otherwise in the middle. Steps with inputs other than token ids and pages are not split.
    """
    total = batch.num_tokens
    is_plain = batch.is_plain and not (batch.kinds or batch.adapted or batch.media_levels or batch.group_tokens)
    if total < 2 or not is_plain or batch.states is not None or batch.attention.mutual_spans:
        return 0
    ends = [*accumulate(batch.attention.counts_host)][:-1]
    best = min(ends, key=lambda end: abs(2 * end - total), default=0)
    return total // 2 if min(best, total - best) < threshold * total else best


def halves(batch: ForwardBatch, at: int) -> tuple[ForwardBatch, ForwardBatch]:
    """Return the first `at` tokens of a step, and the remaining tokens. A row may be in both halves."""

    def half(tokens: slice) -> ForwardBatch:
        return replace(
            batch,
            token_ids=batch.token_ids[tokens],
            positions=batch.positions[tokens],
            attention=_part(batch.attention, tokens.start or 0, batch.num_tokens if tokens.stop is None else at),
        )

    return half(slice(0, at)), half(slice(at, None))


def _part(whole: AttentionMetadata, first: int, end: int) -> AttentionMetadata:
    """Return the metadata of tokens first .. end - 1."""
    row_ends = [*accumulate(whole.counts_host)]
    row_starts = [end - count for end, count in zip(row_ends, whole.counts_host, strict=True)]
    rows = [row for row in range(len(row_ends)) if row_ends[row] > first and row_starts[row] < end]
    before = [max(first - row_starts[row], 0) for row in rows]  # number of tokens of each row in the first half
    counts = [min(row_ends[row], end) - max(row_starts[row], first) for row in rows]
    part, device = slice(rows[0], rows[-1] + 1), whole.starts.device
    return replace(
        whole,
        page_table=whole.page_table[part],
        starts=whole.starts[part] + torch.tensor(before, dtype=whole.starts.dtype, device=device),
        counts=torch.tensor(counts, dtype=whole.counts.dtype, device=device),
        query_starts=torch.tensor([0, *accumulate(counts)], dtype=whole.query_starts.dtype, device=device),
        slot_mapping=whole.slot_mapping[first:end],
        starts_host=[whole.starts_host[row] + skipped for row, skipped in zip(rows, before, strict=True)],
        counts_host=counts,
        plan_cache={},
    )
