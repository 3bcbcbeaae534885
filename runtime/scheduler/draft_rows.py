"""The rows of a batch that have draft tokens, and the rows of their branches."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from runtime.batch import Branches, Drafts, Ints, PageCopy
from runtime.constraint import DraftData
from runtime.sequence import Branch, Sequence
from runtime.speculative.model_drafts import DRAFT


class DraftRows:
    """The draft tokens and branches of a batch's rows, by row index."""

    __slots__ = ("_branches", "_counts", "data")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}  # row -> number of proposed tokens
        self._branches: dict[int, tuple[int, Branch]] = {}  # row of the branch -> (row of its trunk, branch)
        # Row -> data for the masks after its draft tokens; only for rows with a constraint.
        self.data: dict[int, DraftData] = {}

    def add(self, row: int, sequence: Sequence, ids: list[int]) -> None:
        """Add a row that computes the sequence's next position and the proposed tokens."""
        self._counts[row] = len(ids)
        constraint = sequence.constraint
        if constraint is not None:
            num_output = sequence.num_computed + 1 - sequence.num_prompt
            data = constraint.drafts_after(num_output, sequence.ids, sequence.num_prompt, len(ids))
            if DRAFT not in ids:  # if they are placeholders, the worker proposes the tokens
                data.propose(ids)
            self.data[row] = data

    def add_branch(self, row: int, owner: int, branch: Branch) -> None:
        """Record that row `row` is a branch of the trunk in row `owner`."""
        self._branches[row] = owner, branch

    def write_pages(self, page_table: Ints) -> None:
        """Write the branches' own pages into their rows of the batch's page table."""
        for row, (_, branch) in self._branches.items():
            page_table[row, branch.first_page :] = 0
            page_table[row, branch.first_page : branch.first_page + len(branch.pages)] = branch.pages

    def page_copies(self, sequences: Seq[Sequence], starts: Seq[int], size: int) -> list[PageCopy]:
        """Return the copies that put the computed tokens before each branch into the branch's first page.

        `sequences` and `starts` are the batch's sequences and the first positions of their rows.
        """
        pairs = [
            (sequences[owner].pages[branch.first_page], branch.pages[0])
            for owner, branch in self._branches.values()
            if branch.first_page * size < starts[owner]
        ]
        sources, targets = np.array(pairs, np.int32).reshape(-1, 2).T
        return [PageCopy("device", "device", sources, targets)] if pairs else []

    def spread(self, rows: Ints, counts: Seq[int]) -> tuple[Ints, Ints]:
        """Return two arrays [N] for the N sampled positions: their rows and distances from the row's last position.

        `rows` are the rows that sample. `counts` has the number of tokens of every row.
        """
        num_sampled = np.array(
            [counts[row] if row in self._branches else 1 + self._counts.get(row, 0) for row in rows.tolist()], np.int32
        )
        row_of = np.repeat(rows, num_sampled)
        ends = np.repeat(np.cumsum(num_sampled, dtype=np.int32), num_sampled)
        return row_of, ends - 1 - np.arange(len(row_of), dtype=np.int32)

    def arrays(self) -> Drafts:
        """Return the rows with draft tokens and the branches, as arrays for the batch."""
        rows, counts = (np.array([*each], np.int32) for each in (self._counts, self._counts.values()))
        if not self._branches:
            return Drafts(rows, counts)
        owners = [owner for owner, _ in self._branches.values()]
        depths = [branch.depth for _, branch in self._branches.values()]
        arrays = (np.array(values, np.int32) for values in ([*self._branches], owners, depths))
        return Drafts(rows, counts, Branches(*arrays))
