"""The training loop in plain torch, for CPU and GPU. It can resume from a checkpoint.

Matrices are trained with Muon, other parameters with AdamW. Muon: K. Jordan et al., 2024, "Muon: an optimizer for
hidden layers in neural networks". It replaces the momentum of a matrix with the nearest orthogonal matrix, which a
quintic Newton-Schulz iteration computes. Matrices of the same shape are processed together.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from demo_model.corpus import Layout, Mixture
from demo_model.network import Group, Network, Shape

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # the paper's quintic: steep at zero, with values kept near one


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
    """Muon: momentum, orthogonalised per matrix. The update is scaled to the size of an AdamW update."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: defaultdict[torch.Size, list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
            for weight in group["params"]:
                if weight.grad is not None:
                    by_shape[weight.shape].append((weight, self._looked_ahead(weight, weight.grad, group)))
            for shape, pairs in by_shape.items():
                scale = 0.2 * max(shape) ** 0.5  # gives the update the same root mean square as an AdamW update
                steps = orthogonalise(torch.stack([update for _, update in pairs]))
                for (weight, _), update in zip(pairs, steps, strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(update.to(weight.dtype), alpha=-group["lr"] * scale)

    def _looked_ahead(self, weight: nn.Parameter, gradient: Tensor, group: dict[str, float]) -> Tensor:
        """Return the Nesterov momentum: the gradient, moved towards its running mean."""
        velocity = self.state[weight].setdefault("velocity", torch.zeros_like(weight))
        velocity.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(velocity, group["momentum"])


@dataclass(frozen=True)
class Schedule:
    """Length and learning rate of a run. Training ends at `steps`, or after `minutes` (0: no time limit)."""

    steps: int = 5000
    minutes: float = 0.0
    tokens_per_step: int = 4096
    learnt_per_step: int = 2560
    matrix_lr: float = 3e-3
    other_lr: float = 3e-3
    weight_decay: float = 0.05
    warm_up: float = 0.02  # fraction of the run in which the rate rises
    decay: float = 0.45  # fraction of the run, at its end, in which the rate falls to 0

    def rate(self, progress: float) -> float:
        """Return the factor of the learning rates at a progress from 0 to 1: rising, constant, then falling to 0."""
        if progress < self.warm_up:
            return (progress + 1e-3) / (self.warm_up + 1e-3)
        return min(1.0, max(0.0, (1 - progress) / self.decay))


class Trainer:
    """The network, the optimisers and the progress of one run."""

    def __init__(self, shape: Shape, schedule: Schedule, device: str, compiled: bool) -> None:
        self.shape, self.schedule, self.device = shape, schedule, device
        self.network = Network(shape).to(device)
        named = list(self.network.named_parameters())
        matrices = [weight for name, weight in named if weight.dim() == 2 and "embed" not in name]
        others = [weight for name, weight in named if weight.dim() != 2 or "embed" in name]
        self.muon = Muon(matrices, schedule.matrix_lr, 0.95, schedule.weight_decay)
        self.adam = torch.optim.AdamW(others, schedule.other_lr, betas=(0.9, 0.98), weight_decay=0.0)
        self.step = 0
        self.seconds = 0.0
        if compiled:
            for block in self.network.layers:
                block.before = torch.compile(block.before)  # type: ignore[assignment,arg-type]
                block.after = torch.compile(block.after)  # type: ignore[assignment,arg-type]
            self.network.loss = torch.compile(self.network.loss)  # type: ignore[method-assign]

    @property
    def progress(self) -> float:
        """Fraction of the run that is complete, by steps or by time, whichever is larger."""
        by_clock = self.seconds / (self.schedule.minutes * 60) if self.schedule.minutes else 0.0
        return max(self.step / self.schedule.steps, by_clock)

    def run(self, mixture: Mixture) -> Iterator[float]:
        """Train to the end, and yield the loss of every step."""
        while self.progress < 1:
            began = time.monotonic()
            layout = mixture.step(self.schedule.tokens_per_step, self.schedule.learnt_per_step)
            loss = self._train(layout)
            self.step += 1
            self.seconds += time.monotonic() - began
            yield loss

    def _train(self, layout: Layout) -> float:
        rate = self.schedule.rate(self.progress)
        for optimiser, peak in ((self.muon, self.schedule.matrix_lr), (self.adam, self.schedule.other_lr)):
            for group in optimiser.param_groups:
                group["lr"] = peak * rate
        loss = self.loss(layout)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.adam.param_groups[0]["params"], 1.0)
        for optimiser in (self.muon, self.adam):
            optimiser.step()
            optimiser.zero_grad()
        return loss.item()

    def loss(self, layout: Layout) -> Tensor:
        """Return the mean loss over the tokens to learn in one step."""
        tokens, positions, learnt_index, targets = (
            torch.from_numpy(array).to(self.device)
            for array in (layout.tokens, layout.positions, layout.learnt_index, layout.targets)
        )
        groups = [Group(rows, length) for rows, length in layout.groups]
        with torch.autocast(self.device, torch.bfloat16):
            hidden = self.network(tokens, positions, groups)
            return self.network.loss(hidden[learnt_index], targets)

    def save(self, path: Path) -> None:
        """Write everything that is needed to resume. The file is replaced atomically."""
        state = {
            "shape": asdict(self.shape),
            "schedule": asdict(self.schedule),
            "network": self.network.state_dict(),
            "muon": self.muon.state_dict(),
            "adam": self.adam.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
        }
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def restore(self, path: Path, fresh_clock: bool = False) -> None:
        """Continue from a checkpoint. With `fresh_clock`, keep only weights and momenta, for a new schedule."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.network.load_state_dict(state["network"])
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
        if not fresh_clock:
            self.step, self.seconds = state["step"], state["seconds"]


def shape_of(path: Path) -> Shape:
    """Return the shape of a saved network."""
    return replace(Shape(), **torch.load(path, map_location="cpu", weights_only=True)["shape"])
