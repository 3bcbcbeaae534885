"""A model without a cache: it sees each text whole, and gives hidden states instead of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from runtime.errors import CheckpointError
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.norm import Norm
from runtime.layers.pooler import Pooler
from runtime.layers.score import ScoreHead, ScoreLayer
from runtime.layers.sharding import Stage
from runtime.models.decoder import Decoder


class Encoder(Decoder):
    """Embeddings, blocks, and a norm at the end where there is one.

    It stands where a decoder does; what a decoder does with tokens and stages, it does not do.
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
        """`scores` are the layers of a classifier, behind the pooling."""
        nn.Module.__init__(self)
        self.embedding = self.head = None
        self.cache_specs = {}
        self.embeddings = embeddings
        self.layers = nn.ModuleList(layers)
        self.norm = final_norm
        self.hidden_size = hidden_size
        self.pooler = Pooler()
        self.scorer = ScoreHead(hidden_size, scores) if scores else None

    def keep(self, stage: Stage) -> None:
        if not (stage.first and stage.last):
            raise CheckpointError("An encoder has no stages (--pp-size 1).")

    def embed(self, batch: ForwardBatch) -> Tensor:
        """The tokens' vectors [T, E]. Every row must be a whole text, from position 0 on."""
        return self.embeddings(batch)

    def finish(self, x: Tensor, residual: Tensor | None) -> Tensor:
        return x if self.norm is None else super().finish(x, residual)

    def logits(self, hidden: Tensor) -> Tensor:
        raise RuntimeError("An encoder writes no tokens.")
