"""Attention of encoders in C++: all texts in one call (`ops/cpp/source/attend_texts.h`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ops.attention import AttentionMetadata
from ops.attention.with_cpp import computes, step_in
from ops.cpp.kernel_launcher import KernelLauncher
from ops.cpp.library import address, in_line
from ops.cpp.structures import AttendTexts
from ops.encoder_attention import native


def make(launcher: KernelLauncher) -> Mapping[str, Callable[..., Any]]:
    """`attend_texts` (see `ops.encoder_attention`)."""

    def attend_texts(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        reach: int | None = None,
        bias: native.Bias | None = None,
    ) -> Tensor:
        """Attention of each row to itself. What has a bias, or `computes` says no to, goes to `native`."""
        if bias is not None or not computes(q.dtype, q.shape[2], k):
            return native.attend_texts(q, k, v, metadata, scale=scale, reach=reach, bias=bias)
        q, k, v = in_line(q), in_line(k), in_line(v)
        out = launcher.empty(q.shape, q.dtype)
        operands = AttendTexts(
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
        launcher.launch("attend_texts", q.dtype, operands, step_in(metadata))
        return out

    return {"attend_texts": attend_texts}
