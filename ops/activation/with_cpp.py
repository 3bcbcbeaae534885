"""Activations in C++."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ops.activation.native import gate_round
from ops.cpp.kernel_launcher import KernelLauncher
from ops.cpp.library import address, contiguous_tokens
from ops.cpp.structures import Gate

NAMES = (  # in the order of `Activation` in `small.h`
    "silu",
    "gelu",
    "gelu_tanh",
    "relu",
    "relu2",
    "clamped_swiglu",
    "sigmoid",
)
KINDS = {name: kind for kind, name in enumerate(NAMES)}


def make(launcher: KernelLauncher) -> Mapping[str, Callable[..., Any]]:
    """Return all operations of `ops.activation`."""

    def gate(x: Tensor, activation: str) -> Tensor:
        """Return activation(first half) * second half."""
        gates, gated = x.contiguous().view(-1, x.shape[-1]).chunk(2, dim=-1)
        return launch(gates, gated, activation).view(*x.shape[:-1], gates.shape[1])

    def activate(x: Tensor, activation: str) -> Tensor:
        """Return activation(x)."""
        return launch(x.contiguous().view(-1, x.shape[-1]), None, activation).view(x.shape)

    def modulate(x: Tensor, gate: Tensor, activation: str) -> Tensor:
        """Return x * activation(gate)."""
        x, gate = contiguous_tokens(x), contiguous_tokens(gate)
        return launch(gate, x, activation)

    def launch(x: Tensor, gated: Tensor | None, activation: str) -> Tensor:
        out = launcher.empty(x.shape, x.dtype)
        operands = Gate(
            x=address(x),
            gated=address(gated),
            out=address(out),
            tokens=launcher.tokens(x),
            x_stride=x.stride(0),
            gated_stride=0 if gated is None else gated.stride(0),
            size=x.shape[1],
            kind=KINDS[activation],
        )
        launcher.launch("gate", x.dtype, operands)
        return out

    # torch computes `gate_round`, because C++ products do not read float8 rows.
    return {"gate": gate, "activate": activate, "modulate": modulate, "gate_round": gate_round}
