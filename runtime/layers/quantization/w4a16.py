"""Weights of 4 bits in groups of 32 inputs, rounded here: the checkpoint is an ordinary one.

Activations stay as they are, or have 8 bits with a scale for each token (`w4a8`) where the kernels in C++ run.
"""

from __future__ import annotations

from torch import Tensor

from ops.matmul.grouped import round_experts, round_to_groups
from ops.moe import GroupedMixture, Mixture
from ops.select import Kernels
from runtime.layers.quantization.method import Unquantized

GROUP = 32


class W4A16(Unquantized):
    """Groups of a row are rounded with a scale of their own when they are loaded, the head's and experts' too.

    Rows that groups do not fill stay unquantised.
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


METHOD = W4A16
