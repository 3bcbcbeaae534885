"""The feed-forward part of a block."""

from __future__ import annotations

from torch import Tensor, nn

from ops.select import Kernels
from runtime.layers.linear import Linear, SubLayer


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), gate and up in one product."""

    def __init__(
        self, name: str, size: int, inner_size: int, activation: str, kernels: Kernels, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.activation = activation
        self.kernels = kernels
        gate, up = (SubLayer(f"{name}.{part}", inner_size, "mlp") for part in ("gate_proj", "up_proj"))
        self.gate_up = Linear(size, (gate, up), kernels, bias=bias)
        self.down = Linear(
            inner_size, [SubLayer(f"{name}.down_proj", size)], kernels, bias=bias, in_axis="mlp"
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.kernels.gate(self.gate_up(x), self.activation))
