"""Attention with two backends: one for decode rows (one token), and one for prefill rows (several tokens).

By default, the decode backend also computes rows with draft tokens, so that their tokens equal those of plain decoding.
Optionally, the prefill backend computes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ops.attention import Attend, AttentionMetadata, AttentionOptions
from ops.sampling.native import to_device


class Part(NamedTuple):
    """Some rows of a step, with metadata that describes only these rows."""

    tokens: Tensor  # int64 [n], indices of the rows' tokens in the flat batch
    metadata: AttentionMetadata


def hybrid(decode: Attend, prefill: Attend, *, drafts_by_prefill: bool = False) -> Attend:
    """Return an `attend` (see `ops.attention`) with `decode` for rows of one token and `prefill` for longer rows.

    With `drafts_by_prefill`, `prefill` also computes rows with draft tokens; otherwise `decode` does. It must be set if
    `decode` supports only rows of one token.
    """

    def attend(
        q: Tensor, k_pool: Tensor, v_pool: Tensor, metadata: AttentionMetadata, options: AttentionOptions
    ) -> Tensor:
        drafted = () if drafts_by_prefill else metadata.draft_rows
        decodes = [count == 1 or row in drafted for row, count in enumerate(metadata.counts_host)]
        if all(decodes):
            return decode(q, k_pool, v_pool, metadata, options)
        if not any(decodes):
            return prefill(q, k_pool, v_pool, metadata, options)
        if __name__ not in metadata.plan_cache:
            metadata.plan_cache[__name__] = tuple(
                part_of(metadata, [row for row, is_decode in enumerate(decodes) if is_decode == wanted])
                for wanted in (True, False)
            )
        out = torch.empty_like(q)
        for backend, part in zip((decode, prefill), metadata.plan_cache[__name__], strict=True):
            attended = backend(q.index_select(0, part.tokens), k_pool, v_pool, part.metadata, options)
            out.index_copy_(0, part.tokens, attended)
        return out

    return attend


def part_of(metadata: AttentionMetadata, rows: Sequence[int]) -> Part:
    """Return the part of a step that consists of `rows`, in this order."""
    first_tokens = [0, *accumulate(metadata.counts_host)]
    counts = [metadata.counts_host[row] for row in rows]
    tokens = [first_tokens[row] + i for row, count in zip(rows, counts) for i in range(count)]
    device = metadata.page_table.device
    row_index = to_device(torch.tensor(rows, dtype=torch.int64), device)
    token_index = to_device(torch.tensor(tokens, dtype=torch.int64), device)
    query_starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
    return Part(
        token_index,
        replace(
            metadata,
            page_table=metadata.page_table.index_select(0, row_index),
            starts=metadata.starts.index_select(0, row_index),
            counts=metadata.counts.index_select(0, row_index),
            query_starts=to_device(query_starts, device),
            slot_mapping=metadata.slot_mapping.index_select(0, token_index),
            starts_host=[metadata.starts_host[row] for row in rows],
            counts_host=counts,
            plan_cache={},
            draft_rows=frozenset(index for index, row in enumerate(rows) if row in metadata.draft_rows),
        ),
    )
