"""Rotary position embedding with a table of cosines and sines.

A backend file defines

    rotate(q, k, table, positions, *, interleaved=False, plan_cache=None) -> (q, k)
    angles(table, positions [3, T], axis_of_pair int32 [R / 2]) -> float32 [T, R]
    norm_rotate(q, k, rotation) -> (q, k)
    rotate_store(q, k, v, k_pool, v_pool, metadata, rotation, *, k_scale=1.0, v_scale=1.0) -> q
    rotate_store_latent(q_pe [T, H, P], latent [T, R], k_pe [T, P], norm, pool, metadata, rotation) -> q_pe

    q          [T, H, D]
    k          [T, K, D]
    table      [N, R] float32: for each position the cosines of R / 2 angles, then their sines; R <= D
    positions  [T] int64, < N; None: row t of the table belongs to token t, as in the result of `angles`
    plan_cache `AttentionMetadata.plan_cache` of the step, in which the first layer may store the tokens' cosines and
               sines for later layers; None: every call computes them

`rotate` rotates the first R dimensions of each head and leaves the other dimensions unchanged. Pair i has the
dimensions (i, i + R / 2), or (2i, 2i + 1) if `interleaved`. `rotate` may overwrite q and k; use the returned tensors.
Source: RoFormer, arXiv 2104.09864.

`angles` supports positions with three axes (time, height, width). It returns one row per token, in the table's layout:
the cosine and sine of pair i come from the table's row for the token's position on axis `axis_of_pair[i]`. Source:
Qwen2-VL, arXiv 2409.12191.

`norm_rotate` computes `ops.norm.rms_norm` of q and k, if the rotation has norms, and then `rotate`. `rotate_store` also
stores the rotated keys and the values [T, K, D] in the cache, like `ops.kv.store`. Both operations round after the norm
and after the rotation, as the separate operations do. They may overwrite q and k.

`rotate_store_latent` computes these steps of latent attention (`ops.latent`): `rotate` of `q_pe` and `k_pe`,
`ops.norm.rms_norm` of the latent vectors, and the cache write of latent vectors and rotated keys. In the pool
[pages, 1, page, R + P], each latent vector is followed by its rotated key. The rotation has no norms. The operation may
overwrite `q_pe` and `k_pe`.
"""

from __future__ import annotations

from collections.abc import Hashable, MutableMapping
from typing import Any, NamedTuple

from torch import Tensor


class HeadNorms(NamedTuple):
    """RMS norms that are applied to each head of the queries and keys."""

    q: Tensor  # [D]
    k: Tensor  # [D]
    eps: float
    unit_offset: bool = False  # whether the factors are 1 + weight


class LatentNorm(NamedTuple):
    """The RMS norm of latent vectors."""

    weight: Tensor  # [R]
    eps: float


class Rotation(NamedTuple):
    """A rotation of queries and keys, and the norms before it."""

    table: Tensor
    positions: Tensor | None
    interleaved: bool = False
    norms: HeadNorms | None = None
    plan_cache: MutableMapping[Hashable, Any] | None = None
