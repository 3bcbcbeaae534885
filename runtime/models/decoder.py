"""A decoder-only language model: embedding, layers, norm, head."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from runtime.layers.build import Build
from runtime.layers.embedding import Embedding
from runtime.layers.forward_batch import ForwardBatch, LayerSpec
from runtime.layers.lm_head import LMHead
from runtime.layers.norm import Norm, RMSNorm
from runtime.layers.pooler import Pooler
from runtime.layers.score import ScoreHead, ScoreLayer
from runtime.layers.sharding import Stage
from runtime.models.config import Config


class Decoder(nn.Module):
    """Computes hidden states of a batch of tokens over a cache, and logits of chosen ones.

    A layer takes (x, residual, batch) and gives the pair that the next one takes: what it computed, and the sum to
    which that is still to be added.
    """

    def __init__(
        self,
        embedding: Embedding,
        layers: Sequence[nn.Module],
        norm: Norm,
        head: LMHead,
        *,
        embedding_norm: Norm | None = None,
    ) -> None:
        super().__init__()
        self.embedding: Embedding | None = embedding
        self.embedding_norm = embedding_norm
        self.layers = nn.ModuleList(layers)
        self.norm: Norm | None = norm
        self.head: LMHead | None = head
        self.hidden_size = embedding.size
        self.pooler = Pooler()
        # What each layer of the whole model keeps of a sequence, before ranks share it (`runtime.kv_cache.kinds`).
        self.cache_specs = collect_specs(self)
        self.scorer: ScoreHead | None = None  # of a classifier

    def without_head(self, scores: Sequence[ScoreLayer] = ()) -> None:
        """No token is wanted of the model, but hidden states, or `scores` of them."""
        self.head = None
        if self.embedding is not None:
            self.embedding.tied = False
        if scores:
            self.scorer = ScoreHead(self.hidden_size, scores)

    def keep(self, stage: Stage) -> None:
        """Let go of all that other stages of a pipeline compute."""
        self.layers = nn.ModuleList(self.layers[index] for index in stage.layers)
        if not stage.first:
            self.embedding = self.embedding_norm = self.head = None
        if not stage.last:
            self.norm = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights and of what passes between layers."""
        return next(self.parameters()).dtype

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [T, E] of the batch's tokens, the final norm applied. Writes the KV of all T."""
        return self.finish(*self.blocks(self.embed(batch), None, batch))

    def embed(self, batch: ForwardBatch) -> Tensor:
        """The tokens' vectors [T, E]; in the first stage of a pipeline."""
        if self.embedding is None:
            raise RuntimeError("Only the first stage embeds tokens.")
        x = self.embedding(batch)
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def blocks(self, x: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        """This stage's layers: (x, residual) [T, E] as the layer before gave them -> as the last one does."""
        for layer in self.layers:
            x, residual = layer(x, residual, batch)
        return x, residual

    def finish(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The final norm -> hidden [T, E]; in the last stage of a pipeline."""
        if self.norm is None:
            raise RuntimeError("Only the last stage has the final norm.")
        return self.norm.add(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, E], as `forward` gave them -> float32 [R, V]; in the first stage of a pipeline."""
        if self.head is None:
            raise RuntimeError("Only the first stage has the head.")
        return self.head(hidden)


def collect_specs(model: nn.Module) -> dict[int, LayerSpec]:
    """What the layers of a model keep, by the number of the layer."""
    found = {}
    for module in model.modules():
        spec = getattr(module, "cache_spec", None)
        if spec is not None:
            found[int(getattr(module, "index"))] = spec  # noqa: B009 (a module's attributes are of any type)
    return found


def assemble(
    config: Config,
    build: Build,
    layer: Callable[[int], nn.Module],
    *,
    norm: Norm | None = None,
    embedding_name: str = "model.embed_tokens",
    embedding_norm: Norm | None = None,
    head_bias: bool = False,
    unit_offset: bool = False,
    embedding_scale: float | None = None,
    logits_scale: float | None = None,
    soft_cap: float | None = None,
    unit_head: bool = False,
) -> Decoder:
    """A decoder with Llama's names for its ends, `layer` giving each layer by its number.

    `unit_offset` is that of the final norm, in whose place another `norm` may be given; `soft_cap` that of the logits.
    With `unit_head` the head's vectors are scaled to length one.
    """
    embedding = Embedding(embedding_name, config.vocab_size, config.hidden_size, build, scale=embedding_scale)
    return Decoder(
        embedding,
        [layer(index) for index in range(config.num_layers)],
        norm or RMSNorm("model.norm", config.hidden_size, config.norm_eps, build, unit_offset=unit_offset),
        LMHead(
            "lm_head",
            embedding,
            build,
            tied=config.flag("tie_word_embeddings"),
            bias=head_bias,
            scale=logits_scale,
            soft_cap=soft_cap,
            unit=unit_head,
        ),
        embedding_norm=embedding_norm,
    )
