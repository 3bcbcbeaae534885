"""Encoder: a model without a cache, which processes each text in one step and returns hidden states."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from runtime.errors import CheckpointError
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.norm import Norm
from runtime.layers.pooler import Pooler
from runtime.layers.score import ScoreHead, ScoreLayer
from runtime.mesh.rank_info import Stage
from runtime.modeling.decoder import Decoder


class Encoder(Decoder):
    """Embeddings, blocks and an optional final norm.

    Has the interface of `Decoder`, but does not support logits and pipeline stages.
    """

    def __init__(
        self,
        embeddings: nn.Module,
        layers: Sequence[nn.Module],
        hidden_size: int,
        *,
        final_norm: Norm | None = None,
        scores: Sequence[ScoreLayer] = (),
    ) -> None:
        """`scores` lists the layers of a classifier's head, which are applied after pooling."""
        nn.Module.__init__(self)
        self.embedding = self.head = None
        self.cache_specs = {}
        self._taps, self.tapped = None, ()
        self.embeddings = embeddings
        self.layers = nn.ModuleList(layers)
        self.first_layer = 0
        self.norm = final_norm
        self.hidden_size = hidden_size
        self.pooler = Pooler()
        self.scorer = ScoreHead(hidden_size, scores) if scores else None

    def keep(self, stage: Stage) -> None:
        if not (stage.first and stage.last):
            raise CheckpointError("An encoder does not support pipeline parallelism. Use --pp-size 1.")

    def embed(self, batch: ForwardBatch) -> Tensor:
        """Return the token vectors [T, E]. Every row must be a whole text that starts at position 0."""
        return self.embeddings(batch)

    def finish(self, x: Tensor, residual: Tensor | None) -> Tensor:
        return x if self.norm is None else super().finish(x, residual)

    def logits(self, hidden: Tensor) -> Tensor:
        raise RuntimeError("An encoder has no LM head.")
