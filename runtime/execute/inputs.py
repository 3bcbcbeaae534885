"""From a batch's host arrays to the tensors of one step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ops.attention import AttentionInputs
from runtime.batch import Batch


class StepInputs(NamedTuple):
    """What the model reads. T tokens, B rows, R rows that sample."""

    token_ids: torch.Tensor  # int64 [T]; negative where the slot's last token is to be taken
    token_slots: torch.Tensor  # int64 [T], the slot of each token's row
    positions: torch.Tensor  # int64 [T]
    last_index: torch.Tensor  # int64 [R], into [T]: the position that predicts the sampled token
    sample_slots: torch.Tensor  # int64 [R]
    attention: AttentionInputs


def prepare(batch: Batch, page_size: int, staging: Staging) -> StepInputs:
    """Compute positions and KV slots, and bring everything to the device in one copy."""
    counts = batch.counts.astype(np.int64)
    starts = batch.starts.astype(np.int64)
    query_starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=query_starts[1:])
    num_tokens = int(query_starts[-1])
    rows = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(num_tokens) + (starts - query_starts[:-1])[rows]
    pages = batch.page_table[rows, positions // page_size].astype(np.int64)
    sample_rows = batch.sampling.rows if batch.sampling is not None else np.zeros(0, np.int64)
    tensors = staging.copy(
        {
            "token_ids": batch.token_ids,
            "token_slots": batch.slots[rows],
            "positions": positions,
            "kv_slots": pages * page_size + positions % page_size,
            "last_index": query_starts[1:][sample_rows] - 1,
            "sample_slots": batch.slots[sample_rows],
            "page_table": batch.page_table,
            "starts": starts,
            "counts": counts,
            "query_starts": query_starts,
        }
    )
    return StepInputs(
        token_ids=tensors["token_ids"],
        token_slots=tensors["token_slots"],
        positions=tensors["positions"],
        last_index=tensors["last_index"],
        sample_slots=tensors["sample_slots"],
        attention=AttentionInputs(
            page_table=tensors["page_table"].to(torch.int32),
            starts=tensors["starts"].to(torch.int32),
            counts=tensors["counts"].to(torch.int32),
            query_starts=tensors["query_starts"].to(torch.int32),
            slots=tensors["kv_slots"],
            page_size=page_size,
            starts_host=starts.tolist(),
            counts_host=counts.tolist(),
        ),
    )


class Staging:
    """Host to device, one copy a step.

    On CPU the arrays are used as they are. On CUDA they are packed into a pinned buffer and copied on a copy
    stream that the forward stream waits for. Buffers rotate, and one is not written again before the copy
    that read it is done.
    """

    NUM_BUFFERS = 3  # the step that runs, the one that is launched, the one that is prepared

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        if self._cuda:
            self._stream = torch.cuda.Stream(device)
            self._buffers = [torch.empty(0, dtype=torch.int64).pin_memory() for _ in range(self.NUM_BUFFERS)]
            self._read = [torch.cuda.Event() for _ in range(self.NUM_BUFFERS)]
            self._turn = 0

    def copy(self, arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """int64 tensors on the device, of the arrays' shapes, ready for the current stream."""
        if not self._cuda:
            return {
                name: torch.from_numpy(array.astype(np.int64, copy=False)) for name, array in arrays.items()
            }
        total = sum(array.size for array in arrays.values())
        host = self._next_buffer(total)
        offset = 0
        for array in arrays.values():
            host[offset : offset + array.size] = torch.from_numpy(
                array.astype(np.int64, copy=False).reshape(-1)
            )
            offset += array.size
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            device = host[:total].to(self._device, non_blocking=True)
            self._read[self._turn].record(self._stream)
        current.wait_event(self._read[self._turn])
        device.record_stream(current)
        return self._views(device, arrays)

    def _next_buffer(self, size: int) -> torch.Tensor:
        self._turn = (self._turn + 1) % self.NUM_BUFFERS
        self._read[self._turn].synchronize()  # three steps old: done long ago
        if self._buffers[self._turn].numel() < size:
            self._buffers[self._turn] = torch.empty(size * 2, dtype=torch.int64).pin_memory()
        return self._buffers[self._turn]

    @staticmethod
    def _views(flat: torch.Tensor, arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        views, offset = {}, 0
        for name, array in arrays.items():
            views[name] = flat[offset : offset + array.size].view(array.shape)
            offset += array.size
        return views
