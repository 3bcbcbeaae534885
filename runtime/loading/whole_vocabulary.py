"""Rank 0's copy of the whole embedding and LM head, for a draft head if tensor-parallel ranks divide them."""

from __future__ import annotations

from runtime.loading.staged_weights import StagedWeights
from runtime.mesh.axis import Axis


class WholeVocabulary:
    """Joins the shards that the ranks of the first pipeline stage have of the embedding and the LM head.

    Rank 0 has the copy. The other ranks only take part in `gather`.
    """

    def __init__(self, ranks: Axis, copy: StagedWeights | None) -> None:
        self._ranks, self._copy = ranks, copy

    def gather(self, own: StagedWeights) -> None:
        """Make the copy equal to the current shards of all ranks. `own` belongs to this rank's model.

        All ranks must call this method at the same time. Needs memory for both whole tensors on every rank. Raises
        CheckpointError unless `own.reads_vocabulary`.
        """
        whole = {name: self._ranks.all_reduce(own.own_part(name)) for name in own.vocabulary_names}
        if self._copy is not None:
            self._copy.replace(whole)
