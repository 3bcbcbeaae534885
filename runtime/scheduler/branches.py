"""Branches: alternatives to a sequence's draft tokens, computed in additional rows.

A row with draft tokens is the *trunk*. A *branch* is another row of the same sequence. It shares the first draft tokens
of the trunk and then has other tokens. It has its own pages for the positions that it computes, so attention kernels
compute it like any other row, and its tokens are the same as without draft tokens.

If the model rejects a draft token of the trunk and samples the branch's first token instead, the worker accepts tokens
of the branch, and copies their keys and values to the sequence's pages. The pages of a branch are freed as soon as the
batch is built, because later batches run after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from runtime.batch import PageCopy
from runtime.kv_cache.prefix_cache import PrefixCache
from runtime.scheduler.sampling import is_penalised
from runtime.sequence import Sequence


class Branch(NamedTuple):
    """One branch of a sequence's draft tokens."""

    depth: int  # number (from 1) of the trunk's draft token that the branch's first token replaces
    ids: list[int]
    first_page: int  # index of the branch's first own page in the row's page list
    pages: list[int]


def branches_of(
    proposed: Mapping[Sequence, list[int]], cache: PrefixCache, max_tokens: int, num_running: int
) -> dict[Sequence, list[Branch]]:
    """Return branches for sequences whose rows with draft tokens will be added next, and allocate the branches' pages.

    All branches together have at most `max_tokens` tokens, and leave one free page for each running sequence. Sequences
    with a constraint or penalties get no branches, because both depend on the tokens before each position of a row.
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


def page_copies(branches: Iterable[tuple[Sequence, int, Branch]], size: int) -> list[PageCopy]:
    """Return the page copies after which each branch's first page has the tokens before the branch.

    Each branch comes with its sequence and with the first position of the sequence's row.
    """
    sources, targets = [], []
    for sequence, start, branch in branches:
        if branch.first_page * size < start:
            sources.append(sequence.pages[branch.first_page])
            targets.append(branch.pages[0])
    if not sources:
        return []
    return [PageCopy("device", "device", np.array(sources, np.int32), np.array(targets, np.int32))]
