"""Alternatives to drafts: rows that continue a sequence after some of its drafts with other ids.

A row with drafts is the *trunk*. A branch is a row of its own, with its own pages for the positions that it computes:
every attention kernel computes it like any other row, and its tokens are exactly those of plain decoding. If the model
rejects the trunk's draft and chooses the branch's first id, the worker takes the branch's tokens, and copies their keys
and values to the pages of the sequence. The pages of a branch are free again when the batch is built, because later
steps run later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from runtime.batch import PageCopy
from runtime.kv_cache.prefix_cache import PrefixCache
from runtime.scheduler.sampling import is_penalised
from runtime.sequence import Sequence


class Branch(NamedTuple):
    """One branch of a sequence's drafts."""

    depth: int  # number of the draft (from 1) that its first id replaces
    ids: list[int]
    first_page: int  # index into the row's pages of its first own page
    pages: list[int]


def branches_of(
    proposed: Mapping[Sequence, list[int]], cache: PrefixCache, max_tokens: int, num_running: int
) -> dict[Sequence, list[Branch]]:
    """Return the branches of these sequences with drafts, whose rows are not added yet, with allocated pages.

    They have at most `max_tokens` ids together, and leave one page for each running sequence. Sequences with a
    constraint or penalties have none, because these depend on the tokens before each position of a row.
    """
    found: dict[Sequence, list[Branch]] = {}
    size = cache.page_size
    for sequence, trunk in proposed.items():
        drafter = sequence.drafter
        if drafter is None or sequence.constraint is not None or is_penalised(sequence):
            continue
        for depth, ids in drafter.alternatives(trunk):
            first = sequence.num_computed + depth  # position of the branch's first id
            num_pages = (first + len(ids) - 1) // size - first // size + 1
            max_tokens -= len(ids)
            if max_tokens < 0 or cache.num_available - num_running < num_pages:
                return found
            branch = Branch(depth, ids, first // size, cache.allocate(num_pages))
            found.setdefault(sequence, []).append(branch)
    return found


def page_copies(starts: Mapping[Sequence, int], branches: Mapping[Sequence, list[Branch]], size: int) -> list[PageCopy]:
    """Return the copy that brings the tokens before the rows into the first own page of each branch.

    `starts` are the first positions of the sequences' rows.
    """
    sources, targets = [], []
    for sequence, own in branches.items():
        for branch in own:
            if branch.first_page * size < starts[sequence]:
                sources.append(sequence.pages[branch.first_page])
                targets.append(branch.pages[0])
    if not sources:
        return []
    return [PageCopy("device", "device", np.array(sources, np.int32), np.array(targets, np.int32))]
