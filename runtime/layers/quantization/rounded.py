"""Quantisation methods that round weights to 8 or 4 bits while they are loaded."""

from __future__ import annotations

from torch import Tensor, nn

from ops.matmul.grouped import round_experts, round_to_float8, round_to_groups
from ops.moe import GroupedMixture, Mixture
from ops.select import Kernels
from runtime.layers.quantization.method import Unquantized
from runtime.layers.weight import frozen

GROUP = 32


class W8A8Int8(Unquantized):
    """Rounds weights to 8 bits with one scale per output, LM head included.

    Kernels that multiply in 8 bits also round each token's activations.
    """

    def prepare_weight(self, weight: Tensor, kernels: Kernels) -> Tensor:
        return kernels.prepare(weight, bits=8)

    def prepare_experts(self, mixture: Mixture, kernels: Kernels) -> Mixture:
        return kernels.prepare_experts(mixture, bits=8)


class W4A16(Unquantized):
    """Rounds weights to 4 bits with one scale per group of 32 inputs, LM head and experts included.

    Weights whose number of inputs is not a multiple of 32 stay unquantised. Activations are not rounded.
    """

    rounded_rows = False

    def prepare_weight(self, weight: Tensor, kernels: Kernels) -> Tensor:
        if weight.shape[1] % GROUP:
            return kernels.prepare(weight)
        rounded = round_to_groups(weight, GROUP)._replace(rounded_rows=self.rounded_rows)
        return kernels.prepare_grouped(rounded, weight.dtype)

    def prepare_experts(self, mixture: Mixture, kernels: Kernels) -> Mixture:
        gate_up, down, *biases = mixture
        if gate_up.shape[2] % GROUP or down.shape[2] % GROUP:
            return kernels.prepare_experts(mixture)
        dtype = gate_up.dtype
        gate_up, down = (
            round_experts(weight, GROUP)._replace(rounded_rows=self.rounded_rows) for weight in (gate_up, down)
        )
        return kernels.prepare_grouped_experts(GroupedMixture(gate_up, down, *biases), dtype)


class W4A8(W4A16):
    """Rounds weights like `W4A16`. The C++ kernels also round activations to 8 bits with one scale per token."""

    rounded_rows = True


class Float8(Unquantized):
    """Rounds the weights of linear layers and experts to e4m3, as `penstock quantize --method fp8` does.

    Each output has a scale in the model's dtype. The LM head stays unquantised. GPUs with float8 products also round
    each token's activations. Kernels that cannot read float8 dequantise the rounded weights.
    """

    def prepare(self, layer: nn.Module, kernels: Kernels) -> None:
        weight = layer.get_parameter("weight")
        layer.weight = frozen(kernels.prepare_grouped(round_to_float8(weight), weight.dtype))

    def prepare_experts(self, mixture: Mixture, kernels: Kernels) -> Mixture:
        gate_up, down, *biases = mixture
        rounded = GroupedMixture(round_to_float8(gate_up), round_to_float8(down), *biases)
        return kernels.prepare_grouped_experts(rounded, gate_up.dtype)


METHODS = {"w4a16": W4A16, "w4a8": W4A8, "w8a8_int8": W8A8Int8, "fp8": Float8, "w8a8_fp8": Float8}
