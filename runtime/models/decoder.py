"""A decoder-only language model: embedding, blocks, norm, head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from ops.attention import AttentionInputs
from ops.select import Kernels
from runtime.layers.embedding import Embedding, LMHead
from runtime.layers.norm import RMSNorm
from runtime.layers.rope import Rope
from runtime.layers.rope_parameters import RopeParameters
from runtime.layers.sharding import Stage
from runtime.models.config import Config
from runtime.models.registry import entry


class LayerPools(Protocol):
    """What a decoder needs of a KV pool."""

    def layer(self, index: int) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class Build:
    """What the layers of one model are built with; layers with the same angles share one table."""

    kernels: Kernels
    context_length: int
    device: torch.device
    ropes: dict[RopeParameters, Rope] = field(default_factory=dict)

    def rope(self, parameters: RopeParameters) -> Rope:
        if parameters not in self.ropes:
            self.ropes[parameters] = Rope(parameters, self.context_length, self.kernels, self.device)
        return self.ropes[parameters]


class Decoder(nn.Module):
    """Computes hidden states of a flat batch of tokens over a paged cache, and logits of chosen ones."""

    def __init__(
        self, embedding: Embedding, layers: Sequence[nn.Module], norm: RMSNorm, head: LMHead
    ) -> None:
        super().__init__()
        self.embedding: Embedding | None = embedding
        self.layers = nn.ModuleList(layers)
        self.norm: RMSNorm | None = norm
        self.head: LMHead | None = head
        self.hidden_size = embedding.weight.shape[1]

    def keep(self, stage: Stage) -> None:
        """Let go of all that other stages of a pipeline compute."""
        self.layers = nn.ModuleList(self.layers[index] for index in stage.layers)
        if not stage.first:
            self.embedding = self.head = None
        if not stage.last:
            self.norm = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights and of what passes between layers."""
        return next(self.parameters()).dtype

    def forward(
        self, token_ids: Tensor, positions: Tensor, inputs: AttentionInputs, pool: LayerPools
    ) -> Tensor:
        """token_ids, positions int64 [T] -> hidden [T, E], the final norm applied. Writes the KV of all T."""
        return self.finish(*self.blocks(self.embed(token_ids), positions, inputs, pool))

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] -> [T, E]; in the first stage of a pipeline."""
        if self.embedding is None:
            raise RuntimeError("Only the first stage embeds tokens.")
        return self.embedding(token_ids)

    def blocks(
        self, x: Tensor, positions: Tensor, inputs: AttentionInputs, pool: LayerPools
    ) -> tuple[Tensor, Tensor | None]:
        """This stage's layers: x [T, E] -> what the last one computed, and the sum to which that is due."""
        residual = None
        for index, layer in enumerate(self.layers):
            x, residual = layer(x, residual, positions, inputs, *pool.layer(index))
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


def assemble(config: Config, build: Build) -> Decoder:
    """The decoder that a configuration describes, its parameters not yet filled."""
    layer = entry(config.architecture).layer()
    embedding = Embedding("model.embed_tokens", config.vocab_size, config.hidden_size, build.kernels)
    return Decoder(
        embedding,
        [layer(config, index, build) for index in range(config.num_layers)],
        RMSNorm("model.norm", config.hidden_size, config.norm_eps, build.kernels),
        LMHead("lm_head", embedding, build.kernels, tied=config.flag("tie_word_embeddings")),
    )
