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
    """Embedding, layers x [T, E] -> [T, E], and a norm at the end where there is one.

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
        self.embedding = self.norm = self.head = None
        self.cache_specs = {}
        self.embeddings = embeddings
        self.layers = nn.ModuleList(layers)
        self.final_norm = final_norm
        self.hidden_size = hidden_size
        self.pooler = Pooler()
        self.scorer = ScoreHead(hidden_size, scores) if scores else None

    def keep(self, stage: Stage) -> None:
        if not (stage.first and stage.last):
            raise CheckpointError("An encoder has no stages (--pp-size 1).")

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [T, E] of the batch's tokens. Every row must be a whole text, from position 0 on."""
        x: Tensor = self.embeddings(batch)
        for layer in self.layers:
            x = layer(x, batch)
        return x if self.final_norm is None else self.final_norm(x)

    def embed(self, batch: ForwardBatch) -> Tensor:
        raise RuntimeError("An encoder has no stages.")

    def logits(self, hidden: Tensor) -> Tensor:
        raise RuntimeError("An encoder writes no tokens.")
