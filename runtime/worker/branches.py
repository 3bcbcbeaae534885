"""Accepts tokens of branches (`sequence.Branch`) after the accepted draft tokens of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from runtime.batch import Batch, Drafts, Ints, PageCopy, Sampling
from runtime.speculative.model_drafts import DRAFT

# For each draft number k: the rows that have a k-th draft token, and the likeliest token ids at its position, [n,
# topk].
Alternatives = Sequence[tuple[Ints, Ints]]


def is_trunk(batch: Batch) -> np.ndarray:
    """Return a mask of the rows that are not branches, bool [B]."""
    found = np.ones(len(batch.counts), np.bool_)
    if batch.drafts is not None and batch.drafts.branches is not None:
        found[batch.drafts.branches.rows] = False
    return found


def trunks(batch: Batch) -> Batch:
    """Return the batch without its branch rows: a draft model does not compute branches."""
    drafts, sampling = batch.drafts, batch.sampling
    if drafts is None or sampling is None or drafts.branches is None:
        return batch
    kept = is_trunk(batch)
    numbers = kept.cumsum(dtype=np.int32) - np.int32(1)  # row -> its row in the result
    tokens = np.repeat(kept, batch.counts)
    places = tokens.cumsum(dtype=np.int32) - np.int32(1)
    sampled = kept[sampling.row_of]
    return replace(
        batch,
        starts=batch.starts[kept],
        counts=batch.counts[kept],
        sequence_indices=batch.sequence_indices[kept],
        token_ids=batch.token_ids[tokens],
        page_table=batch.page_table[kept],
        drafts=Drafts(numbers[drafts.rows], drafts.counts),
        unknown_starts=None if batch.unknown_starts is None else batch.unknown_starts[kept],
        sampling=replace(
            sampling,
            positions=places[sampling.positions[sampled]],
            row_of=numbers[sampling.row_of[sampled]],
            greedy=sampling.greedy[sampled],
            uniform=sampling.uniform[sampled],
            params={name: values[sampled] for name, values in sampling.params.items()},
        ),
    )


def with_branch_ids(batch: Batch, proposed: Batch, alternatives: Alternatives) -> Batch:
    """Return the batch with the draft ids of `proposed`, and with alternatives to them as the tokens of branches.

    `proposed` is the result of `trunks`, after the draft model has filled in its ids.
    """
    if batch.drafts is None or batch.drafts.branches is None:
        return proposed
    kept, ids = is_trunk(batch), batch.token_ids.copy()
    ids[np.repeat(kept, batch.counts)] = proposed.token_ids
    numbers, firsts = kept.cumsum() - 1, batch.counts.cumsum() - batch.counts
    used: dict[tuple[int, int], list[int]] = {}
    for row, owner, depth in zip(*(each.tolist() for each in batch.drafts.branches)):
        if ids[firsts[row]] != DRAFT:  # true if prompt lookup has proposed the branch's ids
            continue
        known = used.setdefault((owner, depth), [int(ids[firsts[owner] + depth])])
        rows, likeliest = alternatives[depth - 1]
        [found] = likeliest[rows == numbers[owner]].tolist()
        known.append(next(token_id for token_id in found if token_id not in known))
        ids[firsts[row]] = known[-1]
    return replace(batch, token_ids=ids)


def branch_arrays(batch: Batch, drafts: Drafts, sampling: Sampling) -> dict[str, np.ndarray]:
    """Return the arrays that describe the batch's M branches, by name; {} if it has none."""
    if drafts.branches is None:
        return {}
    rows, owners, depths = drafts.branches
    firsts, counts = batch.counts.cumsum() - batch.counts, batch.counts[rows]
    offsets = np.arange(int(counts.max()))
    is_id = offsets < counts[:, None]
    places = np.minimum(firsts[rows][:, None] + offsets, len(batch.token_ids) - 1)
    ids = batch.token_ids[places]
    return {
        # [M], trunk of each branch, as an index into [D].
        "branch_owners": np.searchsorted(drafts.rows, owners).astype(np.int64),
        # [M], first sampled position of each branch, as an index into [N].
        "branch_firsts": np.searchsorted(sampling.row_of, rows).astype(np.int64),
        "branch_depths": depths.astype(np.int64),  # [M], number (from 1) of the draft token that the branch replaces
        # [M, K], token ids of each branch, padded with -1. On a GPU, `DeviceDrafter` replaces DRAFT.
        "branch_ids": np.where(is_id, ids, -1).astype(np.int64),
        "branch_places": places.astype(np.int64),  # [M, K], indices of these ids in [T]
        # Indices in [T] of all tokens that are not in a branch.
        "branch_trunks": np.flatnonzero(np.repeat(is_trunk(batch), batch.counts)),
    }


def alternative_arrays(batch: Batch, rows: Ints, counts: Ints) -> dict[int, dict[str, np.ndarray]]:
    """Return, for each draft number k, arrays [A] with the places of the alternatives to the k-th draft tokens.

    `rows` are the rows in `trunks(batch)` for which the draft model proposes, and `counts` their numbers of draft
    tokens. The arrays have, for each alternative: an index into the rows with a k-th draft token ("rows"), the number
    of likelier alternatives to the same draft token ("ranks"), and the index of the branch's first id in [T]
    ("places").
    """
    if batch.drafts is None or batch.drafts.branches is None:
        return {}
    numbers, firsts = is_trunk(batch).cumsum() - 1, batch.counts.cumsum() - batch.counts
    ranks: dict[tuple[int, int], int] = {}
    found: dict[int, list[tuple[int, int, int]]] = {}
    for row, owner, depth in zip(*(each.tolist() for each in batch.drafts.branches)):
        if batch.token_ids[firsts[row]] == DRAFT:  # otherwise prompt lookup has proposed the branch's ids
            rank = ranks[owner, depth] = ranks.get((owner, depth), -1) + 1
            own = int(np.searchsorted(rows[counts >= depth], numbers[owner]))
            found.setdefault(depth, []).append((own, rank, int(firsts[row])))
    return {
        depth: dict(zip(("rows", "ranks", "places"), np.array(entries, np.int64).T)) for depth, entries in found.items()
    }


def choose_alternatives(likeliest: Tensor, drafted: Tensor, ranks: Tensor) -> Tensor:
    """Return the id of each alternative, int64 [A].

    `likeliest` int64 [A, topk] are the likeliest ids at each alternative's position, the likeliest first. `drafted`
    int64 [A] are the draft tokens. An alternative of rank r is entry r of its `likeliest` ids without the draft token.
    """
    is_before = (likeliest == drafted[:, None]).cumsum(1)  # 1 from the place of the draft token on, otherwise 0
    places = ranks[:, None]
    return likeliest.gather(1, places + is_before.gather(1, places)).squeeze(1)


def copies_of_first_pages(batch: Batch, page_size: int) -> list[PageCopy]:
    """Return the copies, in a draft model's KV cache, from the trunk's page to each branch's first page."""
    if batch.drafts is None or batch.drafts.branches is None:
        return []
    rows, owners, _ = batch.drafts.branches
    firsts = batch.starts[rows]
    inside = firsts % page_size != 0
    rows, owners, firsts = rows[inside], owners[inside], firsts[inside] // page_size
    pages = batch.page_table
    return [PageCopy("device", "device", pages[owners, firsts], pages[rows, firsts])] if len(rows) else []


def repeated_tokens(batch: Batch, page_size: int) -> dict[str, np.ndarray]:
    """Return the trunk tokens of this step whose KV must also be stored in a branch's first page.

    These R tokens precede the branch in that page. Returns their indices into [T] and their slots in the branch's page,
    both [R], and their slots in the pages of each cache kind with its own page table.
    """
    if batch.drafts is None or batch.drafts.branches is None:
        return {}
    firsts, found = batch.counts.cumsum() - batch.counts, list[tuple[int, int, int]]()
    for row, owner, depth in zip(*(each.tolist() for each in batch.drafts.branches)):
        begin = int(batch.starts[owner])
        end = begin + depth
        for position in range(max(end // page_size * page_size, begin), end):
            found.append((int(firsts[owner]) + position - begin, row, position))
    if not found:
        return {}
    tokens, rows, positions = np.array(found, np.int64).T

    def slots(page_table: Ints) -> np.ndarray:
        return page_table[rows, positions // page_size].astype(np.int64) * page_size + positions % page_size

    tables = {f"{kind}.": own["page_table"] for kind, own in batch.kinds.items() if "page_table" in own}
    of_tables = {f"{name}repeated_slots": slots(table) for name, table in tables.items()}
    return {"repeated_tokens": tokens, "repeated_slots": slots(batch.page_table), **of_tables}


def copies_in_kinds(batch: Batch, page_size: int) -> list[PageCopy]:
    """Return the copies of computed tokens into the branches' first pages, for cache kinds with their own page table.

    For the pages of the prefix cache, the scheduler adds these copies to the batch.
    """
    if not batch.kinds or batch.drafts is None or batch.drafts.branches is None:
        return []
    rows, owners, _ = batch.drafts.branches
    firsts = batch.starts[rows] // page_size
    used = firsts * page_size < batch.starts[owners]
    rows, owners, firsts = rows[used], owners[used], firsts[used]
    tables = {kind: own["page_table"] for kind, own in batch.kinds.items() if "page_table" in own}
    return [PageCopy(kind, kind, own[owners, firsts], own[rows, firsts]) for kind, own in tables.items() if len(rows)]


def take_branches(
    ids: Tensor, arrays: Mapping[str, Tensor], accepted: Tensor, last: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the number of accepted draft tokens [D], the accepted branch [D] or -1, and each row's last token [R].

    The last tokens are indices into [N]. `ids` int64 [N] are the sampled tokens. `accepted` and `last` are the first
    and third result for rows without branches.
    """
    owners, firsts, branch_ids = (arrays[f"branch_{name}"] for name in ("owners", "firsts", "ids"))
    trunk_last = last[arrays["draft_owners"]]  # [D]
    hit = (ids[trunk_last[owners]] == branch_ids[:, 0]) & (accepted[owners] == arrays["branch_depths"] - 1)
    index = firsts[:, None] + torch.arange(branch_ids.shape[1] - 1, device=ids.device)
    more = (ids[index.clamp(max=len(ids) - 1)] == branch_ids[:, 1:]).long().cumprod(1).sum(1)  # [M]
    numbers = torch.where(hit, torch.arange(len(owners), device=ids.device), -1)
    taken = torch.full_like(accepted, -1).scatter_reduce(0, owners, numbers, "amax")
    is_taken, chosen = taken >= 0, taken.clamp(min=0)
    accepted = torch.where(is_taken, accepted + 1 + more[chosen], accepted)
    own_last = torch.where(is_taken, firsts[chosen] + more[chosen], trunk_last)
    return accepted, taken, last.index_copy(0, arrays["draft_owners"], own_last)
