"""Feed-forward layers."""

from __future__ import annotations

from torch import Tensor, nn

from runtime.layers.build import Build
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.linear import Linear
from runtime.layers.weight import SubLayer, in_one_tensor


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)). `fused` names the checkpoint tensor that holds gate and up together."""

    def __init__(
        self,
        name: str,
        size: int,
        inner_size: int,
        activation: str,
        build: Build,
        *,
        bias: bool = False,
        fused: str | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.kernels = build.kernels
        halves = [SubLayer(f"{name}.{part}", inner_size, "mlp") for part in ("gate_proj", "up_proj")]
        if fused is not None:
            halves = in_one_tensor(f"{name}.{fused}", halves)
        self.gate_up = Linear(size, halves, build, bias=bias)
        self.down = Linear(inner_size, [SubLayer(f"{name}.down_proj", size)], build, bias=bias, in_axis="mlp")

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Return the output of the layer, x [T, E] -> [T, E]."""
        inner, group = self.gate_up(x, batch), self.down.row_group
        if group is None:
            return self.down(self.kernels.gate(inner, self.activation), batch)
        return self.down(self.kernels.gate_round(inner, self.activation, group), batch)

    @property
    def first_product(self) -> Linear:
        """The linear layer that reads the input. The norm before it may round this input (`RMSNorm.round_for`)."""
        return self.gate_up


class MLP(nn.Module):
    """down(activation(up(x))), without a gate. `names` are the checkpoint's names of up and down."""

    def __init__(
        self,
        name: str,
        size: int,
        inner_size: int,
        activation: str,
        build: Build,
        *,
        names: tuple[str, str] = ("up_proj", "down_proj"),
        bias: bool = False,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.kernels = build.kernels
        up, down = names
        self.up = Linear(size, [SubLayer(f"{name}.{up}", inner_size, "mlp", transposed=transposed)], build, bias=bias)
        self.down = Linear(
            inner_size,
            [SubLayer(f"{name}.{down}", size, transposed=transposed)],
            build,
            bias=bias,
            in_axis="mlp",
        )

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Return the output of the layer, x [T, E] -> [T, E]."""
        return self.down(self.kernels.activate(self.up(x, batch), self.activation), batch)

    @property
    def first_product(self) -> Linear:
        """The linear layer that reads the input. The norm before it may round this input (`RMSNorm.round_for`)."""
        return self.up
