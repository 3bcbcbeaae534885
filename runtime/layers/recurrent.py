"""Recurrent layers, which keep one state per sequence instead of keys and values (see `ops.recurrence`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from ops.recurrence import Segments
from runtime.errors import CheckpointError
from runtime.layers.build import Build
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.linear import Linear, from_heads
from runtime.layers.norm import RMSNorm, norm_of_ranks
from runtime.layers.sharding import ShardRange, TensorParallelGroup, shard_range, whole_range
from runtime.layers.weight import Shard, SubLayer, Weighted, frozen, in_one_tensor, parameter, whole

KIND = "state"  # name of the cache kind


@dataclass(frozen=True, slots=True)
class StateSpec:
    """Description of a recurrent layer's cache per sequence: the past inputs of its convolution, and a state.

    `shape` and `dtype` describe the state. Tensor parallelism divides `units` (heads, groups or channels) among the
    ranks; the state's first dimension and the convolution's channels are split in proportion. Every rank holds the
    `common` channels.
    """

    inputs: tuple[int, int]  # (past tokens, channels)
    shape: tuple[int, ...]
    dtype: str
    units: int = 1
    common: int = 0
    kind: ClassVar[str] = KIND
    # The planned number of state slots is `min_slots`, plus one for each `tokens_per_slot` tokens of the page pool.
    min_slots: ClassVar[int] = 48
    tokens_per_slot: ClassVar[int] = 512

    def local(self, tp_rank: int, tp_size: int) -> StateSpec:
        """Return the spec of this tensor-parallel rank's shard."""
        units = shard_range("heads", self.units, 1, tp_rank, tp_size).size
        (past, channels), (heads, *inner) = self.inputs, self.shape
        local = self.common + (channels - self.common) * units // self.units
        return replace(self, inputs=(past, local), shape=(heads * units // self.units, *inner), units=units)

    @property
    def num_bytes(self) -> int:
        """Bytes cached per sequence. Inputs are stored in float32, which holds values of every model dtype exactly."""
        return 4 * prod(self.inputs) + getattr(torch, self.dtype).itemsize * prod(self.shape)

    def make(self, num_slots: int, device: torch.device) -> StateCache:
        return StateCache.zeros(self, num_slots, device)


class StateCache(NamedTuple):
    """The cache of one layer with N slots: the last inputs of the convolution [N, K - 1, C] and the states [N, ...]."""

    inputs: Tensor
    states: Tensor

    @classmethod
    def zeros(cls, spec: StateSpec, num_slots: int, device: torch.device) -> Self:
        inputs = torch.zeros(num_slots, *spec.inputs, dtype=torch.float32, device=device)
        return cls(inputs, torch.zeros(num_slots, *spec.shape, dtype=getattr(torch, spec.dtype), device=device))

    def run(self, recur: Recur, inputs: Sequence[Tensor], out_shape: Sequence[int], batch: ForwardBatch) -> Tensor:
        """Return the result of `recur` for `inputs`, which have one row per token of the batch."""
        return recur(inputs, self, segments_in(batch))

    @property
    def nbytes(self) -> int:
        return self.inputs.nbytes + self.states.nbytes


# The part of a layer that reads and writes states: (inputs, cache, segments) -> output.
Recur = Callable[[Sequence[Tensor], StateCache, Segments], Tensor]


@runtime_checkable
class RecurrentCache(Protocol):
    """The cache of a recurrent layer: a `StateCache`, or its replacement during the capture of prefill graphs."""

    def run(self, recur: Recur, inputs: Sequence[Tensor], out_shape: Sequence[int], batch: ForwardBatch) -> Tensor:
        """Return `recur(inputs, cache, segments)`, whose shape is `out_shape`; its dtype is that of `inputs[0]`."""
        ...


def state_cache(batch: ForwardBatch, index: int) -> RecurrentCache:
    """Return the state cache of layer `index`. Raises TypeError if the layer has another kind of cache."""
    cache = batch.cache[index]
    if not isinstance(cache, RecurrentCache):
        raise TypeError(f"Layer {index} keeps states, not {type(cache).__name__}.")
    return cache


def segments_in(batch: ForwardBatch) -> Segments:
    """Return the mapping from tokens to states. It is computed once per step and shared by all layers."""
    key, plan_cache = (__name__, "segments"), batch.attention.plan_cache
    if key not in plan_cache:
        inputs, captured = batch.kinds[KIND], batch.attention.replans is not None
        host = None if inputs.host is None else inputs.host["spans"]
        plan_cache[key] = Segments(
            inputs.arrays["spans"], host, captured, chained=inputs.chained, slots_known=inputs.is_exact
        )
    return plan_cache[key]


class Convolution(Weighted):
    """Weight [K, C] and optional bias [C] of a causal depthwise convolution.

    `parts` lists the sub-layers whose outputs are convolved. Each sub-layer is split over ranks separately.
    """

    def __init__(self, name: str, parts: Sequence[SubLayer], kernel: int, *, bias: bool = False) -> None:
        super().__init__()
        self._parts = in_one_tensor(name, parts)
        self._rows = [whole_range(each.size) for each in parts]
        self._kernel, self._has_bias = kernel, bias
        self.allocate()

    def allocate(self) -> None:
        channels = sum(rows.size for rows in self._rows)
        self.weight = parameter(channels, 1, self._kernel)  # in the checkpoint's layout until `prepare` transposes it
        self.bias = parameter(channels) if self._has_bias else None

    def split(self, group: TensorParallelGroup) -> None:
        """Keep this rank's channels of each part."""
        self._rows = [shard_range(each.axis, each.size, each.unit, group.rank, group.size) for each in self._parts]
        self.allocate()

    def shards(self) -> Iterator[Shard]:
        row = 0
        for part, rows in zip(self._parts, self._rows, strict=True):
            source, inner = part.in_tensor(rows), (whole_range(1), whole_range(self._kernel))
            yield Shard(f"{part.name}.weight", self.weight, row, rows.size, (part.axis, None, None), (source, *inner))
            if self.bias is not None:
                yield Shard(f"{part.name}.bias", self.bias, row, rows.size, (part.axis,), (source,))
            row += rows.size

    def prepare(self) -> None:
        self.weight = frozen(self.weight.squeeze(1).t().contiguous())


class GatedDeltaNet(Weighted):
    """Linear attention with a gated delta rule (arXiv 2412.06464): project, convolve, update and read states, gate.

    `index` is the layer's number in the model. `projections` lists the sub-layers of q, k, v, z, b and a in this order.
    q and k have G heads of `key_dim`, v and z have H heads of `value_dim`, and b and a have one number for each of the
    H heads. The projections of b and a, which control how the state changes, are never quantised.
    """

    def __init__(
        self,
        name: str,
        index: int,
        size: int,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        kernel: int,
        eps: float,
        build: Build,
        *,
        projections: Sequence[SubLayer],
    ) -> None:
        super().__init__()
        self.name = name
        self.index = index
        self.key_dim, self.value_dim = key_dim, value_dim
        self.kernels = build.kernels
        self._heads, self._ratio = whole_range(key_heads), value_heads // key_heads
        keys, values, unit = key_heads * key_dim, value_heads * value_dim, self._ratio * value_dim
        self.projections = Linear(size, projections[:4], build)
        self.gates = Linear(size, projections[4:], build, quantized=False)
        parts = [SubLayer("", channels, "heads", head) for channels, head in ((keys, key_dim),) * 2 + ((values, unit),)]
        self.convolution = Convolution(f"{name}.conv1d", parts, kernel)
        self.norm = RMSNorm(f"{name}.norm", value_dim, eps, build)
        self.out = Linear(values, [SubLayer(f"{name}.out_proj", size)], build, in_axis="heads", in_unit=unit)
        self.cache_spec = StateSpec(
            (kernel - 1, 2 * keys + values), (value_heads, key_dim, value_dim), build.state_dtype, key_heads
        )
        self.allocate()

    def allocate(self) -> None:
        keys, heads = self._heads.size * self.key_dim, self._heads.size * self._ratio
        values = heads * self.value_dim
        self._sizes, self._channels = (2 * keys + values, values), (keys, keys, values)
        self.rate, self.shift = (parameter(heads, dtype=torch.float32) for _ in range(2))

    def split(self, group: TensorParallelGroup) -> None:
        """Keep this rank's key heads and the value heads that belong to them. The linear layers are split separately.

        Raises CheckpointError if the heads cannot be divided evenly among ranks.
        """
        self._heads = evenly(self._heads.full, group)
        self.cache_spec = self.cache_spec.local(group.rank, group.size)
        self.allocate()

    def shards(self) -> Iterator[Shard]:
        rows = times(self._heads, self._ratio)
        yield whole(f"{self.name}.A_log", self.rate, ("heads",), rows)
        yield whole(f"{self.name}.dt_bias", self.shift, ("heads",), rows)

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Return the layer's output, x [T, E] -> [T, E], and store the states after the tokens in the cache."""
        mixed, z = self.projections(x, batch).split(self._sizes, dim=-1)
        b, a = self.gates(x, batch).chunk(2, dim=-1)
        shape = len(x), self._heads.size * self._ratio, self.value_dim
        out = state_cache(batch, self.index).run(self._recur, (mixed, a, b), shape, batch)
        return self.out(self.kernels.modulate(self.norm(out).flatten(1), z, "silu"), batch)

    def _recur(self, inputs: Sequence[Tensor], cache: StateCache, segments: Segments) -> Tensor:
        """Convolve, then update and read the states. Return [T, H, value_dim]."""
        (mixed, a, b), kernels, weights = inputs, self.kernels, self.convolution
        mixed = kernels.convolve(mixed, weights.weight, weights.bias, cache.inputs, segments)
        q, k, v = mixed.split(self._channels, dim=-1)
        q, k = (each.unflatten(-1, (-1, self.key_dim)) for each in (q, k))
        v = v.unflatten(-1, (-1, self.value_dim))
        return kernels.delta_rule(q, k, v, a, b, self.rate, self.shift, cache.states, segments)


class Mamba2(Weighted):
    """A selective state space (arXiv 2405.21060): project, convolve, scan, gate, normalise, project.

    `index` is the layer's number in the model. The heads of a group share B and C, and each group is normalised
    separately. `limits` are the lower and upper bound of the time step.
    """

    def __init__(
        self,
        name: str,
        index: int,
        size: int,
        heads: int,
        head_dim: int,
        groups: int,
        state_size: int,
        kernel: int,
        eps: float,
        build: Build,
        *,
        bias: bool,
        convolution_bias: bool,
        limits: tuple[float, float],
    ) -> None:
        super().__init__()
        self.name = name
        self.index = index
        self.head_dim, self.state_size, self.groups = head_dim, state_size, groups
        self.limits = limits
        self.kernels = build.kernels
        self.eps = eps
        self._heads, self._summed_over = whole_range(heads), None
        inner, shared = heads * head_dim, groups * state_size
        per_head = SubLayer("", inner, "heads", head_dim)
        # If there is only one group, the heads of all ranks need its B and C, so every rank holds them.
        per_group = SubLayer("", shared, None if groups == 1 else "heads", state_size)
        parts = in_one_tensor(
            f"{name}.in_proj", [per_head, per_head, per_group, per_group, SubLayer("", heads, "heads")]
        )
        self.projections = Linear(size, parts, build, bias=bias)
        self.convolution = Convolution(
            f"{name}.conv1d", [per_head, per_group, per_group], kernel, bias=convolution_bias
        )
        self.out = from_heads(f"{name}.out_proj", heads, head_dim, size, build, bias=bias)
        self.cache_spec = StateSpec(
            (kernel - 1, inner + 2 * shared),
            (heads, state_size, head_dim),
            build.state_dtype,
            units=heads if groups == 1 else groups,
            common=2 * shared if groups == 1 else 0,
        )
        self.allocate()

    def allocate(self) -> None:
        heads, shared = self._heads.size, self.groups * self.state_size
        inner = heads * self.head_dim
        self._channels, self._sizes = (inner, shared, shared), (inner, inner + 2 * shared, heads)
        self.norm_weight = parameter(inner)
        self.rate, self.shift, self.skip = (parameter(heads, dtype=torch.float32) for _ in range(3))

    def split(self, group: TensorParallelGroup) -> None:
        """Keep this rank's heads, and their groups if there are several. The linear layers are split separately.

        Raises CheckpointError if heads or groups cannot be divided evenly among ranks.
        """
        self._heads = evenly(self._heads.full, group)
        if self.groups == 1:
            self._summed_over = group
        else:
            self.groups = evenly(self.groups, group).size
        self.cache_spec = self.cache_spec.local(group.rank, group.size)
        self.allocate()

    def shards(self) -> Iterator[Shard]:
        channels = times(self._heads, self.head_dim)
        yield whole(f"{self.name}.norm.weight", self.norm_weight, ("heads",), channels)
        for part, numbers in (("A_log", self.rate), ("dt_bias", self.shift), ("D", self.skip)):
            yield whole(f"{self.name}.{part}", numbers, ("heads",), self._heads)

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Return the layer's output, x [T, E] -> [T, E], and store the states after the tokens in the cache."""
        z, mixed, dt = self.projections(x, batch).split(self._sizes, dim=-1)
        shape = len(x), self._heads.size, self.head_dim
        out = state_cache(batch, self.index).run(self._recur, (mixed, dt), shape, batch).flatten(1)  # [T, H * P]
        return self.out(self._normed(self.kernels.modulate(out, z, "silu")), batch)

    def _recur(self, inputs: Sequence[Tensor], cache: StateCache, segments: Segments) -> Tensor:
        """Convolve, then update and read the states. Return [T, H, P]."""
        (mixed, dt), kernels, weights = inputs, self.kernels, self.convolution
        mixed = kernels.convolve(mixed, weights.weight, weights.bias, cache.inputs, segments)
        values, b, c = mixed.split(self._channels, dim=-1)
        values = values.unflatten(-1, (-1, self.head_dim))
        b, c = (each.unflatten(-1, (-1, self.state_size)) for each in (b, c))
        low, high = self.limits
        return kernels.scan(
            values, dt, b, c, self.rate, self.shift, self.skip, cache.states, segments, low=low, high=high
        )

    def _normed(self, x: Tensor) -> Tensor:
        """Normalise x [T, H * P] per group. A single group spans the heads of all ranks."""
        if self._summed_over is not None:
            return norm_of_ranks(x, self.norm_weight, self.eps, self._summed_over)
        if self.groups == 1:
            return self.kernels.rms_norm(x, self.norm_weight, self.eps)
        weight = self.norm_weight.view(self.groups, -1)
        return self.kernels.rms_norm(x.unflatten(-1, (self.groups, -1)), weight, self.eps).flatten(1)


class ShortConvolution(Weighted):
    """A gated short convolution (LFM2): project to two gates and x, gate, convolve, gate, project.

    `index` is the layer's number in the model. Its cache holds only the last inputs of the convolution.
    """

    def __init__(self, name: str, index: int, size: int, kernel: int, build: Build, *, bias: bool = False) -> None:
        super().__init__()
        self.index = index
        self.kernels = build.kernels
        channels = SubLayer("", size, "heads")
        self.projections = Linear(size, in_one_tensor(f"{name}.in_proj", [channels] * 3), build, bias=bias)
        self.convolution = Convolution(f"{name}.conv", [channels], kernel, bias=bias)
        self.out = from_heads(f"{name}.out_proj", size, 1, size, build, bias=bias)
        self.cache_spec = StateSpec((kernel - 1, size), (0,), build.state_dtype, size)

    def split(self, group: TensorParallelGroup) -> None:
        """Keep this rank's channels. The linear layers are split separately."""
        self.cache_spec = self.cache_spec.local(group.rank, group.size)

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Return the layer's output, x [T, E] -> [T, E], and store the states after the tokens in the cache."""
        before, after, x = self.projections(x, batch).chunk(3, dim=-1)
        out = state_cache(batch, self.index).run(self._recur, (x, before, after), x.shape, batch)
        return self.out(out, batch)

    def _recur(self, inputs: Sequence[Tensor], cache: StateCache, segments: Segments) -> Tensor:
        """Convolve between the gates. Return [T, C]."""
        (x, before, after), weights = inputs, self.convolution
        return self.kernels.convolve(x, weights.weight, weights.bias, cache.inputs, segments, gates=(before, after))


def evenly(count: int, group: TensorParallelGroup) -> ShardRange:
    """Return this rank's range of `count` heads or groups. Raises CheckpointError unless ranks get equal ranges."""
    if count % group.size:
        raise CheckpointError(
            f"--tp-size {group.size} does not divide the {count} heads or groups of the model's recurrent layers."
        )
    return shard_range("heads", count, 1, group.rank, group.size)


def times(heads: ShardRange, size: int) -> ShardRange:
    """Return the range of rows of these heads, if each head has `size` rows."""
    return ShardRange(*(size * each for each in heads))
