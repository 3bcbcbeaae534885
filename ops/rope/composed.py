"""The combined operations of `ops.rope` for backends that have only the separate operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ops.attention import AttentionMetadata
from ops.rope import LatentNorm, Rotation


def compose(
    rms_norm: Callable[..., Tensor],
    rotate: Callable[..., tuple[Tensor, Tensor]],
    store: Callable[..., None],
    join: Callable[[Tensor, Tensor], Tensor],
) -> Mapping[str, Callable[..., Any]]:
    """Return `norm_rotate`, `rotate_store` and `rotate_store_latent`, which call these operations one after another."""

    def norm_rotate(q: Tensor, k: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        table, positions, interleaved, norms, plan_cache = rotation
        if norms is not None:
            q = rms_norm(q, norms.q, norms.eps, unit_offset=norms.unit_offset)
            k = rms_norm(k, norms.k, norms.eps, unit_offset=norms.unit_offset)
        return rotate(q, k, table, positions, interleaved=interleaved, plan_cache=plan_cache)

    def rotate_store(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        metadata: AttentionMetadata,
        rotation: Rotation,
        **scales: float,
    ) -> Tensor:
        q, k = norm_rotate(q, k, rotation)
        store(k, v, k_pool, v_pool, metadata, **scales)
        return q

    def rotate_store_latent(
        q_pe: Tensor,
        latent: Tensor,
        k_pe: Tensor,
        norm: LatentNorm,
        pool: Tensor,
        metadata: AttentionMetadata,
        rotation: Rotation,
    ) -> Tensor:
        q_pe, key_pe = norm_rotate(q_pe, k_pe.unsqueeze(1), rotation)
        key = join(rms_norm(latent, norm.weight, norm.eps), key_pe.squeeze(1))  # [T, 1, R + P]
        store(key, key, pool, pool, metadata)
        return q_pe

    return {"norm_rotate": norm_rotate, "rotate_store": rotate_store, "rotate_store_latent": rotate_store_latent}
