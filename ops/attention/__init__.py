"""Attention over a paged cache.

A backend file holds `attend(q, k_pool, v_pool, metadata, options) -> out`:

    q        [T, H, D]           queries of all rows, one row after the other
    k_pool   [P, K, page, D]     keys, contiguous; the query's dtype, or float8 (e4m3fn or e5m2)
    v_pool   [P, K, page, D]
    metadata AttentionMetadata   where the rows of the step stand
    options  AttentionOptions    what a layer asks for
    out      [T, H, D]           a new tensor of q's dtype

Token i of row b has the position p = starts[b] + i and attends to the positions 0 .. p, or to those that the layer's
window leaves. Query head h reads kv head h // (H / K). All KV of the step is stored before the call.
Nothing outside a row's own positions has any influence on it, not even a value that is no number.

`make_attend(**settings)` gives an engine an `attend` of its own, with the settings that the backend has.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AttentionMetadata:
    """Where each row of one step stands in the cache: made once per step, read by every layer.

    `plan_cache` is for backends: what one derives from the other fields in the first layer (a gather index, a mask)
    it keeps there for the others. Its keys begin with the backend's module name.

    `replans` is None but in a step of single tokens that is captured as a CUDA graph, whose tensors keep their
    addresses. There `starts_host` says nothing of the steps that will replay it: a backend that has to know their rows
    on the host leaves, under a key of its own, what brings them to where the captured kernels look. It is called with
    each step's metadata before the replay, and kept while the graph is; the same dict is given to the run that warms
    up and to the one that is captured.
    """

    page_table: Tensor  # int32 [B, W], a row's pages in order; entries beyond its length are any valid page
    starts: Tensor  # int32 [B], the first position computed of each row
    counts: Tensor  # int32 [B], how many positions are computed
    query_starts: Tensor  # int32 [B + 1], prefix sums of counts
    slot_mapping: Tensor  # int64 [T], page * page_size + offset: where each token's KV goes
    page_size: int
    starts_host: Sequence[int]  # the same as above, so that no backend has to wait for the device
    counts_host: Sequence[int]
    plan_cache: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    replans: dict[Hashable, Callable[[AttentionMetadata], None]] | None = None

    @classmethod
    def build(
        cls,
        starts: Sequence[int],
        counts: Sequence[int],
        page_table: NDArray[np.int32],
        page_size: int,
        device: torch.device | str = "cpu",
    ) -> AttentionMetadata:
        """The metadata of rows that compute positions starts[b] .. starts[b] + counts[b] - 1.

        Computes the slot mapping and prefix sums on the host and copies all of it to the device (blocking).
        """
        starts, counts = [int(n) for n in starts], [int(n) for n in counts]
        rows = np.repeat(np.arange(len(counts)), counts)
        positions = token_positions(starts, counts)
        pages = page_table[rows, positions // page_size].astype(np.int64)
        slot_mapping = pages * page_size + positions % page_size
        query_starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        return cls(
            page_table=torch.from_numpy(np.ascontiguousarray(page_table, dtype=np.int32)).to(device),
            starts=torch.tensor(starts, dtype=torch.int32, device=device),
            counts=torch.tensor(counts, dtype=torch.int32, device=device),
            query_starts=torch.from_numpy(query_starts).to(device),
            slot_mapping=torch.from_numpy(slot_mapping).to(device),
            page_size=page_size,
            starts_host=starts,
            counts_host=counts,
        )


class AttentionOptions(NamedTuple):
    """How the tokens of one layer attend.

    A token attends to the last `window` positions (its own included), or where `chunked` to those of its own chunk:
    positions are divided into chunks of `window`. Scores are q.k * scale, then soft_cap * tanh(score / soft_cap) where
    a soft cap is given. With slopes a score loses slope times its key's distance (ALiBi, arXiv 2108.12409); they come
    without a soft cap. A sink takes part in the softmax of its head, neither scaled nor capped (attention sinks,
    arXiv 2309.17453, as learned numbers). Keys and values are what the pools hold times k_scale and v_scale. With
    `below` the results of rows of that many tokens or more are not wanted; a backend may compute them nevertheless.
    """

    scale: float
    window: int | None = None
    chunked: bool = False
    soft_cap: float | None = None
    sinks: Tensor | None = None  # float32 [H], a score without a value for each head
    slopes: Tensor | None = None  # float32 [H], what a head's scores lose for each position of distance
    k_scale: float = 1.0
    v_scale: float = 1.0
    below: int | None = None


Attend = Callable[[Tensor, Tensor, Tensor, AttentionMetadata, AttentionOptions], Tensor]


def token_positions(starts: Sequence[int], counts: Sequence[int]) -> NDArray[np.int64]:
    """The position of every token of a batch, [T]."""
    ranges = [np.arange(start, start + count) for start, count in zip(starts, counts)]
    return np.concatenate(ranges) if ranges else np.zeros(0, np.int64)
