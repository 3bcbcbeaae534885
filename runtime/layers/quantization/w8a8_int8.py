"""Weights and activations of 8 bits, rounded here: the checkpoint is an ordinary one."""

from __future__ import annotations

from torch import Tensor

from ops.moe import Mixture
from ops.select import Kernels
from runtime.layers.quantization.method import Unquantized


class W8A8Int8(Unquantized):
    """Each output's weights are rounded with a scale of their own when they are loaded, the head's too.

    Kernels that multiply in 8 bits round each token's activations as well.
    """

    def prepare_weight(self, weight: Tensor, kernels: Kernels) -> Tensor:
        return kernels.prepare(weight, bits=8)

    def prepare_experts(self, mixture: Mixture, kernels: Kernels) -> Mixture:
        return kernels.prepare_experts(mixture, bits=8)


METHOD = W8A8Int8
