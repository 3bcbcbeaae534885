"""Normalisation in C++."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ops.cpp.kernel_launcher import KernelLauncher
from ops.cpp.library import Norm, address


def make(launcher: KernelLauncher) -> Mapping[str, Callable[..., Any]]:
    """`rms_norm` and `add_rms_norm` (see `ops.norm`)."""

    def norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, unit_offset: bool) -> Tensor:
        size = x.shape[-1]
        lines = x.shape[1] if x.dim() == 3 else 1
        out = launcher.empty(x.shape, x.dtype)
        operands = Norm(
            x=address(x),
            residual=address(residual),
            weight=address(weight),
            out=address(out),
            tokens=launcher.tokens(x),
            lines=lines,
            stride=x.stride(0),
            size=size,
            eps=eps,
            offset=float(unit_offset),
        )
        launcher.launch("norm", x.dtype, operands)
        return out

    def rms_norm(x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor:
        """Normalise the last dimension of [T, E], or of [T, H, D] with heads one after the other."""
        shape = x.shape
        if x.dim() not in (2, 3):
            x = x.reshape(-1, shape[-1])
        if x.stride(-1) != 1 or (x.dim() == 3 and x.stride(1) != shape[-1]):
            x = x.contiguous()
        return norm(x, None, weight, eps, unit_offset).view(shape)

    def add_rms_norm(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Add x to the residual, in place where that is contiguous, then normalise; returns both."""
        residual = residual.contiguous()
        return norm(x if x.stride(1) == 1 else x.contiguous(), residual, weight, eps, unit_offset), residual

    return {"rms_norm": rms_norm, "add_rms_norm": add_rms_norm}
