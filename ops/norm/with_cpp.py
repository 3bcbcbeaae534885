"""Normalisation in C++."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from ops.cpp.kernel_launcher import KernelLauncher
from ops.cpp.library import address, contiguous_tokens
from ops.cpp.structures import Add, Norm
from ops.norm.native import add_rms_norm_round


class Kind(NamedTuple):
    """A kind of normalisation with its parameters."""

    weight: Tensor  # [E], or [H, D]
    eps: float
    unit_offset: bool = False
    centred: bool = False
    bias: Tensor | None = None


def make(launcher: KernelLauncher) -> Mapping[str, Callable[..., Any]]:
    """Return all operations of `ops.norm`."""
    operations = (rms_norm, add_rms_norm, layer_norm, add_layer_norm, add)
    callables = {operation.__name__: partial(operation, launcher) for operation in operations}
    return {"add_rms_norm_round": add_rms_norm_round} | callables  # C++ products do not read float8 rows


def rms_norm(launcher: KernelLauncher, x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor:
    """Normalise the last dimension of x [T, E] or [T, H, D]."""
    return _norm(launcher, x, Kind(weight, eps, unit_offset))


def add_rms_norm(
    launcher: KernelLauncher,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    unit_offset: bool = False,
) -> tuple[Tensor, Tensor]:
    """Add x to the residual, then normalise. Return the normalised values and the sum.

    The sum overwrites `residual` if `residual` is contiguous.
    """
    return _add_norm(launcher, x, residual, Kind(weight, eps, unit_offset))


def layer_norm(launcher: KernelLauncher, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Centre and normalise the last dimension of x [T, E] or [T, H, D]."""
    return _norm(launcher, x, Kind(weight, eps, centred=True, bias=bias))


def add_layer_norm(
    launcher: KernelLauncher, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Add x to the residual, then centre and normalise. Return the normalised values and the sum.

    The sum overwrites `residual` if `residual` is contiguous.
    """
    return _add_norm(launcher, x, residual, Kind(weight, eps, centred=True, bias=bias))


def _norm(launcher: KernelLauncher, x: Tensor, kind: Kind) -> Tensor:
    shape = x.shape
    if x.dim() not in (2, 3):
        x = x.reshape(-1, shape[-1])
    return _launch(launcher, contiguous_tokens(x), None, kind).view(shape)


def _add_norm(launcher: KernelLauncher, x: Tensor, residual: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    residual = residual.contiguous()
    return _launch(launcher, contiguous_tokens(x), residual, kind), residual


def _launch(launcher: KernelLauncher, x: Tensor, residual: Tensor | None, kind: Kind) -> Tensor:
    size = x.shape[-1]
    out = launcher.empty(x.shape, x.dtype)
    operands = Norm(
        x=address(x),
        residual=address(residual),
        weight=address(kind.weight),
        bias=address(kind.bias),
        out=address(out),
        tokens=launcher.tokens(x),
        lines=x.shape[1] if x.dim() == 3 else 1,
        stride=x.stride(0),
        size=size,
        weight_stride=size if kind.weight.dim() == 2 else 0,
        centred=kind.centred,
        eps=kind.eps,
        offset=float(kind.unit_offset),
    )
    launcher.launch("norm", x.dtype, operands)
    return out


def add(launcher: KernelLauncher, x: Tensor, y: Tensor, *, scale: float = 1.0, gate: Tensor | None = None) -> Tensor:
    """Add x to y, in place if y is contiguous."""
    x, y = x.contiguous(), y.contiguous()
    gate = None if gate is None else gate.contiguous()
    operands = Add(
        x=address(x),
        y=address(y),
        gate=address(gate),
        tokens=launcher.tokens(x),
        size=x.shape[1],
        scale=scale,
    )
    launcher.launch("add", x.dtype, operands)
    return y
