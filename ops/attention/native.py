"""Attention in torch: the reference in tests, and the fallback on every device.

Single-token rows are gathered into padded groups and computed together. Longer rows are computed one by one, in blocks
of queries, so that masks and score matrices do not grow with the square of the context.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.attention import Attend, AttentionMetadata, AttentionOptions

MAX_PADDING = 0.25  # maximum share of padding in a group's gathered keys; with more, two groups are faster
MAX_GROUP_BYTES = 32 * 2**20  # maximum size of a group's gathered keys; larger groups would exceed the CPU's caches
MAX_MASK_ELEMENTS = 2**22
MAX_SCORE_ELEMENTS = 2**25


class Group(NamedTuple):
    """N single-token rows that are computed together. S keys are gathered for each row, and padding is masked."""

    tokens: Tensor | None  # int64 [N], indices of the rows' tokens in the flat batch; None: the whole batch
    pages: Tensor  # int64, flattened [N, K, pages per row], index into the pool viewed as [P * K, page, D]
    keys: slice  # gathered keys that are used: if N is 1, those to which the row attends; otherwise all
    padding: tuple[Tensor, Tensor] | None  # int64 (row, key) indices of padding
    mask: Tensor | None  # [N, 1, 1, S], 0 or -inf; None without padding
    own_keys: list[int]  # index of each row's own position in the gathered keys


class Window(NamedTuple):
    """Positions to which a token attends: the last `size` positions or, if `chunked`, its chunk of `size` positions."""

    size: int
    chunked: bool

    def first_key(self, position: int) -> int:
        return position - position % self.size if self.chunked else max(0, position - self.size + 1)

    def hides(self, keys: Tensor, queries: Tensor) -> Tensor:
        """Return whether each key is before the window of each query. The arguments are positions, and broadcast."""
        first = queries - queries % self.size if self.chunked else queries - self.size + 1
        return keys < first


class Scoring(NamedTuple):
    """Parameters that turn products of queries and keys into scores. G = H / K is the number of heads per kv head."""

    scale: float
    soft_cap: float | None
    sinks: Tensor | None  # float32 [K, G]
    slopes: Tensor | None = None  # float32 [K, G]
    bias: Tensor | None = None  # float32 [X, K, N, S], added to scores; derived from the slopes

    @property
    def is_plain(self) -> bool:
        return self.soft_cap is None and self.sinks is None and self.slopes is None


Dense = Callable[[Tensor, Tensor, Tensor, Tensor | None, Scoring], Tensor]  # the signature of `dense` below


def attend(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    attend_gathered: Dense | None = None,
) -> Tensor:
    """Compute attention of every row over its pages (see `ops.attention`).

    If `attend_gathered` is given, it replaces `dense` for single-token rows, whose keys are gathered first.
    """
    attend_gathered = attend_gathered or dense
    window = None if options.window is None else Window(options.window, options.chunked)
    out = torch.empty_like(q)
    by_kv_head = [None if each is None else each.view(k_pool.shape[1], -1) for each in (options.sinks, options.slopes)]
    scoring = Scoring(options.scale * options.k_scale, options.soft_cap, *by_kv_head)
    for group in _groups(q, k_pool, metadata, window):
        if group.tokens is None:
            out = _attend_group(q, k_pool, v_pool, group, attend_gathered, scoring)
            break
        queries = q.index_select(0, group.tokens)
        attended = _attend_group(queries, k_pool, v_pool, group, attend_gathered, scoring)
        out.index_copy_(0, group.tokens, attended)
    first = 0
    for row, count in enumerate(metadata.counts_host):
        if 1 < count < (options.below or sys.maxsize):
            tokens = slice(first, first + count)
            out[tokens] = _attend_row(q[tokens], k_pool, v_pool, metadata, row, window, scoring)
        first += count
    return out if options.v_scale == 1.0 else out.mul_(options.v_scale)


def attend_mutually(
    out: Tensor, q: Tensor, k_pool: Tensor, v_pool: Tensor, metadata: AttentionMetadata, options: AttentionOptions
) -> None:
    """Recompute rows with mutual spans, so that each token of a span attends to the whole span.

    The results replace these rows in `out` [T, H, D]. A sliding window still hides earlier positions. Sinks and ALiBi
    are not supported.
    """
    window = None if options.window is None else Window(options.window, options.chunked)
    scoring = Scoring(options.scale * options.k_scale, options.soft_cap, None)
    size, firsts = metadata.page_size, [0]
    for count in metadata.counts_host:
        firsts.append(firsts[-1] + count)
    for row in sorted({row for row, _, _ in metadata.mutual_spans}):
        start, count = metadata.starts_host[row], metadata.counts_host[row]
        spans = [(low, high) for each, low, high in metadata.mutual_spans if each == row]
        tokens, end = slice(firsts[row], firsts[row] + count), start + count
        pages = metadata.page_table[row, : -(-end // size)].long()
        keys, values = (gather_row(pool, pages, q.dtype)[None, :, :end] for pool in (k_pool, v_pool))
        queries = q[tokens].view(count, k_pool.shape[1], -1, q.shape[2]).permute(2, 1, 0, 3)  # [G, K, N, D]
        block = max(16, MAX_MASK_ELEMENTS // end)
        results = []
        for low in range(0, count, block):
            high = min(low + block, count)
            mask = _mutual_mask(start + low, start + high, end, spans, window, q)
            # Pages before the window may have been reused, so their values may be NaN.
            results.append(dense(queries[:, :, low:high], keys, values.nan_to_num(), mask, scoring))
        attended = torch.cat(results, dim=2).permute(2, 1, 0, 3).reshape(count, *q.shape[1:])
        out[tokens] = attended if options.v_scale == 1.0 else attended * options.v_scale


def _mutual_mask(
    first: int, end: int, num_keys: int, spans: Sequence[tuple[int, int]], window: Window | None, like: Tensor
) -> Tensor:
    """Return the mask [N, S], 0 or -inf, of queries first .. end - 1 and keys 0 .. num_keys - 1."""
    queries = torch.arange(first, end, device=like.device).unsqueeze(1)
    keys = torch.arange(num_keys, device=like.device)
    hidden = keys > queries
    for low, high in spans:
        hidden &= ~((queries >= low) & (queries < high) & (keys >= low) & (keys < high))
    if window is not None:
        hidden |= window.hides(keys, queries)
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, -torch.inf)


def make_attend() -> Attend:
    """Return `attend`. It has no settings."""
    return attend


def _attend_group(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, group: Group, attend_gathered: Dense, scoring: Scoring
) -> Tensor:
    """Return the attention [N, H, D] of one group's queries [N, H, D]."""
    num_rows, (_, num_kv_heads, _, head_dim) = len(q), k_pool.shape
    keys, values = (
        _take(pool.flatten(0, 1), group.pages, q.dtype).view(num_rows, num_kv_heads, -1, head_dim)
        for pool in (k_pool, v_pool)
    )
    keys, values = keys[:, :, group.keys], values[:, :, group.keys]  # [N, K, S, D]
    if group.padding is not None:
        keys.transpose(1, 2)[group.padding] = 0
        values.transpose(1, 2)[group.padding] = 0
    # The G query heads of a kv head are treated as G queries, so that kv heads need not be repeated.
    queries = q.view(num_rows, num_kv_heads, -1, head_dim)  # [N, K, G, D]
    sinks = scoring.sinks[None, :, :, None] if scoring.sinks is not None else None
    scoring = scoring._replace(sinks=sinks)
    if scoring.slopes is not None:
        num_gathered = len(group.pages) // (num_rows * num_kv_heads) * k_pool.shape[2]
        gathered = torch.arange(num_gathered, device=q.device)[group.keys]
        own = _to_device(torch.tensor(group.own_keys), q.device)
        distance = gathered - own[:, None, None, None]  # [N, 1, 1, S]; later keys are masked
        scoring = scoring._replace(bias=scoring.slopes[:, :, None] * distance)
    result = attend_gathered(queries, keys, values, group.mask, scoring)
    return result.reshape(num_rows, -1, head_dim)


def _attend_row(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    metadata: AttentionMetadata,
    row: int,
    window: Window | None,
    scoring: Scoring,
) -> Tensor:
    """Return the attention [N, H, D] of one row's queries [N, H, D]."""
    (count, num_heads, head_dim), num_kv_heads = q.shape, k_pool.shape[1]
    start, end = metadata.starts_host[row], metadata.starts_host[row] + count
    first_page = _first_key(start, window) // metadata.page_size
    base = first_page * metadata.page_size  # the position of the first gathered key
    pages = metadata.page_table[row, first_page : -(-end // metadata.page_size)].long()
    # [K, S, D]
    keys, values = (gather_row(pool, pages, q.dtype)[:, : end - base] for pool in (k_pool, v_pool))
    keys, values = keys.unsqueeze(0), values.unsqueeze(0)
    # The G query heads of a kv head become the batch dimension, over which keys and values are broadcast.
    queries = q.view(count, num_kv_heads, -1, head_dim).permute(2, 1, 0, 3)  # [G, K, N, D]
    sinks = scoring.sinks.T[:, :, None, None] if scoring.sinks is not None else None
    scoring = scoring._replace(sinks=sinks)
    result = attend_gathered_row(queries, keys, values, start, base, window, scoring)
    return result.permute(2, 1, 0, 3).reshape(count, num_heads, head_dim)


def attend_gathered_row(
    q: Tensor, keys: Tensor, values: Tensor, start: int, base: int, window: Window | None, scoring: Scoring
) -> Tensor:
    """Compute attention of one row's queries [G, K, N, D] over its keys and values [1, K, S, D].

    The queries have the positions start .. start + N - 1, and the first key has the position `base`. The sinks in
    `scoring` broadcast against [G, K, N, 1].
    """
    count, end = q.shape[2], start + q.shape[2]
    if start == 0 and scoring.is_plain and (window is None or window.size >= end):
        keys, values = (x.expand(len(q), -1, -1, -1) for x in (keys, values))
        return F.scaled_dot_product_attention(q, keys, values, is_causal=True, scale=scoring.scale)
    elements = MAX_MASK_ELEMENTS if scoring.is_plain else MAX_SCORE_ELEMENTS // (q.shape[0] * q.shape[1])
    block = max(16, elements // (end - base))
    results = []
    for low in range(0, count, block):
        high = min(low + block, count)
        first_key, last_key = _first_key(start + low, window), start + high
        span = slice(first_key - base, last_key - base)
        mask = _causal_mask(start + low, start + high, first_key, window, q)
        if scoring.slopes is not None:
            distance = _distances(start + low, start + high, first_key, q.device)
            scoring = scoring._replace(bias=scoring.slopes.T[:, :, None, None] * distance)
        results.append(dense(q[:, :, low:high], keys[:, :, span], values[:, :, span], mask, scoring))
    return torch.cat(results, dim=2)


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    """Compute attention of queries [X, K, N, D] over keys and values [X or 1, K, S, D]. `mask` is added to the scores.

    The sinks in `scoring` broadcast against [X, K, N, 1].
    """
    if not scoring.is_plain:
        return _explicit_attention(q, k, v, mask, scoring)
    k, v = (x.expand(len(q), -1, -1, -1) for x in (k, v))  # strides of 0, no copy
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scoring.scale)


def _explicit_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    """Compute `dense` step by step, with features that torch's attention lacks."""
    # Heads that share keys become additional queries of one head, because bmm would copy the keys for each head.
    num_sharing = len(q) // len(k)
    queries = q.unflatten(0, (-1, num_sharing)).transpose(1, 2).flatten(2, 3)  # [X or 1, K, sharing * N, D]
    scores = queries.float() @ k.float().transpose(2, 3)
    if scoring.soft_cap is None:
        scores.mul_(scoring.scale)
    else:
        scores.mul_(scoring.scale / scoring.soft_cap).tanh_().mul_(scoring.soft_cap)
    if scoring.bias is not None:
        bias = scoring.bias.unflatten(0, (-1, num_sharing)).transpose(1, 2)  # [X or 1, K, sharing, N, S]
        scores.unflatten(2, (num_sharing, -1)).add_(bias)
    if mask is not None:
        scores.unflatten(2, (num_sharing, -1)).add_(mask.unsqueeze(-3))
    out = _unfold(scores.softmax(-1).to(v.dtype) @ v, num_sharing)  # [X, K, N, D]
    if scoring.sinks is None:
        return out
    # With exp(sink) as a further term in the denominator, the result is multiplied by sum / (sum + exp(sink)).
    mass = _unfold(scores.logsumexp(-1, keepdim=True), num_sharing)  # [X, K, N, 1]
    return (out * torch.sigmoid(mass - scoring.sinks)).to(out.dtype)


def _unfold(x: Tensor, num_sharing: int) -> Tensor:
    return x.unflatten(2, (num_sharing, -1)).transpose(1, 2).flatten(0, 1)


def gather_row(pool: Tensor, pages: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the keys or values of one row's pages, [K, len(pages) * page, D]."""
    return _take(pool, pages, dtype).transpose(0, 1).flatten(1, 2)


def _take(pool: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of pool[index] in `dtype`. torch can index a float8 pool only as bytes."""
    if pool.dtype.itemsize == 1:
        return pool.view(torch.uint8).index_select(0, index).view(pool.dtype).to(dtype)
    return pool.index_select(0, index).to(dtype)


def _first_key(position: int, window: Window | None) -> int:
    return 0 if window is None else window.first_key(position)


def _causal_mask(first: int, end: int, first_key: int, window: Window | None, like: Tensor) -> Tensor:
    """Return the mask [N, S], 0 or -inf, of queries first .. end - 1 and keys first_key .. end - 1."""
    queries = torch.arange(first, end, device=like.device).unsqueeze(1)
    keys = torch.arange(first_key, end, device=like.device)
    hidden = keys > queries
    if window is not None:
        hidden |= window.hides(keys, queries)
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, -torch.inf)


def _distances(first: int, end: int, first_key: int, device: torch.device) -> Tensor:
    """Return key minus query position [N, S], for queries first .. end - 1 and keys first_key .. end - 1."""
    return torch.arange(first_key, end, device=device) - torch.arange(first, end, device=device).unsqueeze(1)


def _groups(q: Tensor, k_pool: Tensor, metadata: AttentionMetadata, window: Window | None) -> list[Group]:
    """Return the step's single-token rows in groups of similar length. Computed once per step and window."""
    key = (__name__, window, q.dtype, tuple(k_pool.shape))
    if key not in metadata.plan_cache:
        page_bytes = k_pool[0].numel() * k_pool.element_size()
        metadata.plan_cache[key] = [
            _group(sorted(rows), q, k_pool.shape[1], metadata, window)
            for rows in split_rows(_pages_needed(metadata, window), MAX_GROUP_BYTES // page_bytes)
        ]
    return metadata.plan_cache[key]


def _pages_needed(metadata: AttentionMetadata, window: Window | None) -> list[tuple[int, int]]:
    """Return (number of pages to gather, row) of each single-token row."""
    size = metadata.page_size
    return [
        (start // size - _first_key(start, window) // size + 1, row)
        for row, (start, count) in enumerate(zip(metadata.starts_host, metadata.counts_host))
        if count == 1
    ]


def split_rows(lengths: Sequence[tuple[int, int]], max_pages: int) -> list[list[int]]:
    """Divide rows, given as (number of pages, row), into groups of at most `max_pages` pages, padding included.

    At most the share MAX_PADDING of a group's pages is padding.
    """
    groups: list[list[int]] = []
    longest = total = 0
    for length, row in sorted(lengths, reverse=True):
        padded = longest * (len(groups[-1]) + 1) if groups else 0
        if not groups or padded > max_pages or padded - total - length > MAX_PADDING * padded:
            groups.append([])
            longest, total = length, 0
        groups[-1].append(row)
        total += length
    return groups


def _group(rows: list[int], q: Tensor, num_kv_heads: int, metadata: AttentionMetadata, window: Window | None) -> Group:
    size, device = metadata.page_size, q.device
    first_tokens = [0]
    for count in metadata.counts_host:
        first_tokens.append(first_tokens[-1] + count)
    starts = [metadata.starts_host[row] for row in rows]
    first_pages = [_first_key(start, window) // size for start in starts]
    num_pages = max(start // size - page + 1 for start, page in zip(starts, first_pages))
    tokens = [first_tokens[row] for row in rows]
    index = _to_device(torch.tensor([rows, starts, first_pages, tokens]), device)

    columns = index[2].unsqueeze(1) + torch.arange(num_pages, device=device)
    # Shorter rows gather more pages than they need, and these columns may exceed the table. Their keys are padding.
    columns = columns.clamp_(max=metadata.page_table.shape[1] - 1)
    pages = metadata.page_table[index[0].unsqueeze(1), columns].long()  # [N, pages]
    heads = torch.arange(num_kv_heads, device=device).view(1, -1, 1)
    pages = (pages.unsqueeze(1) * num_kv_heads + heads).flatten()  # [N, K, pages]

    first_keys = [_first_key(start, window) - page * size for start, page in zip(starts, first_pages)]
    last_keys = [start - page * size for start, page in zip(starts, first_pages)]
    whole = len(rows) == len(metadata.counts_host)
    tokens = None if whole else index[3]
    if len(rows) == 1:
        return Group(tokens, pages, slice(first_keys[0], last_keys[0] + 1), None, None, last_keys)
    return Group(tokens, pages, slice(None), *_padding(first_keys, last_keys, num_pages * size, q), last_keys)


def _padding(
    first_keys: Sequence[int], last_keys: Sequence[int], num_keys: int, q: Tensor
) -> tuple[tuple[Tensor, Tensor] | None, Tensor | None]:
    """Return `Group.padding` and `Group.mask` of rows that read the gathered keys first_keys[i] .. last_keys[i]."""
    offsets = torch.arange(num_keys)
    first, last = torch.tensor([first_keys, last_keys]).unsqueeze(2)
    hidden = (offsets < first) | (offsets > last)  # [N, S] on the host
    if not bool(hidden.any()):
        return None, None
    rows, keys = (_to_device(index, q.device) for index in hidden.nonzero(as_tuple=True))
    mask = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, -torch.inf)
    return (rows, keys), _to_device(mask, q.device)[:, None, None, :]


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device without waiting for it."""
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
