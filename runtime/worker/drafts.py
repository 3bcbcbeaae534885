"""Verifies draft tokens against the sampled tokens on the device, and computes the lengths of the sequences."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ops.sampling.native import to_device
from runtime.batch import UNKNOWN, Batch, Drafts, Ints, Sampling, uniform_numbers
from runtime.kv_cache.registry import KINDS
from runtime.speculative.model_drafts import DRAFT
from runtime.worker.branches import branch_arrays, is_trunk, take_branches

OF_DRAFTS = ("draft_", "branch_")  # prefixes of the names of the arrays that `verify` reads
# Name of an array of draft tokens -> name of the array with their indices into [T].
PLACES = {
    "draft_ids": "draft_places",
    "branch_ids": "branch_places",
    "drafts_before": "places_before",
    "relaxed_drafts": "relaxed_places",
}


def draft_arrays(batch: Batch) -> dict[str, np.ndarray]:
    """Return the arrays that `verify` and `settle` read, by name.

    The arrays' shapes: R rows of the batch sample, and D of these rows have draft tokens, at most K each.
    """
    sampling, drafts = batch.sampling, batch.drafts
    if sampling is None or drafts is None:
        raise ValueError("No row of this batch has drafts.")
    rows, firsts = np.unique(sampling.row_of, return_index=True)
    kept = is_trunk(batch)[rows]
    rows, firsts = rows[kept], firsts[kept]
    owners = np.searchsorted(rows, drafts.rows)
    offsets = np.arange(int(drafts.counts.max()))
    # Both [D, K]: the index of each draft token in [T], and whether it is a draft token (not padding).
    positions = sampling.positions[firsts[owners]][:, None] + 1 + offsets
    is_draft = offsets < drafts.counts[:, None]
    ids = batch.token_ids[np.minimum(positions, len(batch.token_ids) - 1)]
    return {
        "draft_sequences": batch.sequence_indices[rows].astype(np.int64),  # [R]
        "draft_firsts": firsts.astype(np.int64),  # [R], index into [N] of each row's first sampled position
        "draft_owners": owners.astype(np.int64),  # [D], index into [R] of each row with draft tokens
        # [D, K]; padding is -1, which no token equals. On a GPU, `DeviceDrafter` replaces DRAFT.
        "draft_ids": np.where(is_draft, ids, -1).astype(np.int64),
        "draft_places": np.minimum(positions, len(batch.token_ids) - 1).astype(np.int64),  # [D, K], indices into [T]
        "draft_rows": drafts.rows.astype(np.int64),  # [D], row in the batch
        # [D], number of computed tokens if no draft token is accepted.
        "draft_lengths": batch.starts[drafts.rows] + np.int32(1),
        **branch_arrays(batch, drafts, sampling),
    }


def drafts_before(batch: Batch, drafts: Drafts, sampling: Sampling, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Return, for P of the sampled positions, the draft tokens of the same row before the position, as arrays by name.

    If such a position yields a token, all these draft tokens were accepted, so they are the output since the row began.
    """
    row_of = sampling.row_of[rows]
    firsts = np.searchsorted(sampling.row_of, row_of)
    offsets = rows - firsts
    numbers = np.arange(int(offsets.max()))
    places = sampling.positions[firsts][:, None] + 1 + numbers
    ids = batch.token_ids[np.minimum(places, len(batch.token_ids) - 1)]
    owners = np.searchsorted(drafts.rows, row_of)
    is_drafted = drafts.rows[np.minimum(owners, len(drafts.rows) - 1)] == row_of
    return {
        "draft_offsets": offsets.astype(np.int64),  # [P], number of draft tokens before the position
        # [P], index into [D]; D if the row has no draft tokens.
        "draft_owners": np.where(is_drafted, owners, len(drafts.rows)).astype(np.int64),
        "drafts_before": np.where(numbers < offsets[:, None], ids, -1).astype(np.int64),  # [P, K]
        "places_before": np.minimum(places, len(batch.token_ids) - 1).astype(np.int64),  # [P, K], indices into [T]
    }


def with_drafts(arrays: Mapping[str, Tensor], token_ids: Tensor) -> dict[str, Tensor]:
    """Return a step's arrays by name, with ids from `token_ids` int64 [T] in place of DRAFT."""
    found = dict(arrays)
    for ids, places in PLACES.items():
        if places in found:
            found[ids] = torch.where(found[ids] == DRAFT, token_ids[found[places]], found[ids])
    return found


def with_proposals(batch: Batch, proposed: Batch) -> Batch:
    """Return the batch with the proposed ids of the draft model in place of `DRAFT`.

    `proposed` is the draft model's batch, which also has ids in place of UNKNOWN. In the result UNKNOWN stays, because
    it marks rows whose last token may be invalid. Constraints get the proposed ids, so that they can compute the masks
    after them.
    """
    ids = np.where(batch.token_ids == UNKNOWN, np.int32(UNKNOWN), proposed.token_ids)
    sampling = batch.sampling
    if sampling is not None and sampling.draft_data:
        ends = batch.counts.cumsum()
        for row, data in sampling.draft_data.items():
            if data.ids is None:
                data.propose(ids[ends[row] - len(data.after) : ends[row]].tolist())
    return replace(batch, token_ids=ids)


def proposed_ids(batch: Batch, filled: Batch) -> Ints:
    """Return the ids [n] that `filled`, the result of `with_proposals`, has in place of `DRAFT` in the batch."""
    return filled.token_ids[batch.token_ids == DRAFT]


def with_proposed_ids(batch: Batch, ids: Ints) -> Batch:
    """Return the batch with these ids [n] in place of `DRAFT`, in order (see `with_proposals`)."""
    token_ids = batch.token_ids.copy()
    token_ids[token_ids == DRAFT] = ids
    return with_proposals(batch, replace(batch, token_ids=token_ids))


def accept_limits(batch: Batch, late: Collection[int]) -> np.ndarray | None:
    """Return the number of draft tokens that each row may accept at most, int64 [D], or None if there is no limit.

    `late` are the sampled positions (of N) whose `HostData` is missing. With the limits, each row's last output token
    comes from a position before the row's first late position.
    """
    sampling, drafts = batch.sampling, batch.drafts
    if not late or sampling is None or drafts is None:
        return None
    limits = drafts.counts.astype(np.int64)
    firsts = np.searchsorted(sampling.row_of, drafts.rows)
    owners = {row: owner for owner, row in enumerate(drafts.rows.tolist())}
    for index in late:
        owner = owners.get(int(sampling.row_of[index]))
        if owner is not None:
            limits[owner] = min(limits[owner], max(index - int(firsts[owner]) - 1, 0))
    return limits


class Verified(NamedTuple):
    """The result of verifying draft tokens."""

    accepted: Tensor  # int64 [D], number of accepted draft tokens of each row
    taken: Tensor | None  # int64 [D], the branch that each row continues in, or -1; None: the batch has no branches
    last: Tensor  # int64 [R], each row's last output token, as an index into [N]

    def tensors(self) -> list[Tensor]:
        """Return `accepted` and, if the batch has branches, `taken`."""
        return [self.accepted] if self.taken is None else [self.accepted, self.taken]


def verify(ids: Tensor, arrays: Mapping[str, Tensor], limits: np.ndarray | None = None) -> Verified:
    """Verify draft tokens with the sampled tokens `ids` int64 [N].

    A draft token is accepted if it equals the token sampled at the position before it, and all earlier draft tokens of
    its row are accepted. `limits` [D] are the maximum numbers of draft tokens that rows may accept; None: no limit.
    """
    firsts, owners, drafted = arrays["draft_firsts"], arrays["draft_owners"], arrays["draft_ids"]
    index = firsts[owners, None] + torch.arange(drafted.shape[1], device=ids.device)
    matches = ids[index.clamp(max=len(ids) - 1)] == drafted
    accepted = matches.long().cumprod(1).sum(1)
    if limits is not None:
        accepted = torch.minimum(accepted, to_device(torch.from_numpy(limits), ids.device))
    last = firsts.index_add(0, owners, accepted)
    if "branch_owners" in arrays:
        return Verified(*take_branches(ids, arrays, accepted, last))
    return Verified(accepted, None, last)


def settle(
    ids: Tensor,
    arrays: Mapping[str, Tensor],
    last_tokens: Tensor,
    lengths: Tensor,
    limits: np.ndarray | None = None,
) -> Verified:
    """Verify draft tokens (see `verify`), and write to two tables by sequence index.

    `last_tokens` gets the last token of every row that samples, and `lengths` gets the number of computed tokens of
    every row with draft tokens.
    """
    found, sequences = verify(ids, arrays, limits), arrays["draft_sequences"]
    last_tokens[sequences] = ids[found.last]
    lengths[sequences[arrays["draft_owners"]]] = arrays["draft_lengths"] + found.accepted.to(lengths.dtype)
    return found


def with_exact_starts(batch: Batch, lengths: Tensor) -> Batch:
    """Return the batch with exact starts: each unknown start is replaced by the value in `lengths`.

    `lengths` is int32 by sequence index, in host memory.
    """
    if batch.unknown_starts is None:
        return batch
    known = lengths.numpy()[batch.sequence_indices]
    starts, sampling = np.where(batch.unknown_starts, known, batch.starts), batch.sampling
    rejected = batch.starts - starts
    kinds = {kind: {**arrays, **KINDS[kind].with_starts(arrays, rejected)} for kind, arrays in batch.kinds.items()}
    if sampling is not None and sampling.draws is not None:
        seeds, bounds = sampling.draws
        positions = bounds - rejected[sampling.row_of]
        sampling = replace(sampling, uniform=uniform_numbers(seeds, positions), draws=None)
    return replace(batch, starts=starts, sampling=sampling, kinds=kinds, unknown_starts=None)
