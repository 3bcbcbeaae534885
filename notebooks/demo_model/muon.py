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
            by_shape: defaultdict[torch.Size, list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
            for weight in group["params"]:
                if weight.grad is not None:
                    by_shape[weight.shape].append((weight, self._looked_ahead(weight, weight.grad, group)))
            for shape, pairs in by_shape.items():
                scale = 0.2 * max(shape) ** 0.5  # root mean square of the step equals that of AdamW
                steps = orthogonalise(torch.stack([update for _, update in pairs]))
                for (weight, _), update in zip(pairs, steps, strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(update.to(weight.dtype), alpha=-group["lr"] * scale)

    def _looked_ahead(self, weight: nn.Parameter, gradient: Tensor, group: dict[str, float]) -> Tensor:
        """Nesterov's momentum: the gradient moved towards its running mean."""
        velocity = self.state[weight].setdefault("velocity", torch.zeros_like(weight))
        velocity.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(velocity, group["momentum"])
