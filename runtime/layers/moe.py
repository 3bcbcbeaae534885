"""A mixture of experts in the place of a feed-forward layer."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from runtime.layers.build import Build
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.linear import Linear
from runtime.layers.sharding import TensorParallelGroup, shard_range, whole_range
from runtime.layers.weight import Shard, SubLayer, parameter


class MoE(nn.Module):
    """x [T, E] -> [T, E]: a router sends each token to `top_k` of the experts, each a gated MLP.

    Experts are weighted by the softmax of the router's logits, with `renormalise` divided by their sum. The router
    is never quantised: a rounded logit is another expert. Cut over ranks, each holds its part of every expert's inner
    dimension, and the sum over ranks is everybody's.
    """

    def __init__(
        self,
        name: str,
        size: int,
        inner_size: int,
        num_experts: int,
        top_k: int,
        activation: str,
        build: Build,
        *,
        renormalise: bool,
    ) -> None:
        super().__init__()
        self.name = name
        self.size = size
        self.num_experts = num_experts
        self.top_k = top_k
        self.activation = activation
        self.renormalise = renormalise
        self.kernels = build.kernels
        self.router = Linear(size, [SubLayer(f"{name}.gate", num_experts)], build, quantized=False)
        self._inner = whole_range(inner_size)
        self._summed_over: TensorParallelGroup | None = None
        self.gate_up = parameter(num_experts * 2 * inner_size, size)  # [X * 2F, E]
        self.down = parameter(num_experts * size, inner_size)  # [X * E, F]

    def split(self, group: TensorParallelGroup) -> None:
        """Keep this rank's part of every expert; the router stays whole."""
        self._inner = shard_range("mlp", self._inner.full, 1, group.rank, group.size)
        inner_size = self._inner.size
        self.gate_up = parameter(self.num_experts * 2 * inner_size, self.size)
        self.down = parameter(self.num_experts * self.size, inner_size)
        if not self._inner.whole:
            self._summed_over = group

    def shards(self) -> Iterator[Shard]:
        inner, outer = self._inner, whole_range(self.size)
        for expert in range(self.num_experts):
            name = f"{self.name}.experts.{expert}"
            for half, part in enumerate(("gate_proj", "up_proj")):
                row = (2 * expert + half) * inner.size
                weight = f"{name}.{part}.weight"
                yield Shard(weight, self.gate_up, row, inner.size, ("mlp", None), (inner, outer))
            row = expert * self.size
            yield Shard(f"{name}.down_proj.weight", self.down, row, self.size, (None, "mlp"), (outer, inner))

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, E] -> [T, E]."""
        logits = self.router(x, batch)
        weights, experts = self.kernels.route(logits, self.top_k, renormalise=self.renormalise)
        gate_up = self.gate_up.view(self.num_experts, -1, self.size)
        down = self.down.view(self.num_experts, self.size, -1)
        mixed = self.kernels.mix(x, gate_up, down, weights, experts, self.activation)
        return mixed if self._summed_over is None else self._summed_over.all_reduce(mixed)
