"""Activations in C++."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ops.activation.native import modulate
from ops.cpp.kernel_launcher import KernelLauncher
from ops.cpp.library import Gate, address

KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4, "clamped_swiglu": 5}  # as in `small.h`


def make(launcher: KernelLauncher) -> Mapping[str, Callable[..., Any]]:
    """`gate` and `activate` (see `ops.activation`); `modulate` is torch's."""

    def gate(x: Tensor, activation: str) -> Tensor:
        """Activate the first half and multiply it with the second."""
        return launch(x, activation, x.shape[-1] // 2, alone=False)

    def activate(x: Tensor, activation: str) -> Tensor:
        """Activate all of x."""
        return launch(x, activation, x.shape[-1], alone=True)

    def launch(x: Tensor, activation: str, size: int, *, alone: bool) -> Tensor:
        x = x.contiguous()
        out = launcher.empty((*x.shape[:-1], size), x.dtype)
        tokens = launcher.tokens(x.view(-1, x.shape[-1]))
        launcher.launch(
            "gate", x.dtype, Gate(address(x), address(out), tokens, size, KINDS[activation], alone)
        )
        return out

    return {"gate": gate, "activate": activate, "modulate": modulate}
