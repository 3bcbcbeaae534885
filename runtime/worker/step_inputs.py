"""From a batch's host arrays to the tensors of one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ops.attention import AttentionMetadata
from runtime.batch import Batch
from runtime.kv_cache.pools import KVPool
from runtime.kv_cache.registry import KINDS
from runtime.layers.forward_batch import ForwardBatch, KindInputs
from runtime.worker.device import Device, Event

# How hidden states [T, E] are computed, the final norm applied: a model, or what captured or compiled its forward.
# What is returned is the caller's until the next call.
Forward = Callable[[ForwardBatch], Tensor]


NO_ARRAYS: Mapping[str, np.ndarray] = MappingProxyType({})


class Staged(NamedTuple):
    """Arrays by name, on the host and on the device."""

    host: Mapping[str, np.ndarray]
    there: Mapping[str, Tensor]


class StepInputs(NamedTuple):
    """A step's tensors: what the model reads, and what is done with its result. R rows sample."""

    forward: ForwardBatch
    last_index: Tensor  # int64 [R], into [T]: the position that predicts the sampled token
    sample_sequence_indices: Tensor  # int64 [R]
    embedding_index: Tensor  # int64 [M], into [T]: the positions whose hidden states are wanted as vectors
    more: Staged  # what `prepare` was given besides


def _host_arrays(batch: Batch, page_size: int) -> dict[str, np.ndarray]:
    """What the device is told of a batch: positions, slots, and where results are wanted."""
    counts = batch.counts.astype(np.int64)
    starts = batch.starts.astype(np.int64)
    query_starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=query_starts[1:])
    num_tokens = int(query_starts[-1])
    rows = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(num_tokens) + (starts - query_starts[:-1])[rows]

    def slots(page_table: np.ndarray) -> np.ndarray:
        pages = page_table[rows, positions // page_size].astype(np.int64)
        return pages * page_size + positions % page_size

    nobody = np.zeros(0, np.int64)
    sample_rows = batch.sampling.rows if batch.sampling is not None else nobody
    embedding_rows = batch.embedding_rows if batch.embedding_rows is not None else nobody
    types = {}
    if batch.second_starts is not None:
        types["token_types"] = (positions >= batch.second_starts[rows]).astype(np.int64)
    return {
        **types,
        "token_ids": batch.token_ids.astype(np.int64),
        "token_sequence_indices": batch.sequence_indices[rows].astype(np.int64),
        "positions": positions,
        "slot_mapping": slots(batch.page_table),
        "last_index": query_starts[1:][sample_rows] - 1,
        "sample_sequence_indices": batch.sequence_indices[sample_rows].astype(np.int64),
        "embedding_index": query_starts[1:][embedding_rows] - 1,
        "page_table": batch.page_table,
        "starts": batch.starts,
        "counts": batch.counts,
        "query_starts": query_starts.astype(np.int32),
        **{f"row.{name}": values for name, values in batch.row_values.items()},
        **{f"{kind}.{name}": own[name] for kind, own in batch.kinds.items() for name in own},
        **{
            f"{kind}.slot_mapping": slots(own["page_table"])
            for kind, own in batch.kinds.items()
            if "page_table" in own
        },
    }


def prepare(
    batch: Batch,
    cache: KVPool,
    staging: Staging,
    last_tokens: Tensor,
    more: Mapping[str, np.ndarray] = NO_ARRAYS,
) -> StepInputs:
    """Compute positions and KV slots, and bring everything to the device in one copy, with `more` arrays.

    Tokens that only the device knows are taken from `last_tokens`, int64 by sequence.
    """
    more_arrays = {f"more.{name}": array for name, array in more.items()}
    there = staging.copy(_host_arrays(batch, cache.page_size) | more_arrays)
    token_ids = there["token_ids"]
    attention = AttentionMetadata(
        page_table=there["page_table"],
        starts=there["starts"],
        counts=there["counts"],
        query_starts=there["query_starts"],
        slot_mapping=there["slot_mapping"],
        page_size=cache.page_size,
        starts_host=batch.starts.tolist(),
        counts_host=batch.counts.tolist(),
    )
    kinds = {
        kind: kind_inputs(
            {name: there[f"{kind}.{name}"] for name in own}, there.get(f"{kind}.slot_mapping"), attention
        )
        for kind, own in batch.kinds.items()
    }
    forward = ForwardBatch(
        token_ids=torch.where(token_ids < 0, last_tokens[there["token_sequence_indices"]], token_ids),
        positions=there["positions"],
        attention=attention,
        cache=cache,
        kinds=kinds,
        row_values={name: there[f"row.{name}"] for name in batch.row_values},
        token_types=there.get("token_types"),
    )
    return StepInputs(
        forward,
        there["last_index"],
        there["sample_sequence_indices"],
        there["embedding_index"],
        Staged(more, {name: there[f"more.{name}"] for name in more}),
    )


def kind_inputs(
    arrays: Mapping[str, Tensor], slot_mapping: Tensor | None, attention: AttentionMetadata
) -> KindInputs:
    """What a kind of cache is told: its arrays and, where it has a page table and slots, metadata with these."""
    if slot_mapping is not None:
        attention = replace(
            attention, page_table=arrays["page_table"], slot_mapping=slot_mapping, plan_cache={}
        )
    return KindInputs(arrays, attention)


def scratch_inputs(kind: str, num_units: int, num_rows: int, attention: AttentionMetadata) -> KindInputs:
    """For rows of one token at position 0 that touch nothing of this kind of cache."""
    device = attention.slot_mapping.device
    arrays = {
        name: torch.from_numpy(array).to(device)
        for name, array in KINDS[kind].scratch_arrays([1] * num_rows, num_units).items()
    }
    slots = arrays["page_table"][:, 0].long() * attention.page_size if "page_table" in arrays else None
    return kind_inputs(arrays, slots, attention)


class Staging:
    """Host to device, one copy for each call.

    Where the host is the device, the arrays are used as they are. Else they are packed into pinned buffers
    that take turns: one is not written again before the copy that read it is done.
    """

    NUM_BUFFERS = 3  # the step that runs, the one that is launched, the one that is prepared
    ALIGNMENT = 16  # bytes; Triton compiles other kernels for addresses that are no multiples of it

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffers = [device.pinned(0) for _ in range(self.NUM_BUFFERS)]
        self._read: list[Event | None] = [None] * self.NUM_BUFFERS
        self._turn = 0

    def copy(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        """Tensors on the device of the arrays' shapes and dtypes, for what the forward stream does next."""
        whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        if self._device.is_host:
            return {name: torch.from_numpy(array) for name, array in whole.items()}
        slices, size = self._slices(whole)
        host = self._next_buffer(size)[:size]
        for name, array in whole.items():
            host[slices[name]] = torch.from_numpy(array.reshape(-1).view(np.uint8))
        there, self._read[self._turn] = self._device.upload(host)
        return {
            name: there[slices[name]].view(getattr(torch, array.dtype.name)).view(array.shape)
            for name, array in whole.items()
        }

    def _next_buffer(self, num_bytes: int) -> Tensor:
        self._turn = (self._turn + 1) % self.NUM_BUFFERS
        self._wait_until_read()
        if self._buffers[self._turn].numel() < num_bytes:
            self._buffers[self._turn] = self._device.pinned(num_bytes * 2)
        return self._buffers[self._turn]

    def _wait_until_read(self) -> None:
        event = self._read[self._turn]
        if event is not None:
            event.wait()  # three steps old: done long ago

    def _slices(self, arrays: dict[str, np.ndarray]) -> tuple[dict[str, slice], int]:
        """Where each array's bytes lie, and how many there are in all."""
        slices, end = {}, 0
        for name, array in arrays.items():
            start = -(-end // self.ALIGNMENT) * self.ALIGNMENT
            end = start + array.nbytes
            slices[name] = slice(start, end)
        return slices, end
