"""Builds the tensors of a step from the host arrays of its batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ops.attention import AttentionMetadata
from runtime.batch import Batch
from runtime.kv_cache.pools import KVPool
from runtime.kv_cache.registry import KINDS
from runtime.layers.forward_batch import ForwardBatch, KindInputs
from runtime.worker.branches import repeated_tokens
from runtime.worker.device import Device, Event
from runtime.worker.drafts import OF_DRAFTS, Verified, draft_arrays, settle
from runtime.worker.logprobs import prompt_indices

# Computes hidden states [T, E] after the final norm: a model, or its captured or compiled forward pass. The result is
# valid until the next call.
Forward = Callable[[ForwardBatch], Tensor]


NO_ARRAYS: Mapping[str, np.ndarray] = MappingProxyType({})


class Staged(NamedTuple):
    """Arrays by name, on the host and on the device."""

    host: Mapping[str, np.ndarray]
    on_device: Mapping[str, Tensor]
    token_ids: Tensor | None = None  # int64 [T], the step's draft tokens at their indices; None: the host knows them


NOT_STAGED = Staged(NO_ARRAYS, MappingProxyType({}))


class SampleInputs(NamedTuple):
    """The tensors that the end of a step needs besides the hidden states. N positions are sampled."""

    # Int64 [N], sampled positions as indices into the hidden states; a slice if there are only N hidden states.
    index: Tensor | slice
    sequences: Tensor | None  # int [N], sequence indices; None: a graph has already stored the last tokens
    drafts: Mapping[str, Tensor] | None = None  # `draft_arrays`; None: no row has draft tokens
    more: Staged = NOT_STAGED  # the arrays that `prepare` got as `more`

    def keep(
        self, ids: Tensor, last_tokens: Tensor, lengths: Tensor, limits: np.ndarray | None = None
    ) -> Verified | None:
        """Store each row's last sampled id in `last_tokens`. If the step has draft tokens, `settle` does this.

        `ids` [N] are the sampled ids. Returns the result of `settle`, or None.
        """
        if self.drafts is not None:
            return settle(ids, self.drafts, last_tokens, lengths, limits)
        if self.sequences is not None:
            last_tokens[self.sequences] = ids
        return None


OF_GRAPH = SampleInputs(slice(None), None)


class StepInputs(NamedTuple):
    """The tensors of a step for the model and the sampler."""

    forward: ForwardBatch
    samples: SampleInputs
    # Int64, indices into [T] of the hidden states that are needed: sampled, embedded or scored positions.
    requested: Tensor
    sequences: Tensor  # int64 [T], the sequence index of each token


def _host_arrays(batch: Batch, page_size: int) -> dict[str, np.ndarray]:
    """Return the arrays that the device gets for a batch, by name."""
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

    nothing = np.zeros(0, np.int64)
    sampled, row_of = nothing, nothing
    if batch.sampling is not None:
        sampled, row_of = batch.sampling.positions.astype(np.int64), batch.sampling.row_of
    embedding = nothing if batch.embedding_rows is None else query_starts[1:][batch.embedding_rows] - 1
    drafts = {} if batch.drafts is None else draft_arrays(batch)
    return {
        **drafts,
        "token_ids": batch.token_ids.astype(np.int64),
        "token_sequence_indices": batch.sequence_indices[rows].astype(np.int64),
        "positions": positions,
        "slot_mapping": slots(batch.page_table),
        **repeated_tokens(batch, page_size),
        "sample_index": sampled,
        "sample_sequence_indices": batch.sequence_indices[row_of].astype(np.int64),
        "requested": np.concatenate([sampled, embedding, prompt_indices(batch.prompt_logprobs)]),
        "page_table": batch.page_table,
        "starts": batch.starts,
        "counts": batch.counts,
        "query_starts": query_starts.astype(np.int32),
        **_unknown_start_arrays(batch),
        **({"token_rows": rows} if _has_token_rows(batch) else {}),
        **{f"row.{name}": values for name, values in batch.row_values.items()},
        **{f"token.{name}": values[rows] for name, values in batch.row_values.items()},
        **({} if batch.position_offsets is None else {"position_offsets": batch.position_offsets}),
        **_media_arrays(batch),
        **{f"{kind}.{name}": own[name] for kind, own in batch.kinds.items() for name in own},
        **{
            f"{kind}.slot_mapping": slots(own["page_table"]) for kind, own in batch.kinds.items() if "page_table" in own
        },
    }


def _unknown_start_arrays(batch: Batch) -> dict[str, np.ndarray]:
    """Return the additional arrays that `_take_lengths` reads."""
    if batch.unknown_starts is None:
        return {}
    return {"unknown_starts": batch.unknown_starts, "sequence_indices": batch.sequence_indices.astype(np.int64)}


def _has_token_rows(batch: Batch) -> bool:
    """Return whether the step needs each token's row: for unknown starts, and for graphs of rows with draft tokens."""
    return batch.unknown_starts is not None or batch.drafts is not None


def _take_lengths(
    on_device: dict[str, Tensor], lengths: Tensor, page_size: int, kinds: Mapping[str, Iterable[str]]
) -> None:
    """Replace the upper bounds of unknown starts by `lengths`, in all arrays that depend on starts."""
    known = lengths[on_device["sequence_indices"]]
    starts = torch.where(on_device["unknown_starts"], known, on_device["starts"])
    if "draft_lengths" in on_device:
        of_drafts = on_device["draft_rows"]
        on_device["draft_lengths"] = starts[of_drafts] + 1
    rows = on_device["token_rows"]
    positions = on_device["positions"] + (starts - on_device["starts"])[rows]
    for kind, names in kinds.items():
        own = {name: on_device[f"{kind}.{name}"] for name in names}
        for name, values in KINDS[kind].with_starts(own, on_device["starts"] - starts).items():
            on_device[f"{kind}.{name}"] = values
    on_device |= {"starts": starts, "positions": positions}
    for name in [name for name in on_device if name.endswith("slot_mapping")]:
        table = on_device[name.replace("slot_mapping", "page_table")]
        on_device[name] = table[rows, positions // page_size].long() * page_size + positions % page_size


def _media_arrays(batch: Batch) -> dict[str, np.ndarray]:
    """Return the positions of media tokens [M] and their vectors [M, E]."""
    if not batch.media:
        return {}
    return {
        "media_index": np.concatenate(
            [np.arange(span.offset, span.offset + len(span.vectors)) for span in batch.media]
        ),
        "media_vectors": np.concatenate([span.vectors for span in batch.media]),
    }


def _media(on_device: Mapping[str, Tensor], num_tokens: int, size: int) -> dict[str, Any]:
    """Return the fields of `ForwardBatch` for media tokens. `size` is the length of an embedding vector."""
    if "media_index" not in on_device:
        return {}
    index, vectors = on_device["media_index"], on_device["media_vectors"]
    mask = torch.zeros(num_tokens, dtype=torch.bool, device=index.device)
    embeds, *levels = (
        vectors.new_zeros(num_tokens, vectors.shape[1])
        .index_copy_(0, index, vectors)
        .split(size or vectors.shape[1], dim=1)
    )
    return {
        "input_embeds": embeds.contiguous(),
        "embeds_mask": mask.index_fill_(0, index, True),
        "media_levels": levels,
    }


def prepare(
    batch: Batch,
    cache: KVPool,
    staging: Staging,
    last_tokens: Tensor,
    more: Mapping[str, np.ndarray] = NO_ARRAYS,
    *,
    lengths: Tensor | None = None,
    media_size: int = 0,
) -> StepInputs:
    """Compute positions and the slot mapping, and copy all arrays (including `more`) to the device in one transfer.

    The device reads UNKNOWN token ids from `last_tokens`, int64 by sequence index, and unknown starts from `lengths`,
    int32 by sequence index. With unknown starts, `starts_host` of the attention metadata has upper bounds. `media_size`
    is the length of the embedding at the beginning of each media vector. Raises `ValueError` if a batch with unknown
    starts has no `lengths`.
    """
    more_arrays = {f"more.{name}": array for name, array in more.items()}
    on_device = staging.copy(_host_arrays(batch, cache.page_size) | more_arrays)
    if batch.unknown_starts is not None:
        if lengths is None:
            raise ValueError("A batch with unknown starts needs the lengths of its sequences.")
        _take_lengths(on_device, lengths, cache.page_size, batch.kinds)
    token_ids, offsets = on_device["token_ids"], on_device.get("position_offsets")
    attention = AttentionMetadata(
        page_table=on_device["page_table"],
        starts=on_device["starts"],
        counts=on_device["counts"],
        query_starts=on_device["query_starts"],
        slot_mapping=on_device["slot_mapping"],
        page_size=cache.page_size,
        starts_host=batch.starts.tolist(),
        counts_host=batch.counts.tolist(),
        mutual_spans=() if batch.mutual_spans is None else [(row, *span) for row, *span in batch.mutual_spans.tolist()],
        draft_rows=() if batch.drafts is None else batch.drafts.all_rows,
    )

    def repeated(prefix: str = "") -> tuple[Tensor, AttentionMetadata] | None:
        slots = on_device.get(f"{prefix}repeated_slots")
        if slots is None:
            return None
        return on_device["repeated_tokens"], replace(attention, slot_mapping=slots, plan_cache={}, repeated=None)

    attention = replace(attention, repeated=repeated())
    kinds = {
        kind: kind_inputs(
            {name: on_device[f"{kind}.{name}"] for name in own},
            on_device.get(f"{kind}.slot_mapping"),
            attention,
            repeated(f"{kind}."),
        )._replace(host=own, is_exact=batch.unknown_starts is None)
        for kind, own in batch.kinds.items()
    }
    forward = ForwardBatch(
        token_ids=torch.where(token_ids < 0, last_tokens[on_device["token_sequence_indices"]], token_ids),
        positions=on_device["positions"],
        attention=attention,
        cache=cache,
        kinds=kinds,
        row_values={name: on_device[f"row.{name}"] for name in batch.row_values},
        token_values={name: on_device[f"token.{name}"] for name in batch.row_values},
        token_rows=on_device["token_rows"] if batch.drafts is not None else None,
        position_axes=None if offsets is None else on_device["positions"] + offsets,
        **_media(on_device, len(token_ids), media_size),
    )
    samples = SampleInputs(
        on_device["sample_index"],
        on_device["sample_sequence_indices"],
        None if batch.drafts is None else {name: on_device[name] for name in on_device if name.startswith(OF_DRAFTS)},
        Staged(more, {name: on_device[f"more.{name}"] for name in more}),
    )
    return StepInputs(forward, samples, on_device["requested"], on_device["token_sequence_indices"])


def samples_on_host(batch: Batch, *, are_stored: bool = False) -> SampleInputs:
    """Return a step's `SampleInputs` in host memory, for the hidden states [N, E] of its sampled positions.

    With `are_stored`, the CPU graph has already stored the rows' last tokens.
    """
    sampling = batch.sampling
    if sampling is None or (are_stored and batch.drafts is None):
        return OF_GRAPH
    drafts = {} if batch.drafts is None else draft_arrays(batch)
    return SampleInputs(
        slice(None),
        None if are_stored else torch.from_numpy(batch.sequence_indices[sampling.row_of]),
        {name: torch.from_numpy(array) for name, array in drafts.items()} or None,
    )


def kind_inputs(
    arrays: Mapping[str, Tensor],
    slot_mapping: Tensor | None,
    attention: AttentionMetadata,
    repeated: tuple[Tensor, AttentionMetadata] | None = None,
) -> KindInputs:
    """Return the inputs of a cache kind: its arrays, and attention metadata if the kind has its own page table.

    `repeated` are the second slots of tokens in the kind's own pages (see `AttentionMetadata`).
    """
    if slot_mapping is not None:
        table = arrays["page_table"]
        attention = replace(attention, page_table=table, slot_mapping=slot_mapping, repeated=repeated, plan_cache={})
    return KindInputs(arrays, attention)


def scratch_inputs(kind: str, num_units: int, num_rows: int, attention: AttentionMetadata) -> KindInputs:
    """Return the inputs of a cache kind for padding rows of one token, which use only the scratch unit."""
    device = attention.slot_mapping.device
    arrays = {
        name: torch.from_numpy(array).to(device)
        for name, array in KINDS[kind].scratch_arrays([1] * num_rows, num_units).items()
    }
    slots = arrays["page_table"][:, 0].long() * attention.page_size if "page_table" in arrays else None
    return kind_inputs(arrays, slots, attention)


class Staging:
    """Copies host arrays to the device, with one copy per call.

    On a CPU, the arrays are used directly. On a GPU, they are packed into pinned buffers, which are used in turn. A
    buffer is reused only after its copy is done.
    """

    NUM_BUFFERS = 3  # one each for the running, the launched and the next step
    ALIGNMENT = 16  # alignment of arrays in bytes; for other alignments, Triton would compile additional kernels

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffers = [device.pinned(0) for _ in range(self.NUM_BUFFERS)]
        self._read: list[Event | None] = [None] * self.NUM_BUFFERS
        self._turn = 0

    def copy(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        """Return device tensors with the contents of the arrays, for later work on the forward stream."""
        contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        if self._device.is_host:
            return {name: torch.from_numpy(array) for name, array in contiguous.items()}
        slices, size = self._slices(contiguous)
        host = self._next_buffer(size)[:size]
        for name, array in contiguous.items():
            host[slices[name]] = torch.from_numpy(array.reshape(-1).view(np.uint8))
        on_device, self._read[self._turn] = self._device.upload(host)
        return {
            name: on_device[slices[name]].view(getattr(torch, array.dtype.name)).view(array.shape)
            for name, array in contiguous.items()
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
            event.wait()  # usually returns at once, because the buffer's last use was three copies ago

    def _slices(self, arrays: dict[str, np.ndarray]) -> tuple[dict[str, slice], int]:
        """Return the byte range of each array in the buffer, and the total size."""
        slices, end = {}, 0
        for name, array in arrays.items():
            start = -(-end // self.ALIGNMENT) * self.ALIGNMENT
            end = start + array.nbytes
            slices[name] = slice(start, end)
        return slices, end
