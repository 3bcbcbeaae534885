"""Rotary position embedding in C++, in place."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ops.cpp.kernel_launcher import KernelLauncher
from ops.cpp.library import address
from ops.cpp.structures import Angles, Rotate, Step
from ops.kv import with_cpp as kv
from ops.latent.with_cpp import join
from ops.norm.with_cpp import rms_norm
from ops.rope.composed import compose


def make(launcher: KernelLauncher) -> Mapping[str, Callable[..., Any]]:
    """Return all operations of `ops.rope`."""

    def rotate(
        q: Tensor,
        k: Tensor,
        table: Tensor,
        positions: Tensor | None,
        *,
        interleaved: bool = False,
        plan_cache: MutableMapping[Hashable, Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
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
            by_token=positions is None,
        )
        step = Step(num_tokens=len(q), positions=None if positions is None else address(positions))
        launcher.launch("rotate", q.dtype, operands, step)
        return q, k

    def angles(table: Tensor, positions: Tensor, axis_of_pair: Tensor) -> Tensor:
        positions = positions.contiguous()
        num_tokens, size = positions.shape[1], table.shape[1]
        out = launcher.empty((num_tokens, size), torch.float32)
        operands = Angles(
            table=address(table),
            positions=address(positions),
            axis_of_pair=address(axis_of_pair),
            out=address(out),
            axis_stride=num_tokens,
            size=size,
        )
        launcher.launch("angles", torch.float32, operands, Step(num_tokens=num_tokens))
        return out

    # These are separate kernels. In a CPU graph, the launcher fuses the store with the rotation.
    fused = compose(partial(rms_norm, launcher), rotate, kv.make(launcher)["store"], partial(join, launcher))
    return {"angles": angles, "rotate": rotate, **fused}
