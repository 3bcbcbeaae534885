"""What the layers of one model are built with."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ops.select import Kernels
from runtime.layers.quantization import QuantizationMethod, Unquantized
from runtime.layers.rope import Rope
from runtime.layers.rope_parameters import RopeParameters


@dataclass(frozen=True, slots=True)
class Build:
    """The kernels, how weights are quantised, and the tables of angles, which layers with the same ones share."""

    kernels: Kernels
    context_length: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    quantization: QuantizationMethod = field(default_factory=Unquantized)
    ropes: dict[RopeParameters, Rope] = field(default_factory=dict)
    state_dtype: str = "float32"  # of recurrent layers
    always_absorbed: bool = False  # latent attention, that of long rows too

    def rope(self, parameters: RopeParameters) -> Rope:
        if parameters not in self.ropes:
            self.ropes[parameters] = Rope(parameters, self.context_length, self.kernels, self.device)
        return self.ropes[parameters]
