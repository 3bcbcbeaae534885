"""Bidirectional attention in C++: all rows in one call (`ops/cpp/source/attend_bidirectional.h`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ops.attention import AttentionMetadata
from ops.attention.with_cpp import computes, step_in
from ops.cpp.kernel_launcher import KernelLauncher
from ops.cpp.library import address, contiguous_tokens
from ops.cpp.structures import AttendBidirectional
from ops.encoder_attention import native


def make(launcher: KernelLauncher) -> Mapping[str, Callable[..., Any]]:
    """Return `attend_bidirectional` (see `ops.encoder_attention`)."""

    def attend_bidirectional(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        reach: int | None = None,
        bias: native.Bias | None = None,
    ) -> Tensor:
        """Return the attention output [T, H, D]. `native` computes calls with a bias or with unsupported tensors."""
        if bias is not None or not computes(q.dtype, q.shape[2], k):
            return native.attend_bidirectional(q, k, v, metadata, scale=scale, reach=reach, bias=bias)
        q, k, v = contiguous_tokens(q), contiguous_tokens(k), contiguous_tokens(v)
        out = launcher.empty(q.shape, q.dtype)
        operands = AttendBidirectional(
            q=address(q),
            k=address(k),
            v=address(v),
            out=address(out),
            q_stride=q.stride(0),
            k_stride=k.stride(0),
            v_stride=v.stride(0),
            num_heads=q.shape[1],
            head_dim=q.shape[2],
            reach=-1 if reach is None else reach,
            scale=scale,
        )
        launcher.launch("attend_bidirectional", q.dtype, operands, step_in(metadata))
        return out

    return {"attend_bidirectional": attend_bidirectional}
