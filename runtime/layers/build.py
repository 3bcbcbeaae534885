"""Objects and options that all layers of one model need while they are built."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ops.select import Kernels
from runtime.layers.expert_sharing import ExpertSharing
from runtime.layers.quantization import QuantizationMethod, Unquantized
from runtime.layers.rope import Rope
from runtime.layers.rope_parameters import RopeParameters


@dataclass(frozen=True, slots=True)
class Build:
    """Objects and options for building layers. Layers with equal rope parameters share one rotary table."""

    kernels: Kernels
    context_length: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    quantization: QuantizationMethod = field(default_factory=Unquantized)
    ropes: dict[RopeParameters, Rope] = field(default_factory=dict)
    state_dtype: str = "float32"  # dtype of the states of recurrent layers
    always_absorbed: bool = False  # whether latent attention uses absorption for rows of any length
    experts: ExpertSharing | None = None  # None: every rank has all experts, and routing is not recorded

    def rope(self, parameters: RopeParameters) -> Rope:
        if parameters not in self.ropes:
            self.ropes[parameters] = Rope(parameters, self.context_length, self.kernels, self.device)
        return self.ropes[parameters]
