"""What every layer is given in a step: the tokens, where they stand, and the cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from torch import Tensor

from ops.attention import AttentionMetadata, AttentionOptions
from ops.latent import LatentWeights
from ops.select import Kernels
from runtime.layers.sharding import shard_range


class LayerSpec(Protocol):
    """What one layer keeps: a frozen value. It belongs to a kind, whose file reads its other attributes."""

    @property
    def kind(self) -> str:
        """The name of the kind; a layer whose kind the engine does not use has pages for all tokens."""
        ...

    def local(self, tp_rank: int, tp_size: int) -> LayerSpec:
        """This tensor-parallel rank's share."""
        ...


@dataclass(frozen=True, slots=True)
class KVSpec:
    """A layer that keeps keys and values: of all tokens or, with a `window`, at least of the last so many.

    With `values_in_keys` there is one tensor, which is read as both.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    values_in_keys: bool = False

    @property
    def kind(self) -> str:
        return "paged" if self.window is None else "windowed"

    def local(self, tp_rank: int, tp_size: int) -> KVSpec:
        """This tensor-parallel rank's share."""
        return replace(
            self, num_kv_heads=shard_range("kv_heads", self.num_kv_heads, 1, tp_rank, tp_size).size
        )

    def page_bytes(self, page_size: int, dtype_bytes: int) -> int:
        """Keys and values of one page."""
        return (2 - self.values_in_keys) * self.num_kv_heads * self.head_dim * page_size * dtype_bytes


class LayerCache(Protocol):
    """What one layer has cached of all sequences. A layer never knows of which kind it is.

    All methods take the kernels of the layer and the scales that its checkpoint has for a cache of 8 bits.
    """

    def store(
        self, kernels: Kernels, k: Tensor, v: Tensor, batch: ForwardBatch, scales: Mapping[str, float]
    ) -> None:
        """Put keys and values [T, K, D] of the batch's tokens into the cache."""
        ...

    def attend(
        self,
        kernels: Kernels,
        q: Tensor,
        batch: ForwardBatch,
        scales: Mapping[str, float],
        options: AttentionOptions,
    ) -> Tensor:
        """Attention [T, H, D] of the queries [T, H, D]."""
        ...

    def attend_latent(
        self,
        kernels: Kernels,
        plain: Tensor,
        turned: Tensor,
        weights: LatentWeights,
        batch: ForwardBatch,
        options: AttentionOptions,
    ) -> Tensor:
        """Attention [T, H * V] of the queries [T, H, N] and [T, H, P] over latent vectors (see `ops.latent`)."""
        ...

    @property
    def nbytes(self) -> int: ...


class KindInputs(NamedTuple):
    """What a step tells the caches of one kind: the arrays that the kind made of its rows, on the device."""

    arrays: Mapping[str, Tensor]  # int32
    attention: AttentionMetadata  # that of the step, or with the kind's own page table and slot mapping


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ForwardBatch:
    """T tokens of some rows, one row after the other, as tensors on the device.

    A token is given by its id, or by a vector where `input_embeds` is there: then `embeds_mask` tells which tokens
    are vectors (None: all of them), and the ids of those are never looked at. Vectors take the place of what the
    embedding gives, its scale included. Positions have three axes (time, height, width) for models whose rotary
    embedding has sections; a token's slot in the cache does not depend on them.
    """

    token_ids: Tensor  # int64 [T], all known
    positions: Tensor  # int64 [T], or [3, T]
    attention: AttentionMetadata
    cache: Mapping[int, LayerCache]  # of all layers that this rank computes, by the number in the whole model
    kinds: Mapping[str, KindInputs] = field(default_factory=dict)  # by kind of cache beside the pages
    row_values: Mapping[str, Tensor] = field(default_factory=dict)  # int32 [B] by name: which adapter, say
    input_embeds: Tensor | None = None  # [T, E]
    embeds_mask: Tensor | None = None  # bool [T]
    token_types: Tensor | None = None  # int64 [T], 1 in the second text of a pair; None: there are no pairs

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def is_plain(self) -> bool:
        """Whether all tokens are ids of one type at positions of one axis, and nothing is said of single rows: as
        captured and compiled steps take them.
        """
        given = self.input_embeds is not None or self.token_types is not None
        return not given and self.positions.dim() == 1 and not self.row_values

    def values_of_tokens(self, name: str) -> Tensor | None:
        """The value of each token's row, int32 [T]; None where no row has one but 0."""
        values = self.row_values.get(name)
        return None if values is None else values.repeat_interleave(self.attention.counts)
