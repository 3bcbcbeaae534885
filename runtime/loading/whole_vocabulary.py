"""A draft head's copies of the model's embedding and LM head, which are updated with the model's weights."""

from __future__ import annotations

from runtime.loading.staged_weights import StagedWeights
from runtime.loading.token_map import TokenRows
from runtime.mesh.axis import Axis


class WholeVocabulary:
    """Joins the shards of the embedding and the LM head on the ranks of the first pipeline stage.

    Ranks with a draft head have a copy of both if several ranks divide them. With a token map, they have the LM head
    rows of its tokens. The other ranks only take part in `gather`.
    """

    def __init__(self, ranks: Axis, of_head: Axis, copy: StagedWeights | None, rows: TokenRows | None = None) -> None:
        """Create this rank's part. `ranks` divide the embedding, and `of_head` an LM head that is not tied."""
        self._ranks, self._of_head, self._copy, self._rows = ranks, of_head, copy, rows

    def gather(self, own: StagedWeights) -> None:
        """Make the copy and the rows equal to the current shards of all ranks. `own` belongs to this rank's model.

        All ranks must call this method at the same time. Needs memory for the whole tensors on every rank. Raises
        CheckpointError unless `own.reads_vocabulary`.
        """
        rows = self._rows
        if self._ranks.size == self._of_head.size == 1:
            whole = {} if rows is None else {rows.name: own.own_part(rows.name)}
        else:
            whole = {
                name: (self._ranks if name in own.embedding_names else self._of_head).all_reduce(own.own_part(name))
                for name in own.vocabulary_names
            }
        if self._copy is not None:
            self._copy.replace(whole)
        if rows is not None:
            rows.replace(whole[rows.name])
