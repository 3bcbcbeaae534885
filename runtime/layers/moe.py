"""Mixture-of-experts layer."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ops.moe import GroupedMixture, Grouping, Mixture
from runtime.layers.build import Build
from runtime.layers.expert_changes import ExpertChange, mix_changed
from runtime.layers.expert_sharing import ExpertSharing
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.linear import Linear
from runtime.layers.quantization import LinearLayout, QuantizationMethod
from runtime.layers.sharding import ShardRange, TensorParallelGroup, shard_range, whole_range
from runtime.layers.weight import Shard, SubLayer, Weighted, frozen, parameter


class ExpertNames(NamedTuple):
    """Checkpoint names of the tensors of an MoE layer, and their layout.

    If the names of gate, up and down contain "{}" (the place of the expert's number), each expert has its own tensors.
    Otherwise one tensor holds all experts in its first dimension. Gate and up are then halves of one tensor: the first
    and the remaining rows or, if `interleaved`, alternate rows. `transposed` tensors hold outputs as columns. A bias
    has the weight's name without ".weight", followed by `bias`. If `bias` or `correction` is "", there is none.
    """

    router: str = "gate"
    gate: str = "experts.{}.gate_proj.weight"
    up: str = "experts.{}.up_proj.weight"
    down: str = "experts.{}.down_proj.weight"
    bias: str = ""
    correction: str = ""  # bias that is added to scores when experts are chosen, but not to the routing weights
    correction_in_line: bool = False  # whether the checkpoint stores `correction` as [1, X] instead of [X]
    interleaved: bool = False
    transposed: bool = False


BLOCK = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")  # finds the layer's number in a module's name
NAMES = ExpertNames()
TOGETHER = {  # names of tensors that hold all experts, as transformers 5 writes them
    "gate": "experts.gate_up_proj",
    "up": "experts.gate_up_proj",
    "down": "experts.down_proj",
}


class Routing(NamedTuple):
    """How the experts of a token are chosen and weighted (see `ops.moe`)."""

    top_k: int
    renormalise: bool
    scoring: str = "softmax"
    grouping: Grouping | None = None
    scale: float = 1.0
    wide: bool = False  # whether logits stay in float32 instead of being rounded to the model's dtype
    bias: bool = False  # whether the router has a bias
    weigh_inputs: bool = False  # whether the routing weights multiply the experts' inputs instead of their outputs


class KeptExperts(Weighted):
    """`gate_up` or `down` of all experts of an MoE layer, quantised as in the checkpoint."""

    def __init__(self, method: QuantizationMethod, layout: LinearLayout) -> None:
        super().__init__()
        self._method, self._layout = method, layout
        method.allocate(self, layout)

    def shards(self) -> Iterator[Shard]:
        return self._method.shards(self, self._layout)


class MoE(Weighted):
    """Maps x [T, E] to [T, E]. A router sends each token to some of the experts; each expert is a gated MLP.

    The router is never quantised, because a rounded logit may select another expert. The `shared` expert processes
    every token; its output is multiplied by the sigmoid of `shared_gate`. With tensor parallelism each rank holds a
    shard of every expert's inner dimension, and an all-reduce adds the outputs. With expert parallelism
    (`ExpertSharing`) the ranks are divided into parts. Each part holds some of the experts, and the ranks of a part
    divide the inner dimension of its experts.
    """

    def __init__(
        self,
        name: str,
        size: int,
        inner_size: int,
        num_experts: int,
        activation: str,
        build: Build,
        *,
        routing: Routing,
        names: ExpertNames = NAMES,
        shared: nn.Module | None = None,
        shared_gate: str | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.size = size
        self.num_experts = num_experts
        self.activation = activation
        self.routing = routing
        self.names = names
        self.alternates = names.interleaved  # whether the family's original checkpoints interleave gate and up rows
        self.changes: dict[int, ExpertChange] = {}  # adapter's slot -> its changes of these experts
        self.kernels = build.kernels
        self.method = build.quantization
        router = [SubLayer(f"{name}.{names.router}", num_experts)]
        self.router = Linear(size, router, build, bias=routing.bias, quantized=False)
        self.shared = shared
        self.shared_gate = None
        if shared_gate is not None:
            self.shared_gate = Linear(size, [SubLayer(f"{name}.{shared_gate}", 1)], build, quantized=False)
        self._inner = whole_range(inner_size)
        self._sharing = build.experts
        block = BLOCK.search(f"{name}.")
        self.layer_number = int(block[1]) if block else 0  # in the whole model
        self.row_group: int | None = None  # of the experts' first product; see `Linear.row_group`
        self._is_part = False  # whether this rank holds only some of the experts
        self._inner_rank = 0  # index of this rank among the ranks that divide the inner dimension of its experts
        self._summed_over: TensorParallelGroup | None = None
        self.allocate()

    def allocate(self) -> None:
        """Create this rank's parameters for the checkpoint to fill."""
        experts, inner, has_bias = len(self.local_experts), self._inner.size, bool(self.names.bias)
        layouts = self._layouts()
        rows = 0 if layouts else experts  # weights that stay quantised are in `kept` instead
        self.gate_up = parameter(rows * 2 * inner, self.size)  # [X * 2F, E]
        self.down = parameter(rows * self.size, inner)  # [X * E, F]
        self.kept = nn.ModuleList(KeptExperts(self.method, layout) for layout in layouts)
        self.gate_up_bias = parameter(experts * 2 * inner) if has_bias else None
        self.down_bias = parameter(experts * self.size) if has_bias else None
        self.correction = parameter(self.num_experts, dtype=torch.float32) if self.names.correction else None

    def follow(self, stored: Container[str]) -> None:
        """Change `names` if the checkpoint's tensors have other names than the family's original checkpoints.

        The checkpoint has one tensor for all experts, or one per expert. Quantisation tools write one per expert, under
        the usual names, for every family.
        """
        if "{}" in self.names.gate and any(f"{self.name}.{name}" in stored for name in TOGETHER.values()):
            self.names = self.names._replace(**TOGETHER)
            self.allocate()
        elif self.names.gate != NAMES.gate and f"{self.name}.{NAMES.gate.format(0)}" in stored:
            separate = {"gate": NAMES.gate, "up": NAMES.up, "down": NAMES.down}
            bias = ".bias" if self.names.bias else ""
            self.names = self.names._replace(**separate, bias=bias, interleaved=False, transposed=False)
            self.allocate()

    def split(self, group: TensorParallelGroup) -> None:
        """Keep this rank's experts, and its shard of each expert. The router is not split."""
        num_parts = 1
        if self._sharing is not None and self._sharing.is_shared:
            num_parts, self._is_part = self._sharing.axis.size, True
        within = group.size // num_parts
        self._inner_rank = group.rank % within
        self._inner = shard_range("mlp", self._inner.full, 1, self._inner_rank, within)
        self.allocate()
        if self._is_part or not self._inner.whole:
            self._summed_over = group

    @property
    def local_experts(self) -> Sequence[int]:
        """Indices of this rank's experts, in the order of its weights. An expert may occur several times."""
        if self._sharing is None or not self._is_part:
            return range(self.num_experts)
        return self._sharing.placement(self.layer_number, self.num_experts).of_rank(self._sharing.axis.rank)

    def recorded(self, count: int) -> Tensor | None:
        """Return the experts chosen in the last step, int32 [count, k], or None if they are not recorded."""
        return None if self._sharing is None else self._sharing.remembered(self.layer_number, count)

    @property
    def weights(self) -> Mixture:
        """The prepared weights of this rank's experts."""
        return Mixture(self.gate_up, self.down, self.gate_up_bias, self.down_bias)

    @property
    def inner(self) -> ShardRange:
        """This rank's part of the experts' inner dimension."""
        return self._inner

    @property
    def takes_adapters(self) -> bool:
        """Whether adapters can change the experts: the kernels can unpack a single expert. Valid after `prepare`."""
        try:
            self.kernels.one_expert(Mixture(self.gate_up, self.down), 0, self.size, self._inner.size)
        except ValueError:
            return False
        return True

    def _layouts(self) -> list[LinearLayout]:
        """Return the layouts of `gate_up` and `down` if both stay quantised as in the checkpoint, else []."""
        names, inner, outer = self.names, self._inner, whole_range(self.size)
        if names.transposed or not all("{}" in name for name in (names.gate, names.up, names.down)):
            return []

        def sub_layer(name: str, expert: int, axis: str | None) -> SubLayer:
            full = f"{self.name}.{name.format(expert)}".removesuffix(".weight")
            return SubLayer(full, inner.full if axis else self.size, axis)

        experts = self.local_experts
        gates = tuple(sub_layer(name, each, "mlp") for each in experts for name in (names.gate, names.up))
        downs = tuple(sub_layer(names.down, each, None) for each in experts)
        layouts = [
            LinearLayout(gates, (inner,) * len(gates), outer, None),
            LinearLayout(downs, (outer,) * len(downs), inner, "mlp"),
        ]
        return layouts if all(map(self.method.keeps_experts, layouts)) else []

    def shards(self) -> Iterator[Shard]:
        names, outer = self.names, whole_range(self.size)
        if self.correction is not None:
            ranges = (whole_range(self.num_experts),)
            name = f"{self.name}.{names.correction}"
            shard = Shard(name, self.correction, 0, self.num_experts, (None,), ranges)
            yield shard._replace(index=0, count=1) if names.correction_in_line else shard
        for place, expert in enumerate(self.local_experts):
            yield from self._expert(place, expert, outer)

    def _expert(self, place: int, expert: int, outer: ShardRange) -> Iterator[Shard]:
        names, inner = self.names, self._inner
        for half, name in enumerate((names.gate, names.up)):
            row, rows, step = (2 * place + half) * inner.size, inner, 1
            if names.interleaved:
                step = 2
            elif names.gate == names.up:
                rows = ShardRange(half * inner.full + inner.start, inner.size, 2 * inner.full)
            ranges, offset = (rows, outer), half if names.interleaved else 0
            weight = Shard(name, self.gate_up, row, inner.size, ("mlp", None), ranges, offset=offset, step=step)
            if not self.kept:
                yield self._in_checkpoint(weight, expert)
            if self.gate_up_bias is not None:
                yield self._in_checkpoint(weight._replace(parameter=self.gate_up_bias, ranges=(rows,)), expert)
        row, ranges = place * self.size, (outer, inner)
        weight = Shard(names.down, self.down, row, self.size, (None, "mlp"), ranges)
        if not self.kept:
            yield self._in_checkpoint(weight, expert)
        if self.down_bias is not None:
            yield self._in_checkpoint(weight._replace(parameter=self.down_bias, ranges=(outer,)), expert)

    def _in_checkpoint(self, shard: Shard, expert: int) -> Shard:
        """Return the shard with the full tensor name and, if the tensor holds all experts, the expert's index."""
        name, is_weight = shard.name, len(shard.ranges) == 2
        if not is_weight:
            name = name.removesuffix(".weight") + self.names.bias
        if "{}" in name:
            return shard._replace(name=f"{self.name}.{name.format(expert)}")
        transposed = self.names.transposed and is_weight
        return shard._replace(name=f"{self.name}.{name}", index=expert, count=self.num_experts, transposed=transposed)

    def prepare(self) -> None:
        experts, bias, down_bias = len(self.local_experts), self.gate_up_bias, self.down_bias
        if down_bias is not None and self._inner_rank > 0:
            down_bias.zero_()  # the all-reduce must add the bias once, so only the first rank of a part keeps it
        biases = [None if each is None else each.view(experts, -1) for each in (bias, down_bias)]
        if self.kept:
            gate_up, down = (self.method.take(each).of_experts(experts) for each in self.kept)
            mixture = GroupedMixture(gate_up, down, *biases)
            prepared = self.kernels.prepare_grouped_experts(mixture, self.gate_up.dtype)
        else:
            gate_up, down = self.gate_up.view(experts, -1, self.size), self.down.view(experts, self.size, -1)
            prepared = self.method.prepare_experts(Mixture(gate_up, down, *biases), self.kernels)
        self.gate_up, self.down = frozen(prepared.gate_up), frozen(prepared.down)
        self.row_group = self.kernels.row_group(self.gate_up)
        self.gate_up_bias, self.down_bias = (
            None if each is None else frozen(each) for each in (prepared.gate_up_bias, prepared.down_bias)
        )

    @property
    def first_product(self) -> MoE:
        """The layer that reads the input. The norm before it may round this input (`RMSNorm.round_for`)."""
        return self

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Return the weighted sum of the experts' outputs, x [T, E] -> [T, E]."""
        routing, kernels = self.routing, self.kernels
        logits = self.router.logits(x, batch) if routing.wide else self.router(x, batch)
        weights, experts = kernels.route(
            logits,
            routing.top_k,
            renormalise=routing.renormalise,
            scoring=routing.scoring,
            bias=self.correction,
            grouping=routing.grouping,
            scale=routing.scale,
        )
        if self._sharing is None:
            mixed = self._mix(x, weights, experts, batch)
            if self._summed_over is not None:
                mixed = self._summed_over.all_reduce(mixed)
        else:
            mixed = self._mix_shared(self._sharing, x, weights, experts, batch)
        if self.shared is None:
            return mixed
        gate = None if self.shared_gate is None else self.shared_gate(x, batch)
        return kernels.add(self.shared(x, batch), mixed, gate=gate)

    def _mix_shared(
        self, sharing: ExpertSharing, x: Tensor, weights: Tensor, experts: Tensor, batch: ForwardBatch
    ) -> Tensor:
        """Return the experts' output [T, E] in the case of expert parallelism, or if chosen experts are recorded."""
        chosen = sharing.choose(self.layer_number, experts, self.num_experts)
        if sharing.records:
            sharing.remember(self.layer_number, chosen)
        here = sharing.here(self.layer_number, chosen, self.num_experts)
        if sharing.exchanges(x) and not batch.adapted and not batch.in_graph:
            mix = partial(self._mix_tokens, x, weights, here, batch)
            return sharing.combine(self.layer_number, chosen, self.num_experts, mix)
        mixed = self._mix(x, weights, here, batch)
        return mixed if self._summed_over is None else self._summed_over.all_reduce(mixed)

    def _mix_tokens(self, x: Tensor, weights: Tensor, here: Tensor, batch: ForwardBatch, tokens: Tensor) -> Tensor:
        return self._mix(x[tokens], weights[tokens], here[tokens], batch)

    def _mix(self, x: Tensor, weights: Tensor, experts: Tensor, batch: ForwardBatch) -> Tensor:
        """Return this rank's part of the output [T, E]. `experts` are indices into `local_experts`, or -1."""
        routing, mixture = self.routing, self.weights
        mixed = self.kernels.mix(x, mixture, weights, experts, self.activation, weigh_inputs=routing.weigh_inputs)
        for slot, tokens in batch.adapted.items() if self.changes else ():
            change = self.changes.get(slot)
            if change is not None:
                mixed[tokens] = mix_changed(
                    x[tokens],
                    mixture,
                    weights[tokens],
                    experts[tokens],
                    self.activation,
                    change,
                    self.kernels,
                    numbers=self.local_experts,
                    inner_size=self.inner.size,
                    weigh_inputs=routing.weigh_inputs,
                )
        return mixed


def mixtures(model: nn.Module) -> dict[int, MoE]:
    """Return the MoE layers of a model. The keys are layer numbers in the whole model."""
    return {module.layer_number: module for module in model.modules() if isinstance(module, MoE)}
