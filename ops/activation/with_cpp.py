"""Gates in C++."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ops.cpp.kernel_launcher import KernelLauncher
from ops.cpp.library import Gate, address

KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}  # as in `small.h`


def make(launcher: KernelLauncher) -> Mapping[str, Callable[..., Any]]:
    """`gate` (see `ops.activation`)."""

    def gate(x: Tensor, activation: str) -> Tensor:
        """Activate the first half and multiply it with the second."""
        x = x.contiguous()
        shape = (*x.shape[:-1], x.shape[-1] // 2)
        out = launcher.empty(shape, x.dtype)
        flat = x.view(-1, x.shape[-1])
        operands = Gate(address(x), address(out), launcher.tokens(flat), shape[-1], KINDS[activation])
        launcher.launch("gate", x.dtype, operands)
        return out

    return {"gate": gate}
