"""Attention in plain torch: the truth in tests, and what a CPU runs.

Single-token rows are gathered into padded groups and attended together; longer rows are attended one by one,
in blocks of queries, so that no mask and no score matrix grows with the square of the context.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.attention import Attend, AttentionMetadata, AttentionOptions

MAX_PADDING = 0.25  # of a group's gathered tokens; more than that is slower than another group
MAX_GROUP_BYTES = 32 * 2**20  # gathered keys; beyond it a group falls out of the CPU's caches
MAX_MASK_ELEMENTS = 2**22
MAX_SCORE_ELEMENTS = 2**25


class Group(NamedTuple):
    """N single-token rows that are attended together: keys gathered to one length S, the rest masked."""

    tokens: Tensor | None  # int64 [N], index into the flat batch; None: they are the whole batch
    pages: Tensor  # int64, index into the pool seen as [P * K, page, D], equally many for each row and head
    keys: slice  # of what is gathered: a row alone is cut to what it reads, others stay in one piece for products
    padding: tuple[Tensor, Tensor] | None  # int64 (row, key) of those that are nobody's to read
    mask: Tensor | None  # [N, 1, 1, S], 0 or -inf; None where nothing is padded
    own_keys: list[int]  # which of the gathered keys is each row's own


class Sight(NamedTuple):
    """How far back a token attends: over the last so many positions, or where `chunked` those of its own chunk."""

    window: int
    chunked: bool

    def first_key(self, position: int) -> int:
        return position - position % self.window if self.chunked else max(0, position - self.window + 1)

    def hides(self, keys: Tensor, queries: Tensor) -> Tensor:
        """Which keys are too far back for which queries; positions that broadcast."""
        first = queries - queries % self.window if self.chunked else queries - self.window + 1
        return keys < first


class Scoring(NamedTuple):
    """What becomes of the products of queries and keys."""

    scale: float
    soft_cap: float | None
    sinks: Tensor | None  # float32 [K, G]
    slopes: Tensor | None = None  # float32 [K, G]
    bias: Tensor | None = None  # float32 [X, K, N, S], added to scores: what the slopes give

    @property
    def is_plain(self) -> bool:
        return self.soft_cap is None and self.sinks is None and self.slopes is None


Dense = Callable[[Tensor, Tensor, Tensor, Tensor | None, Scoring], Tensor]  # like `dense` below


def attend(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    attend_gathered: Dense | None = None,
) -> Tensor:
    """Attention of every row over its pages (see `ops.attention`).

    `attend_gathered` computes the attention of single-token rows once their keys are gathered, in place of `dense`.
    """
    attend_gathered = attend_gathered or dense
    sight = None if options.window is None else Sight(options.window, options.chunked)
    out = torch.empty_like(q)
    by_kv_head = [
        None if each is None else each.view(k_pool.shape[1], -1) for each in (options.sinks, options.slopes)
    ]
    scoring = Scoring(options.scale * options.k_scale, options.soft_cap, *by_kv_head)
    for group in _groups(q, k_pool, metadata, sight):
        if group.tokens is None:
            out = _attend_group(q, k_pool, v_pool, group, attend_gathered, scoring)
            break
        queries = q.index_select(0, group.tokens)
        found = _attend_group(queries, k_pool, v_pool, group, attend_gathered, scoring)
        out.index_copy_(0, group.tokens, found)
    first = 0
    for row, count in enumerate(metadata.counts_host):
        if 1 < count < (options.below or sys.maxsize):
            tokens = slice(first, first + count)
            out[tokens] = _attend_row(q[tokens], k_pool, v_pool, metadata, row, sight, scoring)
        first += count
    return out if options.v_scale == 1.0 else out.mul_(options.v_scale)


def make_attend() -> Attend:
    """`attend` itself: there is nothing to set."""
    return attend


def _attend_group(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, group: Group, attend_gathered: Dense, scoring: Scoring
) -> Tensor:
    """Attention of one group's [N, H, D] queries -> [N, H, D]."""
    num_rows, (_, num_kv_heads, _, head_dim) = len(q), k_pool.shape
    keys, values = (
        _take(pool.flatten(0, 1), group.pages, q.dtype).view(num_rows, num_kv_heads, -1, head_dim)
        for pool in (k_pool, v_pool)
    )
    keys, values = keys[:, :, group.keys], values[:, :, group.keys]  # [N, K, S, D]
    if group.padding is not None:
        keys.transpose(1, 2)[group.padding] = 0
        values.transpose(1, 2)[group.padding] = 0
    # The query group takes the place of the query length: no head is expanded.
    queries = q.view(num_rows, num_kv_heads, -1, head_dim)  # [N, K, G, D]
    sinks = scoring.sinks[None, :, :, None] if scoring.sinks is not None else None
    scoring = scoring._replace(sinks=sinks)
    if scoring.slopes is not None:
        num_gathered = len(group.pages) // (num_rows * num_kv_heads) * k_pool.shape[2]
        gathered = torch.arange(num_gathered, device=q.device)[group.keys]
        own = _to_device(torch.tensor(group.own_keys), q.device)
        distance = gathered - own[:, None, None, None]  # [N, 1, 1, S], of later keys nothing is seen
        scoring = scoring._replace(bias=scoring.slopes[:, :, None] * distance)
    result = attend_gathered(queries, keys, values, group.mask, scoring)
    return result.reshape(num_rows, -1, head_dim)


def _attend_row(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    metadata: AttentionMetadata,
    row: int,
    sight: Sight | None,
    scoring: Scoring,
) -> Tensor:
    """Attention of one row's [N, H, D] queries -> [N, H, D]."""
    (count, num_heads, head_dim), num_kv_heads = q.shape, k_pool.shape[1]
    start, end = metadata.starts_host[row], metadata.starts_host[row] + count
    first_page = _first_key(start, sight) // metadata.page_size
    base = first_page * metadata.page_size  # the position of the first gathered key
    pages = metadata.page_table[row, first_page : -(-end // metadata.page_size)].long()
    # [K, S, D]
    keys, values = (gather_row(pool, pages, q.dtype)[:, : end - base] for pool in (k_pool, v_pool))
    keys, values = keys.unsqueeze(0), values.unsqueeze(0)
    # The query group takes the place of the batch: keys and values are shared along it.
    queries = q.view(count, num_kv_heads, -1, head_dim).permute(2, 1, 0, 3)  # [G, K, N, D]
    sinks = scoring.sinks.T[:, :, None, None] if scoring.sinks is not None else None
    scoring = scoring._replace(sinks=sinks)
    result = attend_gathered_row(queries, keys, values, start, base, sight, scoring)
    return result.permute(2, 1, 0, 3).reshape(count, num_heads, head_dim)


def attend_gathered_row(
    q: Tensor, keys: Tensor, values: Tensor, start: int, base: int, sight: Sight | None, scoring: Scoring
) -> Tensor:
    """[G, K, N, D] queries from position `start` on, over one row's [1, K, S, D] keys and values from `base` on.

    The sinks in `scoring` broadcast against [G, K, N, 1].
    """
    count, end = q.shape[2], start + q.shape[2]
    if start == 0 and scoring.is_plain and (sight is None or sight.window >= end):
        keys, values = (x.expand(len(q), -1, -1, -1) for x in (keys, values))
        return F.scaled_dot_product_attention(q, keys, values, is_causal=True, scale=scoring.scale)
    elements = MAX_MASK_ELEMENTS if scoring.is_plain else MAX_SCORE_ELEMENTS // (q.shape[0] * q.shape[1])
    block = max(16, elements // (end - base))
    results = []
    for low in range(0, count, block):
        high = min(low + block, count)
        first_key, last_key = _first_key(start + low, sight), start + high
        span = slice(first_key - base, last_key - base)
        mask = _causal_mask(start + low, start + high, first_key, sight, q)
        if scoring.slopes is not None:
            distance = _distances(start + low, start + high, first_key, q.device)
            scoring = scoring._replace(bias=scoring.slopes.T[:, :, None, None] * distance)
        results.append(dense(q[:, :, low:high], keys[:, :, span], values[:, :, span], mask, scoring))
    return torch.cat(results, dim=2)


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    """[X, K, N, D] queries over [X or 1, K, S, D] keys and values; `mask` is added to the scores.

    The sinks in `scoring` broadcast against [X, K, N, 1].
    """
    if not scoring.is_plain:
        return _explicit_attention(q, k, v, mask, scoring)
    k, v = (x.expand(len(q), -1, -1, -1) for x in (k, v))  # strides of 0, no copy
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scoring.scale)


def _explicit_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    """The same step by step, for what torch's own attention does not know."""
    num_sharing = len(q) // len(k)  # folded into the query length: a product would copy shared keys
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
    # A further term e^sink in the denominator multiplies the result by sum / (sum + e^sink).
    mass = _unfold(scores.logsumexp(-1, keepdim=True), num_sharing)  # [X, K, N, 1]
    return (out * torch.sigmoid(mass - scoring.sinks)).to(out.dtype)


def _unfold(x: Tensor, num_sharing: int) -> Tensor:
    return x.unflatten(2, (num_sharing, -1)).transpose(1, 2).flatten(0, 1)


def gather_row(pool: Tensor, pages: Tensor, dtype: torch.dtype) -> Tensor:
    """[K, len(pages) * page, D] of one row's pages."""
    return _take(pool, pages, dtype).transpose(0, 1).flatten(1, 2)


def _take(pool: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Copies of pool[index] in `dtype`; torch itself can only index the bytes of a float8 pool."""
    if pool.dtype.itemsize == 1:
        return pool.view(torch.uint8).index_select(0, index).view(pool.dtype).to(dtype)
    return pool.index_select(0, index).to(dtype)


def _first_key(position: int, sight: Sight | None) -> int:
    return 0 if sight is None else sight.first_key(position)


def _causal_mask(first: int, end: int, first_key: int, sight: Sight | None, like: Tensor) -> Tensor:
    """[N, S] for the queries first .. end - 1 over the keys first_key .. end - 1: 0 or -inf."""
    queries = torch.arange(first, end, device=like.device).unsqueeze(1)
    keys = torch.arange(first_key, end, device=like.device)
    hidden = keys > queries
    if sight is not None:
        hidden |= sight.hides(keys, queries)
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, -torch.inf)


def _distances(first: int, end: int, first_key: int, device: torch.device) -> Tensor:
    """[N, S] from the queries first .. end - 1 to the keys first_key .. end - 1, below 0 for earlier ones."""
    return torch.arange(first_key, end, device=device) - torch.arange(first, end, device=device).unsqueeze(1)


def _groups(q: Tensor, k_pool: Tensor, metadata: AttentionMetadata, sight: Sight | None) -> list[Group]:
    """The step's single-token rows in groups of similar length, derived once per step and sight."""
    key = (__name__, sight, q.dtype, tuple(k_pool.shape))
    if key not in metadata.plan_cache:
        page_bytes = k_pool[0].numel() * k_pool.element_size()
        metadata.plan_cache[key] = [
            _group(sorted(rows), q, k_pool.shape[1], metadata, sight)
            for rows in split_rows(_pages_needed(metadata, sight), MAX_GROUP_BYTES // page_bytes)
        ]
    return metadata.plan_cache[key]


def _pages_needed(metadata: AttentionMetadata, sight: Sight | None) -> list[tuple[int, int]]:
    """(pages to gather, row) of every single-token row."""
    size = metadata.page_size
    return [
        (start // size - _first_key(start, sight) // size + 1, row)
        for row, (start, count) in enumerate(zip(metadata.starts_host, metadata.counts_host))
        if count == 1
    ]


def split_rows(lengths: Sequence[tuple[int, int]], max_pages: int) -> list[list[int]]:
    """Rows sorted by length and cut where padding or size would grow too large. Takes (length, row) pairs."""
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


def _group(
    rows: list[int], q: Tensor, num_kv_heads: int, metadata: AttentionMetadata, sight: Sight | None
) -> Group:
    size, device = metadata.page_size, q.device
    first_tokens = [0]
    for count in metadata.counts_host:
        first_tokens.append(first_tokens[-1] + count)
    starts = [metadata.starts_host[row] for row in rows]
    first_pages = [_first_key(start, sight) // size for start in starts]
    num_pages = max(start // size - page + 1 for start, page in zip(starts, first_pages))
    tokens = [first_tokens[row] for row in rows]
    index = _to_device(torch.tensor([rows, starts, first_pages, tokens]), device)

    columns = index[2].unsqueeze(1) + torch.arange(num_pages, device=device)
    # A shorter row's surplus columns may lie beyond the table; what they gather is overwritten as padding.
    columns = columns.clamp_(max=metadata.page_table.shape[1] - 1)
    pages = metadata.page_table[index[0].unsqueeze(1), columns].long()  # [N, pages]
    heads = torch.arange(num_kv_heads, device=device).view(1, -1, 1)
    pages = (pages.unsqueeze(1) * num_kv_heads + heads).flatten()  # [N, K, pages]

    first_keys = [_first_key(start, sight) - page * size for start, page in zip(starts, first_pages)]
    last_keys = [start - page * size for start, page in zip(starts, first_pages)]
    whole = len(rows) == len(metadata.counts_host)
    tokens = None if whole else index[3]
    if len(rows) == 1:
        return Group(tokens, pages, slice(first_keys[0], last_keys[0] + 1), None, None, last_keys)
    return Group(tokens, pages, slice(None), *_padding(first_keys, last_keys, num_pages * size, q), last_keys)


def _padding(
    first_keys: Sequence[int], last_keys: Sequence[int], num_keys: int, q: Tensor
) -> tuple[tuple[Tensor, Tensor] | None, Tensor | None]:
    """`Group.padding` and `Group.mask` for rows that read the gathered keys first_keys[i] .. last_keys[i]."""
    offsets = torch.arange(num_keys)
    first, last = torch.tensor([first_keys, last_keys]).unsqueeze(2)
    hidden = (offsets < first) | (offsets > last)  # [N, S] on the host
    if not bool(hidden.any()):
        return None, None
    rows, places = (_to_device(index, q.device) for index in hidden.nonzero(as_tuple=True))
    mask = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, -torch.inf)
    return (rows, places), _to_device(mask, q.device)[:, None, None, :]


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy that nobody waits for."""
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
