"""Muon for the matrices, AdamW for the rest.

Muon: K. Jordan et al., 2024, "Muon: an optimizer for hidden layers in neural networks": momentum, then the
nearest orthogonal matrix by a quintic Newton-Schulz iteration. Matrices of one shape are treated together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # the paper's quintic: slope large at zero, values kept near one


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Approximate the orthogonal factor of each matrix in [N, rows, columns], in bf16."""
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised per matrix; the step is scaled to the size of an AdamW step."""

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: defaultdict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for weight in group["params"]:
                by_shape[weight.shape].append(weight)
            for shape, weights in by_shape.items():
                self._step_alike(shape, weights, group)

    def _step_alike(self, shape: torch.Size, weights: list[nn.Parameter], group: dict) -> None:
        updates = []
        for weight in weights:
            state = self.state[weight]
            velocity = state.setdefault("velocity", torch.zeros_like(weight))
            velocity.lerp_(weight.grad, 1 - group["momentum"])
            updates.append(weight.grad.lerp(velocity, group["momentum"]))  # Nesterov's look-ahead
        scale = 0.2 * max(shape) ** 0.5  # root mean square of the step equals that of AdamW
        for weight, update in zip(weights, orthogonalise(torch.stack(updates)), strict=True):
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.add_(update.to(weight.dtype), alpha=-group["lr"] * scale)
