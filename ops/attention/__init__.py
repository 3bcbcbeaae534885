"""Attention over a paged cache.

A backend file defines `make_attend(**settings)`, which returns an `attend` for one engine, with the backend's settings:
`attend(q, k_pool, v_pool, metadata, options) -> out`

    q        [T, H, D]           queries of all rows, row by row
    k_pool   [P, K, page, D]     keys, contiguous, in q's dtype or float8 (e4m3fn or e5m2)
    v_pool   [P, K, page, D]
    metadata AttentionMetadata   the rows of the step
    options  AttentionOptions    options of the layer
    out      [T, H, D]           a new tensor of q's dtype

Token i of row b has the position p = starts[b] + i and attends to the positions 0 .. p that are in the layer's window.
Query head h reads kv head h // (H / K). The caller stores all KV of the step before the call. The results of a row
depend only on its own positions, even if other memory contains NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AttentionMetadata:
    """Rows of one step and their pages in the cache. Built once per step, and read by every layer.

    Backends may store derived values in `plan_cache`, for example a gather index or a mask. The first layer computes
    them, and later layers reuse them. Keys begin with the backend's module name.

    `replans` is a dict while a step of single tokens is captured as a CUDA graph, otherwise None. The graph has the
    addresses of this metadata's tensors, but each replay has other rows. A backend that reads the rows on the host
    therefore registers a function in `replans`, under its own key. Before each replay, this function is called with the
    metadata of the new step, and updates the buffers of the captured kernels. The warm-up run and the captured run
    share the dict, which lives as long as the graph.
    """

    page_table: Tensor  # int32 [B, W], a row's pages in order; entries after its last page are arbitrary valid pages
    starts: Tensor  # int32 [B], first computed position of each row
    counts: Tensor  # int32 [B], number of computed positions
    query_starts: Tensor  # int32 [B + 1], prefix sums of counts
    slot_mapping: Tensor  # int64 [T], page * page_size + offset: slot of each token's KV
    page_size: int
    # Copies of `starts` and `counts` on the host, so that backends need not wait for the device. For rows of one token,
    # `starts_host` may contain upper bounds instead, unless the backend declares `exact_starts` (`ops.backends`).
    starts_host: Sequence[int]
    counts_host: Sequence[int]
    plan_cache: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    replans: dict[Hashable, Callable[[AttentionMetadata], None]] | None = None
    # (row, first position, end position) of each span of tokens that attend to each other in both directions, such as
    # the tokens of an image in some models. Backends compute such rows causally; then `native.attend_mutually` computes
    # them again.
    mutual_spans: Sequence[tuple[int, int, int]] = ()
    # Tokens whose KV is also stored in a second slot: (indices of the tokens, int64 [R]; metadata with the second
    # slots). Only the cache reads this field.
    repeated: tuple[Tensor, AttentionMetadata] | None = None
    draft_rows: Collection[int] = ()  # rows with draft tokens; only `hybrid` reads this field

    @classmethod
    def build(
        cls,
        starts: Sequence[int],
        counts: Sequence[int],
        page_table: NDArray[np.int32],
        page_size: int,
        device: torch.device | str = "cpu",
    ) -> AttentionMetadata:
        """Return the metadata of rows that compute positions starts[b] .. starts[b] + counts[b] - 1.

        Computes the slot mapping and the prefix sums on the host, and blocks until they are copied to the device.
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
    """Options of one layer's attention.

    - window: a token attends to the last `window` positions, including its own. If `chunked`, positions are divided
      into chunks of `window`, and a token attends within its chunk.
    - soft_cap: each score, which is q.k * scale, is replaced by soft_cap * tanh(score / soft_cap).
    - slopes: a score decreases by slope * distance to its key (ALiBi, arXiv 2108.12409). Not combined with soft_cap.
    - sinks: the softmax of each head has exp(sink) as a further term in its denominator. A sink is neither scaled nor
      capped (attention sinks, arXiv 2309.17453).
    - k_scale, v_scale: keys and values are the elements of the pools times these scales.
    - below: results of rows with this number of tokens or more are unused, so a backend need not compute them.
    """

    scale: float
    window: int | None = None
    chunked: bool = False
    soft_cap: float | None = None
    sinks: Tensor | None = None  # float32 [H]
    slopes: Tensor | None = None  # float32 [H]
    k_scale: float = 1.0
    v_scale: float = 1.0
    below: int | None = None


Attend = Callable[[Tensor, Tensor, Tensor, AttentionMetadata, AttentionOptions], Tensor]


def token_positions(starts: Sequence[int], counts: Sequence[int]) -> NDArray[np.int64]:
    """Return the position of each token of a batch, [T]."""
    ranges = [np.arange(start, start + count) for start, count in zip(starts, counts)]
    return np.concatenate(ranges) if ranges else np.zeros(0, np.int64)
