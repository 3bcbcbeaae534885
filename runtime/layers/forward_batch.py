"""Input of every layer in a step: tokens, positions, attention metadata and cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ops.attention import AttentionMetadata, AttentionOptions
from ops.latent import LatentWeights
from ops.rope import LatentNorm, Rotation
from ops.select import Kernels
from runtime.layers.sharding import shard_range


class LayerSpec(Protocol):
    """Description of the data that one layer caches. Immutable.

    Each cache kind may add attributes that only the code of this kind reads.
    """

    @property
    def kind(self) -> str:
        """Name of the cache kind. If the engine lacks a cache of this kind, the layer caches all tokens in pages."""
        ...

    def local(self, tp_rank: int, tp_size: int) -> LayerSpec:
        """Return the spec of this tensor-parallel rank's shard."""
        ...


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The layer caches keys and values of all tokens or, if `window` is set, of at least the last `window` tokens.

    If `values_in_keys` is true, only keys are stored, and they contain the values.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    values_in_keys: bool = False

    @property
    def kind(self) -> str:
        return "paged" if self.window is None else "windowed"

    def local(self, tp_rank: int, tp_size: int) -> KVSpec:
        """Return the spec of this tensor-parallel rank's shard."""
        return replace(self, num_kv_heads=shard_range("kv_heads", self.num_kv_heads, 1, tp_rank, tp_size).size)

    def page_bytes(self, page_size: int, dtype_bytes: int) -> int:
        """Return the size in bytes of one page of `page_size` tokens for this layer."""
        return (2 - self.values_in_keys) * self.num_kv_heads * self.head_dim * page_size * dtype_bytes


class LayerCache(Protocol):
    """The cache of one layer for all sequences. Layers use the cache without knowing its kind.

    `scales` are the checkpoint's scales for an 8-bit cache.
    """

    def store(self, kernels: Kernels, k: Tensor, v: Tensor, batch: ForwardBatch, scales: Mapping[str, float]) -> None:
        """Store keys and values [T, K, D] of the batch's tokens."""
        ...

    def rotate_store(
        self,
        kernels: Kernels,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rotation: Rotation,
        batch: ForwardBatch,
        scales: Mapping[str, float],
    ) -> Tensor:
        """Rotate queries [T, H, D] and keys [T, K, D], store keys and values, and return the rotated queries."""
        ...

    def rotate_store_latent(
        self,
        kernels: Kernels,
        q_pe: Tensor,
        latent: Tensor,
        k_pe: Tensor,
        norm: LatentNorm,
        rotation: Rotation,
        batch: ForwardBatch,
    ) -> Tensor:
        """Store normalised latent vectors [T, R] and rotated keys [T, P], and return the rotated `q_pe` [T, H, P]."""
        ...

    def attend(
        self,
        kernels: Kernels,
        q: Tensor,
        batch: ForwardBatch,
        scales: Mapping[str, float],
        options: AttentionOptions,
    ) -> Tensor:
        """Return the attention output [T, H, D] of the queries [T, H, D]."""
        ...

    def attend_latent(
        self,
        kernels: Kernels,
        q_nope: Tensor,
        q_pe: Tensor,
        weights: LatentWeights,
        batch: ForwardBatch,
        options: AttentionOptions,
    ) -> Tensor:
        """Return the output [T, H * V] of attention over latent vectors; `q_nope` is [T, H, N], `q_pe` is [T, H, P]."""
        ...

    @property
    def nbytes(self) -> int: ...


class KindInputs(NamedTuple):
    """Inputs that a cache kind has prepared for one step."""

    arrays: Mapping[str, Tensor]  # name -> int32 tensor on the device
    # The step's own metadata, or a variant if the kind has its own page table and slot mapping.
    attention: AttentionMetadata
    host: Mapping[str, NDArray[np.int32]] | None = None  # `arrays` on the host; None if the step is captured
    is_exact: bool = True  # whether `host` equals `arrays`. If not, it is for upper bounds of the rows' starts.
    chained: bool = False  # whether the step is captured for rows with draft tokens, which continue from each other


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ForwardBatch:
    """The T tokens of a step, as tensors on the device. The tokens of a row are consecutive.

    If `input_embeds` is set, its vectors replace the scaled embeddings of the tokens that `embeds_mask` marks. The ids
    of these tokens are ignored. Positions have three axes (time, height, width) for models whose rotary embedding
    has sections; a token's slot in the cache does not depend on its positions.

    When the CPU graph captures a step, every tensor is a buffer for the largest step, and each step fills it. A layer
    may then read shapes, take views and pass addresses to the launcher's kernels, but may not compute with torch.
    """

    token_ids: Tensor  # int64 [T]; every placeholder has been replaced by its token
    positions: Tensor  # int64 [T]
    attention: AttentionMetadata
    cache: Mapping[int, LayerCache]  # layer number in the whole model -> cache; this rank's layers only
    # Name of the cache kind -> its inputs. The kind "paged" has no entry.
    kinds: Mapping[str, KindInputs] = field(default_factory=dict)
    # Values of rows by name, for example the adapter index. `row_values` has one value per row, int32 [B], for kernels
    # that iterate over rows. `token_values` repeats it for each token of the row, int32 [T], for kernels that iterate
    # over tokens.
    row_values: Mapping[str, Tensor] = field(default_factory=dict)
    token_values: Mapping[str, Tensor] = field(default_factory=dict)
    position_axes: Tensor | None = None  # int64 [3, T]; None: `positions` holds for all three axes
    input_embeds: Tensor | None = None  # [T, E]; None: every token has an id
    embeds_mask: Tensor | None = None  # bool [T]; None if `input_embeds` is None
    # Slot of an adapter -> indices of its tokens, int64 [n]. Only adapters with changes that graphs cannot compute.
    adapted: Mapping[int, Tensor] = field(default_factory=dict)
    # With data-parallel attention (`layers.gathered`): the number of tokens of each attention group; otherwise ().
    group_tokens: tuple[int, ...] = ()
    # int64 [T], the row of each token. Set in steps with draft tokens, for CUDA graphs whose rows have one token each.
    token_rows: Tensor | None = None
    states: Tensor | None = None  # [T, E], hidden states that a draft head takes as input; layers may overwrite them
    # [T, E] each, added to the hidden states after the first, the second, ... layer (DeepStack, arXiv 2406.04334)
    media_levels: Sequence[Tensor] = ()
    # Whether a CUDA graph captures this forward pass, or it is the run before a capture, which compiles kernels.
    in_graph: bool = False

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def is_plain(self) -> bool:
        """Whether the batch has no embeddings, three-axis positions or row values. Compiled steps require this."""
        return self.input_embeds is None and self.position_axes is None and not self.row_values

    def values_of_tokens(self, name: str) -> Tensor | None:
        """Return the value of each token's row, int32 [T], or None if the value is 0 for all rows.

        A layer must declare the name in its `row_values` (`runtime.layers.batch_reads`). Graphs always pass the values,
        even if they are 0 for all rows.
        """
        return self.token_values.get(name)

    @property
    def media(self) -> tuple[Tensor, Tensor] | None:
        """The pair (`input_embeds`, `embeds_mask`), or None if every token has an id."""
        if self.input_embeds is None or self.embeds_mask is None:
            return None
        return self.input_embeds, self.embeds_mask
