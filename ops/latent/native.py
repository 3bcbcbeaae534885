"""Latent attention in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.attention import Attend, AttentionMetadata, AttentionOptions
from ops.attention.hybrid import part_of
from ops.attention.native import Scoring, attend_gathered_row, gather_row
from ops.latent import LatentWeights

# Maximum number of elements of expanded keys and values in memory at a time, but at least one head is expanded.
MAX_EXPANDED_ELEMENTS = 2**24


def prepare_heads(weight: Tensor) -> Tensor:
    return weight.transpose(1, 2).contiguous()


def join(latent: Tensor, k_pe: Tensor) -> Tensor:
    return torch.cat((latent, k_pe), dim=-1).unsqueeze(1)


def attend_latent(
    q_nope: Tensor,
    q_pe: Tensor,
    pool: Tensor,
    weights: LatentWeights,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    attend: Attend,
) -> Tensor:
    """Compute short rows absorbed and long rows expanded (see `ops.latent`)."""
    counts, expand_from = metadata.counts_host, weights.expand_from
    expanded = [row for row, count in enumerate(counts) if expand_from is not None and count >= expand_from]
    if not expanded:
        return attend_absorbed(q_nope, q_pe, pool, weights, metadata, options, attend)
    out = q_nope.new_empty(len(q_nope), q_nope.shape[1] * weights.value_dim)
    if len(expanded) < len(counts):
        key = (__name__, expand_from)
        if key not in metadata.plan_cache:
            metadata.plan_cache[key] = part_of(metadata, sorted({*range(len(counts))} - {*expanded}))
        tokens, absorbed = metadata.plan_cache[key]
        queries = q_nope.index_select(0, tokens), q_pe.index_select(0, tokens)
        out.index_copy_(0, tokens, attend_absorbed(*queries, pool, weights, absorbed, options, attend))
    for row in expanded:
        first = sum(counts[:row])
        tokens = slice(first, first + counts[row])
        out[tokens] = _attend_expanded(q_nope[tokens], q_pe[tokens], pool, weights, metadata, row, options)
    return out


def attend_absorbed(
    q_nope: Tensor,
    q_pe: Tensor,
    pool: Tensor,
    weights: LatentWeights,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    attend: Attend,
) -> Tensor:
    """Compute all rows absorbed, with `attend` over the latent vectors. Return [T, H * V]."""
    query = absorb(q_nope, q_pe, weights.absorbing)
    return expand(attend(query, pool, pool, metadata, options), weights.values)


def absorb(q_nope: Tensor, q_pe: Tensor, absorbing: Tensor) -> Tensor:
    """Return the absorbed queries [T, H, R + P]: `q_nope` times each head's weight (R), followed by `q_pe` (P)."""
    query = q_nope.new_empty(*q_nope.shape[:2], absorbing.shape[2] + q_pe.shape[2])
    torch.bmm(q_nope.transpose(0, 1), absorbing, out=query[..., : absorbing.shape[2]].transpose(0, 1))
    query[..., absorbing.shape[2] :] = q_pe
    return query


def expand(attended: Tensor, values: Tensor) -> Tensor:
    """Return the output of the heads [T, H * V]: the first R elements of `attended`, times each head's value weight."""
    latent = attended[..., : values.shape[1]]
    return torch.bmm(latent.transpose(0, 1), values).transpose(0, 1).flatten(1)


def _attend_expanded(
    q_nope: Tensor,
    q_pe: Tensor,
    pool: Tensor,
    weights: LatentWeights,
    metadata: AttentionMetadata,
    row: int,
    options: AttentionOptions,
) -> Tensor:
    """Compute one row of C tokens expanded, several heads at a time. Return its output [C, H * V]."""
    start, end = metadata.starts_host[row], metadata.starts_host[row] + len(q_nope)
    pages = metadata.page_table[row, : -(-end // metadata.page_size)].long()
    cached = gather_row(pool, pages, q_nope.dtype)[0, :end]  # [S, R + P]
    rank = cached.shape[1] - q_pe.shape[2]
    latent, k_pe = cached[:, :rank], cached[:, rank:]
    query = torch.cat((q_nope, q_pe), dim=-1).transpose(0, 1)  # [H, C, N + P]
    head_dim = max(query.shape[2], weights.value_dim)
    scoring = Scoring(options.scale, None, None)
    results = []
    for heads in torch.arange(len(query)).split(max(1, MAX_EXPANDED_ELEMENTS // (2 * head_dim * end))):
        head_range = slice(int(heads[0]), int(heads[-1]) + 1)
        keys = torch.cat((latent @ weights.expanding[head_range], k_pe.expand(len(heads), -1, -1)), dim=-1)
        values = latent @ weights.values[head_range]
        # torch's fast attention needs equal head dimensions of queries, keys and values.
        q, k, v = (F.pad(x, (0, head_dim - x.shape[2])).unsqueeze(0) for x in (query[head_range], keys, values))
        attended = attend_gathered_row(q, k, v, start, 0, None, scoring)
        results.append(attended[0, :, :, : weights.value_dim])
    return torch.cat(results).transpose(0, 1).flatten(1)
