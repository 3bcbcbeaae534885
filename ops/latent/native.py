"""Latent attention in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.attention import Attend, AttentionMetadata, AttentionOptions
from ops.attention.hybrid import part_of
from ops.attention.native import Scoring, attend_gathered_row, gather_row
from ops.latent import LatentWeights

MAX_EXPANDED_ELEMENTS = 2**24  # keys and values that are there at once, but for those of one head


def prepare_heads(weight: Tensor) -> Tensor:
    """[H, O, I] -> [H, I, O] (see `ops.latent`)."""
    return weight.transpose(1, 2).contiguous()


def join(latent: Tensor, rotated: Tensor) -> Tensor:
    """A token's key (see `ops.latent`)."""
    return torch.cat((latent, rotated), dim=-1).unsqueeze(1)


def attend_latent(
    plain: Tensor,
    turned: Tensor,
    pool: Tensor,
    weights: LatentWeights,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    attend: Attend,
) -> Tensor:
    """Attention of all rows, absorbed or expanded (see `ops.latent`)."""
    counts, least = metadata.counts_host, weights.expand_from
    expanded = [row for row, count in enumerate(counts) if least is not None and count >= least]
    if not expanded:
        return attend_absorbed(plain, turned, pool, weights, metadata, options, attend)
    out = plain.new_empty(len(plain), plain.shape[1] * weights.value_dim)
    if len(expanded) < len(counts):
        key = (__name__, least)
        if key not in metadata.plan_cache:
            metadata.plan_cache[key] = part_of(metadata, sorted({*range(len(counts))} - {*expanded}))
        tokens, others = metadata.plan_cache[key]
        some, of_those = plain.index_select(0, tokens), turned.index_select(0, tokens)
        out.index_copy_(0, tokens, attend_absorbed(some, of_those, pool, weights, others, options, attend))
    for row in expanded:
        first = sum(counts[:row])
        tokens = slice(first, first + counts[row])
        out[tokens] = _attend_expanded(plain[tokens], turned[tokens], pool, weights, metadata, row, options)
    return out


def attend_absorbed(
    plain: Tensor,
    turned: Tensor,
    pool: Tensor,
    weights: LatentWeights,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    attend: Attend,
) -> Tensor:
    """Attention of all rows over the latent vectors themselves."""
    query = absorb(plain, turned, weights.absorbing)
    return expand(attend(query, pool, pool, metadata, options), weights.values)


def absorb(plain: Tensor, turned: Tensor, absorbing: Tensor) -> Tensor:
    """What the cache is asked with [T, H, R + P]: plain[:, h] @ weight[h].T, then what was turned."""
    absorbed = torch.bmm(plain.transpose(0, 1), absorbing).transpose(0, 1)
    return torch.cat((absorbed, turned), dim=-1)


def expand(read: Tensor, values: Tensor) -> Tensor:
    """What heads make of what they read: read[:, h, :R] @ weight[h].T, [T, H * V]."""
    latent = read[..., : values.shape[1]]
    return torch.bmm(latent.transpose(0, 1), values).transpose(0, 1).flatten(1)


def _attend_expanded(
    plain: Tensor,
    turned: Tensor,
    pool: Tensor,
    weights: LatentWeights,
    metadata: AttentionMetadata,
    row: int,
    options: AttentionOptions,
) -> Tensor:
    """Attention [C, H * V] of one row's queries [C, H, N] and [C, H, P], some heads at a time."""
    start, end = metadata.starts_host[row], metadata.starts_host[row] + len(plain)
    pages = metadata.page_table[row, : -(-end // metadata.page_size)].long()
    cached = gather_row(pool, pages, plain.dtype)[0, :end]  # [S, R + P]
    rank = cached.shape[1] - turned.shape[2]
    latent, rotated = cached[:, :rank], cached[:, rank:]
    query = torch.cat((plain, turned), dim=-1).transpose(0, 1)  # [H, C, N + P]
    head_dim = max(query.shape[2], weights.value_dim)
    scoring = Scoring(options.scale, None, None)
    results = []
    for heads in torch.arange(len(query)).split(max(1, MAX_EXPANDED_ELEMENTS // (2 * head_dim * end))):
        some = slice(int(heads[0]), int(heads[-1]) + 1)
        keys = torch.cat((latent @ weights.expanding[some], rotated.expand(len(heads), -1, -1)), dim=-1)
        values = latent @ weights.values[some]
        # Torch's attention wants heads of one size for all, and has a fast way for those only.
        q, k, v = (F.pad(x, (0, head_dim - x.shape[2])).unsqueeze(0) for x in (query[some], keys, values))
        found = attend_gathered_row(q, k, v, start, 0, None, scoring)
        results.append(found[0, :, :, : weights.value_dim])
    return torch.cat(results).transpose(0, 1).flatten(1)
