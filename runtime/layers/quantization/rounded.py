"""Weights of 8 or 4 bits, rounded while they are loaded: the checkpoint is an ordinary one."""

from __future__ import annotations

from torch import Tensor

from ops.matmul.grouped import round_experts, round_to_groups
from ops.moe import GroupedMixture, Mixture
from ops.select import Kernels
from runtime.layers.quantization.method import Unquantized

GROUP = 32


class W8A8Int8(Unquantized):
    """Each output's weights are rounded with a scale of their own, the head's too.

    Kernels that multiply in 8 bits round each token's activations as well.
    """

    def prepare_weight(self, weight: Tensor, kernels: Kernels) -> Tensor:
        return kernels.prepare(weight, bits=8)

    def prepare_experts(self, mixture: Mixture, kernels: Kernels) -> Mixture:
        return kernels.prepare_experts(mixture, bits=8)


class W4A16(Unquantized):
    """Groups of 32 inputs of a row are rounded with a scale of their own, the head's and experts' too.

    Rows that groups do not fill stay unquantised, and activations as they are.
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
            round_experts(weight, GROUP)._replace(rounded_rows=self.rounded_rows)
            for weight in (gate_up, down)
        )
        return kernels.prepare_grouped_experts(GroupedMixture(gate_up, down, *biases), dtype)


class W4A8(W4A16):
    """As `W4A16`; where the kernels in C++ run, each token's activations are rounded before a product.

    They have 8 bits and a scale for each token.
    """

    rounded_rows = True


METHODS = {"w4a16": W4A16, "w4a8": W4A8, "w8a8_int8": W8A8Int8}
