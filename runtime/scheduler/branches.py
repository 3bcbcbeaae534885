"""Branches: alternatives to a sequence's draft tokens, computed in additional rows.

A row with draft tokens is the *trunk*. A *branch* is another row of the same sequence. It shares the first draft tokens
of the trunk and then has other tokens. It has its own pages for the positions that it computes, so attention kernels
compute it like any other row, and its tokens are the same as without draft tokens.

If the model rejects a draft token of the trunk and samples the branch's first token instead, the worker accepts tokens
of the branch. The branch's pages, which have all tokens from their first position on, then replace those of the trunk
(`Running.take_branch`). Pages that are not used are freed. A sequence with branches is therefore in one step at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from runtime.batch import PageCopy
from runtime.kv_cache.prefix_cache import PrefixCache
from runtime.scheduler.sampling import is_penalised
from runtime.sequence import Branch, Sequence


def add_branches(proposed: Mapping[Sequence, list[int]], cache: PrefixCache, max_tokens: int, num_running: int) -> None:
    """Add branches to sequences whose rows with draft tokens will be added next, and allocate the branches' pages.

    All branches together have at most `max_tokens` tokens, and leave one free page for each running sequence. Sequences
    with a constraint or penalties get no branches, because both depend on the tokens before each position of a row.
    """
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
                return
            sequence.branches.append(Branch(depth, ids, first // size, cache.allocate(num_pages)))


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
