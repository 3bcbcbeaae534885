"""Draft heads: layers that propose draft tokens from the hidden states of the target model (EAGLE, NEXTN).

At position q, a head reads the target model's *state* at q and the token at q + 1, and computes a hidden state from
which the token at q + 2 is chosen. To propose further tokens, the head reads its own state instead of the target's. The
head uses the target's embedding, and the target's LM head unless the head's checkpoint has an LM head.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from runtime.errors import CheckpointError
from runtime.layers.build import Build
from runtime.layers.embedding import Embedding
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.linear import Linear
from runtime.layers.lm_head import NOT_ADAPTED, LMHead
from runtime.layers.norm import Norm, RMSNorm
from runtime.layers.pooler import Pooler
from runtime.layers.weight import Shard, SubLayer, Weighted, parameter
from runtime.modeling.config import Config
from runtime.modeling.decoder import Decoder, collect_specs
from runtime.modeling.layer import Layer


class DraftHead(Decoder):
    """A decoder whose first layer reads a state of the target model in addition to each token.

    The first layer maps (embedded [T, E], states [T, E], batch) to the pair (x, residual). `taps` lists the target's
    layers whose inputs are the states; if it is empty, the states are the target's final hidden states. `projection`
    maps the joined inputs of the layers in `taps`, [T, 3E], to states [T, E]. After a forward pass, `states` has the
    head's own states [T, E]: the sum before the final norm or, with `normed_states`, the states after this norm.
    """

    states: Tensor

    def __init__(
        self,
        layers: Sequence[nn.Module],
        norm: Norm | None,
        config: Config,
        build: Build,
        *,
        head: LMHead | None = None,
        token_map: TokenMap | None = None,
        projection: Linear | None = None,
        taps: Sequence[int] = (),
        normed_states: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.embedding: Embedding | None = None
        self.embedding_norm = None
        self.head: LMHead | None = head
        self.token_map = token_map
        self._tokens: Tensor | None = None
        self.projection = projection
        self.taps, self.normed_states = tuple(taps), normed_states
        self.hidden_size = self.target_state_size = config.hidden_size
        self.vocab_size = config.vocab_size
        self.scorer = None
        self._taps, self.tapped = None, ()
        self.pooler = Pooler()
        self.kernels = build.kernels
        self.cache_specs = collect_specs(self)

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the states. Weights may be quantised, but norms are not."""
        return next(module.weight.dtype for module in self.modules() if isinstance(module, RMSNorm))

    def share(self, target: Decoder) -> None:
        """Use the target's embedding and, if the head has no LM head, the target's LM head. Call this after loading."""
        if target.embedding is None or target.head is None:
            raise CheckpointError("A draft head needs a model with an embedding and an LM head.")
        self.embedding, self.embedding_norm = target.embedding, target.embedding_norm
        if self.head is None:
            self.head = target.head

    def without_target(self) -> DraftHead:
        """Return a head with the same layers, but without the layers of the target. Call this before `share`."""
        own = copy.copy(self)
        object.__setattr__(own, "_modules", dict(self._modules))
        return own

    def propose_only(self, ids: Tensor, head: LMHead) -> None:
        """Limit the proposals to the tokens `ids`, int64 [n], ascending. `head` is an LM head with only these rows."""
        self._tokens, self.head = ids, head

    @property
    def frequent(self) -> tuple[LMHead, Tensor] | None:
        """The LM head and the ids of `propose_only`, or None if it was not called."""
        return None if self._tokens is None or self.head is None else (self.head, self._tokens)

    @property
    def token_ids(self) -> Tensor | None:
        """The token id of each row of the LM head, int64 [n], ascending, or None for the whole vocabulary."""
        if self.token_map is not None and self.token_map.size < self.vocab_size:
            return self.token_map.ids
        return self._tokens

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return hidden states [T, E] for the LM head, and set `states`. May overwrite `batch.states`."""
        if batch.states is None:
            raise ValueError("A draft head needs the states of its model.")
        first, *rest = self.layers
        x, residual = first(self.embed(batch), batch.states, batch)
        for layer in rest:
            x, residual = layer(x, residual, batch)
        if self.norm is None:
            hidden = total = x if residual is None else self.kernels.add(x, residual)
        else:
            hidden, total = self.norm.add(x, residual)
        self.states = hidden if self.normed_states else total
        return hidden

    def logits(self, hidden: Tensor, adapted: Mapping[int, Tensor] = NOT_ADAPTED) -> Tensor:
        """Return float32 logits [R, V] of hidden states [R, E]; -inf for tokens that the LM head does not have."""
        found, ids = super().logits(hidden, adapted), self.token_ids
        return (
            found
            if ids is None
            else found.new_full((len(found), self.vocab_size), -torch.inf).index_copy_(1, ids, found)
        )

    def project(self, states: Tensor) -> Tensor:
        """Map the joined inputs of three target layers [T, 3E] to [T, E]. Without a projection, return `states`."""
        if self.projection is None:
            return states
        return self.projection.method.multiply(self.projection, states, self.projection.bias, self.kernels)


class Joined(nn.Module):
    """First layer of a head: concatenate the token's embedding and the state, project them, and run a decoder layer.

    With `state_first`, the state comes before the embedding.
    """

    def __init__(
        self,
        projection: Linear,
        layer: nn.Module,
        build: Build,
        *,
        token_norm: Norm | None = None,
        state_norm: Norm | None = None,
        state_first: bool = False,
    ) -> None:
        super().__init__()
        self.projection, self.layer, self.state_first = projection, layer, state_first
        self.token_norm, self.state_norm = token_norm, state_norm
        self.kernels = build.kernels

    def forward(self, embedded: Tensor, states: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        """Map `embedded` and `states`, each [T, E], to the pair (x, residual) for the next layer."""
        embedded = embedded if self.token_norm is None else self.token_norm(embedded)
        states = states if self.state_norm is None else self.state_norm(states)
        pair = (states, embedded) if self.state_first else (embedded, states)
        return self.layer(self.projection(self.kernels.join(*pair).flatten(1), batch), None, batch)


class WideAttentionLayer(nn.Module):
    """EAGLE-3's layer. Attention reads the joined normalised token vector and state. The residual is the state."""

    def __init__(
        self, token_norm: Norm, state_norm: Norm, attention: nn.Module, mlp_norm: Norm, mlp: nn.Module, build: Build
    ) -> None:
        super().__init__()
        self.token_norm, self.state_norm = token_norm, state_norm
        self.attention, self.mlp_norm, self.mlp = attention, mlp_norm, mlp
        self.kernels = build.kernels

    def forward(self, embedded: Tensor, states: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Map `embedded` and `states`, each [T, E], to the pair (x, residual) for the next layer."""
        joined = self.kernels.join(self.token_norm(embedded), self.state_norm(states)).flatten(1)
        x, residual = self.mlp_norm.add(self.attention(joined, batch), states)
        return self.mlp(x, batch), residual


class JoinLinear(Linear):
    """A projection of joined vectors to one vector. Its bias may be missing from the checkpoint, and is then zero."""

    def __init__(self, name: str, in_size: int, config: Config, build: Build, *, bias: bool = False) -> None:
        super().__init__(in_size, [SubLayer(name, config.hidden_size)], build, bias=bias)

    def shards(self) -> Iterator[Shard]:
        for shard in super().shards():
            yield shard._replace(default=0.0) if shard.name.endswith(".bias") else shard


class TokenMap(Weighted):
    """The token ids of an LM head with a smaller vocabulary. The checkpoint's "d2t" has the id of entry i minus i."""

    def __init__(self, size: int, vocab_size: int) -> None:
        super().__init__()
        self.size, self.vocab_size = size, vocab_size
        self.ids = torch.arange(0)  # int64 [size], set by `prepare`
        self.allocate()

    def allocate(self) -> None:
        self.offsets = parameter(self.size, dtype=torch.int64)

    def shards(self) -> Iterator[Shard]:
        yield Shard("d2t", self.offsets, 0, self.size, (None,), default=0.0)

    def prepare(self) -> None:
        """Compute the ids. Raises CheckpointError unless the ids are ascending and in the vocabulary."""
        self.ids = torch.arange(self.size, device=self.offsets.device) + self.offsets
        ids = self.ids.cpu()
        if bool((ids[1:] <= ids[:-1]).any()) or int(ids[0]) < 0 or int(ids[-1]) >= self.vocab_size:
            raise CheckpointError(f"d2t must map to ascending ids below {self.vocab_size}.")


def small_head(config: Config, build: Build) -> tuple[LMHead | None, TokenMap | None]:
    """Return the draft head's own LM head for `draft_vocab_size` tokens, or (None, None) if it uses the target's."""
    size = config.optional_integer("draft_vocab_size")
    if config.flag("shares_lm_head") or size is None:
        return None, None
    # This embedding is needed only for its sizes, which the LM head reads.
    sizes = Embedding("", size, config.hidden_size, build)
    head = LMHead("lm_head", sizes, build, tied=False)
    return head, TokenMap(size, config.vocab_size)


def prediction_head(at: Layer, layer: nn.Module) -> DraftHead:
    """Return a multi-token prediction layer as in DeepSeek V3 (arXiv 2412.19437, section 2.2)."""
    config, build = at.config, at.build
    projection = JoinLinear(f"{at.name}.eh_proj", 2 * config.hidden_size, config, build)
    first = Joined(projection, layer, build, token_norm=at.norm("enorm"), state_norm=at.norm("hnorm"))
    return DraftHead([first], at.norm("shared_head.norm"), config, build, normed_states=True)
