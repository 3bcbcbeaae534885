"""Decoder-only language model: embedding, layers, final norm and LM head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from runtime.layers.build import Build
from runtime.layers.embedding import Embedding
from runtime.layers.forward_batch import ForwardBatch, LayerSpec
from runtime.layers.lm_head import NOT_ADAPTED, LMHead
from runtime.layers.norm import Norm, RMSNorm
from runtime.layers.pooler import Pooler
from runtime.layers.score import ScoreHead, ScoreLayer
from runtime.mesh.rank_info import Stage
from runtime.modeling.config import Config
from runtime.modeling.host_layers import HostLayer
from runtime.modeling.layer import Layer, norms


class Taps(NamedTuple):
    """Layers whose inputs are kept for a draft head, and the operation that copies the inputs."""

    layers: tuple[int, ...]
    join: Callable[[Tensor, Tensor], Tensor]  # copies two tensors [T, E] into a new tensor


class Tapped(NamedTuple):
    """A copy of a layer's input, stored as two joined tensors [T, E]."""

    pair: Tensor  # [T, 2E]
    is_sum: bool  # whether the input is the sum of both tensors; otherwise it is the first tensor

    def values(self, count: int) -> Tensor:
        """Return the input for the first `count` tokens, [count, E]."""
        first, second = self.pair[:count].chunk(2, dim=1)
        return first + second if self.is_sum else first


class Decoder(nn.Module):
    """Computes the hidden states of a batch's tokens, using a cache, and the logits of selected tokens.

    A layer maps (x, residual, batch) to the pair (x, residual) of the next layer; see `runtime.layers.block`.
    """

    in_host: tuple[HostLayer, ...] = ()  # layers whose weights are in host memory

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
        self.first_layer = 0  # number of layers on earlier pipeline stages
        self.pooler = Pooler()
        # Cache specs of all layers of the whole model (all pipeline stages), before tensor-parallel splits.
        self.cache_specs = collect_specs(self)
        self.scorer: ScoreHead | None = None  # None unless the model is a classifier
        self._taps: Taps | None = None
        # Inputs of the tapped layers in the last forward pass or capture; None for layers of other pipeline stages.
        self.tapped: Sequence[Tapped | None] = ()

    def accept_media(self) -> None:
        """Allow vectors in place of token embeddings. Call this before graphs are captured."""
        if self.embedding is not None:
            self.embedding.takes_media = True

    def without_head(self, scores: Sequence[ScoreLayer] = ()) -> None:
        """Remove the LM head. The model then returns hidden states or, with `scores`, a classifier's scores."""
        self.head = None
        if self.embedding is not None:
            self.embedding.tied = False
        if scores:
            self.scorer = ScoreHead(self.hidden_size, scores)

    def keep(self, stage: Stage) -> None:
        """Remove the layers that other pipeline stages compute."""
        self.layers = nn.ModuleList(self.layers[index] for index in stage.layers)
        self.first_layer = stage.layers.start
        if not stage.first:
            self.embedding = self.embedding_norm = self.head = None
        if not stage.last:
            self.norm = None

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the weights and of activations between layers."""
        return next(self.parameters()).dtype

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return hidden states [T, E] after the final norm, and store the keys and values of all T tokens."""
        return self.finish(*self.blocks(self.embed(batch), None, batch))

    def embed(self, batch: ForwardBatch) -> Tensor:
        """Return the token vectors [T, E]. Only the first pipeline stage has the embedding."""
        if self.embedding is None:
            raise RuntimeError("Only the first pipeline stage has the embedding.")
        x = self.embedding(batch)
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def blocks(self, x: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        """Run this stage's layers on the pair (x, residual), each [T, E], and return the last layer's pair."""
        if self._taps is not None:
            return self._tapped_blocks(self._taps, x, residual, batch)
        levels = batch.media_levels
        for index, layer in enumerate(self.layers, self.first_layer):
            x, residual = layer(x, residual, batch)
            if index < len(levels):
                x = x + levels[index].to(x.dtype)
        return x, residual

    def tap(self, layers: Sequence[int], join: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Keep the inputs of these layers in `tapped`, in this order, in every forward pass and capture.

        The index after the last layer means the output of the last layer. `join` copies two tensors [T, E] into one.
        """
        self._taps = Taps(tuple(layers), join)

    def _tapped_blocks(
        self, taps: Taps, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor | None]:
        kept: dict[int, Tapped] = {}
        for index, layer in enumerate([*self.layers, None], self.first_layer):
            if index in taps.layers:  # copied, because layers may overwrite x and the residual
                kept[index] = Tapped(taps.join(x, x if residual is None else residual).flatten(1), residual is not None)
            if layer is not None:
                x, residual = layer(x, residual, batch)
            if layer is not None and index < len(batch.media_levels):
                x = x + batch.media_levels[index].to(x.dtype)
        self.tapped = [kept.get(index) for index in taps.layers]
        return x, residual

    def finish(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Apply the final norm and return hidden states [T, E]. Only the last pipeline stage has the norm."""
        if self.norm is None:
            raise RuntimeError("Only the last pipeline stage has the final norm.")
        return self.norm.add(x, residual)[0]

    def logits(self, hidden: Tensor, adapted: Mapping[int, Tensor] = NOT_ADAPTED) -> Tensor:
        """Return float32 logits [R, V] of hidden states [R, E]. Only the first pipeline stage has the LM head.

        `adapted` maps the slot of an adapter to its rows of `hidden`, int64 [n].
        """
        if self.head is None:
            raise RuntimeError("Only the first pipeline stage has the LM head.")
        return self.head(hidden, adapted)


def states_for_draft_head(hidden: Tensor, tapped: Sequence[Tapped | None], count: int) -> Tensor:
    """Return the states that a draft head reads, for the first `count` tokens.

    The states are the joined inputs in `tapped` (see `Decoder.tap`) or, if there are none, the final hidden states,
    taken from `hidden` [T, E] with T >= count.
    """
    if not tapped:
        return hidden[:count]
    return torch.cat([each.values(count) for each in tapped if each is not None], dim=1)


def collect_specs(model: nn.Module) -> dict[int, LayerSpec]:
    """Return layer number -> cache spec, for the layers of a model that have a cache."""
    specs = {}
    for module in model.modules():
        spec = getattr(module, "cache_spec", None)
        if spec is not None:
            specs[int(getattr(module, "index"))] = spec  # noqa: B009 (attributes of a module are untyped)
    return specs


def assemble(
    config: Config,
    build: Build,
    layer: Callable[[Layer], nn.Module],
    *,
    layers_name: str = "model.layers",
    norm: Norm | None = None,
    embedding_name: str = "model.embed_tokens",
    embedding_norm: Norm | None = None,
    head_bias: bool = False,
    embedding_scale: float | None = None,
    logits_scale: float | None = None,
    soft_cap: float | None = None,
    unit_head: Literal["rows", "columns"] | None = None,
) -> Decoder:
    """Build a decoder. `layer` builds each layer.

    By default the embedding, final norm and LM head have Llama's names. `norm` replaces the final RMSNorm. `soft_cap`
    applies to logits. `unit_head` scales the rows or columns of the LM head to length one.
    """
    embedding = Embedding(embedding_name, config.vocab_size, config.hidden_size, build, scale=embedding_scale)
    return Decoder(
        embedding,
        [layer(Layer(config, build, index, f"{layers_name}.{index}")) for index in range(config.num_layers)],
        norm or norms(config, build, RMSNorm)("model.norm"),
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
