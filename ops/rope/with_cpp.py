"""Rotary position embedding in C++, in place."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, MutableMapping
from typing import Any

from torch import Tensor

from ops.cpp.kernel_launcher import KernelLauncher
from ops.cpp.library import address
from ops.cpp.structures import Rotate, Step


def make(launcher: KernelLauncher) -> Mapping[str, Callable[..., Any]]:
    """`rotate` (see `ops.rope`)."""

    def rotate(
        q: Tensor,
        k: Tensor,
        table: Tensor,
        positions: Tensor,
        *,
        interleaved: bool = False,
        plan_cache: MutableMapping[Hashable, Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Turn queries and keys by their positions' angles."""
        q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
        if k.shape[1] > 1 and q.stride(1) != k.stride(1):
            q, k = q.contiguous(), k.contiguous()
        operands = Rotate(
            q=address(q),
            k=address(k),
            table=address(table),
            q_stride=q.stride(0),
            k_stride=k.stride(0),
            num_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_dim=q.stride(1),
            size=table.shape[1],
            interleaved=interleaved,
        )
        step = Step(num_tokens=len(positions), positions=address(positions))
        launcher.launch("rotate", q.dtype, operands, step)
        return q, k

    return {"rotate": rotate}
