"""Layers in the place of attention that keep one state for each sequence (see `ops.recurrence`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, NamedTuple, Self

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

KIND = "state"  # of cache


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The inputs [lines, channels] that a layer's convolution looks back on, the shape and the dtype of its state.

    Ranks share the first dimension of the state in `units`, and with it the channels, but for `common` ones that each
    of them has.
    """

    inputs: tuple[int, int]
    shape: tuple[int, ...]
    dtype: str
    units: int = 1
    common: int = 0
    kind: ClassVar[str] = KIND
    first_lines: ClassVar[int] = 48  # of the pool of states, however small that of pages is
    tokens_a_line: ClassVar[int] = 512  # of the pool of pages go with each further one

    def local(self, tp_rank: int, tp_size: int) -> StateSpec:
        """This tensor-parallel rank's share."""
        units = shard_range("heads", self.units, 1, tp_rank, tp_size).size
        (lines, channels), (heads, *inner) = self.inputs, self.shape
        kept = self.common + (channels - self.common) * units // self.units
        return replace(self, inputs=(lines, kept), shape=(heads * units // self.units, *inner), units=units)

    @property
    def num_bytes(self) -> int:
        """Of one sequence. Inputs are kept in float32, which holds what any model computes in."""
        return 4 * prod(self.inputs) + getattr(torch, self.dtype).itemsize * prod(self.shape)

    def make(self, num_lines: int, device: torch.device) -> StateCache:
        return StateCache.zeros(self, num_lines, device)


class StateCache(NamedTuple):
    """One layer's states: the last inputs of its convolution [N, K - 1, C] and what it recurs on [N, ...]."""

    inputs: Tensor
    states: Tensor

    @classmethod
    def zeros(cls, spec: StateSpec, num_lines: int, device: torch.device) -> Self:
        inputs = torch.zeros(num_lines, *spec.inputs, dtype=torch.float32, device=device)
        return cls(
            inputs, torch.zeros(num_lines, *spec.shape, dtype=getattr(torch, spec.dtype), device=device)
        )

    @property
    def nbytes(self) -> int:
        return self.inputs.nbytes + self.states.nbytes


def state_cache(batch: ForwardBatch, index: int) -> StateCache:
    """The cache of a layer that keeps states. Raises TypeError where it is another kind of cache."""
    cache = batch.cache[index]
    if not isinstance(cache, StateCache):
        raise TypeError(f"Layer {index} keeps states, not {type(cache).__name__}.")
    return cache


def segments_in(batch: ForwardBatch) -> Segments:
    """Which tokens go on from which state: made once for all layers."""
    key, kept = (__name__, "segments"), batch.attention.plan_cache
    if key not in kept:
        kept[key] = Segments(batch.kinds[KIND].arrays["spans"])
    return kept[key]


class Convolution(Weighted):
    """The weights of a causal convolution of each channel by itself: [K, C], and a bias [C] if there is one.

    `parts` say how its channels, one part after the other, are cut over ranks.
    """

    def __init__(self, name: str, parts: Sequence[SubLayer], kernel: int, *, bias: bool = False) -> None:
        super().__init__()
        self._parts = in_one_tensor(name, parts)
        self._rows = [whole_range(each.size) for each in parts]
        self._kernel, self._has_bias = kernel, bias
        self.allocate()

    def allocate(self) -> None:
        channels = sum(rows.size for rows in self._rows)
        self.weight = parameter(channels, 1, self._kernel)  # as checkpoints have it, until it is prepared
        self.bias = parameter(channels) if self._has_bias else None

    def split(self, group: TensorParallelGroup) -> None:
        """Keep this rank's channels of each part."""
        self._rows = [
            shard_range(each.axis, each.size, each.unit, group.rank, group.size) for each in self._parts
        ]
        self.allocate()

    def shards(self) -> Iterator[Shard]:
        row = 0
        for part, rows in zip(self._parts, self._rows, strict=True):
            there, inner = part.in_tensor(rows), (whole_range(1), whole_range(self._kernel))
            yield Shard(
                f"{part.name}.weight", self.weight, row, rows.size, (part.axis, None, None), (there, *inner)
            )
            if self.bias is not None:
                yield Shard(f"{part.name}.bias", self.bias, row, rows.size, (part.axis,), (there,))
            row += rows.size

    def prepare(self) -> None:
        self.weight = frozen(self.weight.squeeze(1).t().contiguous())


class GatedDeltaNet(Weighted):
    """Linear attention with a gated delta rule (arXiv 2412.06464): project, convolve, update and read states, gate.

    `index` is the layer's number in the model. `projections` are those of q, k, v, z, b and a, in this order: G heads
    of q and k with `key_dim`, H heads of the others with `value_dim` or one number each. Those of b and a, which say
    how much of a state is kept, are never quantised.
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
        parts = [
            SubLayer("", channels, "heads", own)
            for channels, own in ((keys, key_dim),) * 2 + ((values, unit),)
        ]
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
        """Keep this rank's key heads with their value heads; the linear layers are cut by themselves.

        Raises CheckpointError where there are not as many of them for each rank.
        """
        self._heads = evenly(self._heads.full, group)
        self.cache_spec = self.cache_spec.local(group.rank, group.size)
        self.allocate()

    def shards(self) -> Iterator[Shard]:
        rows = times(self._heads, self._ratio)
        yield whole(f"{self.name}.A_log", self.rate, ("heads",), rows)
        yield whole(f"{self.name}.dt_bias", self.shift, ("heads",), rows)

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, E] -> [T, E]; the states behind the tokens are in the cache then."""
        kernels, cache, segments = self.kernels, state_cache(batch, self.index), segments_in(batch)
        mixed, z = self.projections(x, batch).split(self._sizes, dim=-1)
        b, a = self.gates(x, batch).chunk(2, dim=-1)
        weights = self.convolution
        mixed = kernels.convolve(mixed, weights.weight, weights.bias, cache.inputs, segments)
        q, k, v = mixed.split(self._channels, dim=-1)
        q, k = (each.unflatten(-1, (-1, self.key_dim)) for each in (q, k))
        v = v.unflatten(-1, (-1, self.value_dim))
        out = kernels.delta_rule(q, k, v, a, b, self.rate, self.shift, cache.states, segments)  # [T, H, E]
        return self.out(kernels.modulate(self.norm(out).flatten(1), z, "silu"), batch)


class Mamba2(Weighted):
    """A selective state space (arXiv 2405.21060): project, convolve, scan, gate, normalise, project.

    `index` is the layer's number in the model. There are `heads` of `head_dim`, which share B and C in `groups`; the
    norm is taken over each group. `limits` hold the steps in time.
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
        own = SubLayer("", inner, "heads", head_dim)
        # One group belongs to the heads of all ranks, so that each of them has it.
        of_group = SubLayer("", shared, None if groups == 1 else "heads", state_size)
        parts = in_one_tensor(f"{name}.in_proj", [own, own, of_group, of_group, SubLayer("", heads, "heads")])
        self.projections = Linear(size, parts, build, bias=bias)
        self.convolution = Convolution(
            f"{name}.conv1d", [own, of_group, of_group], kernel, bias=convolution_bias
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
        """Keep this rank's heads, and their groups if there are several; the linear layers are cut by themselves.

        Raises CheckpointError where there are not as many of them for each rank.
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
        """x [T, E] -> [T, E]; the states behind the tokens are in the cache then."""
        kernels, cache, segments = self.kernels, state_cache(batch, self.index), segments_in(batch)
        z, mixed, dt = self.projections(x, batch).split(self._sizes, dim=-1)
        weights = self.convolution
        mixed = kernels.convolve(mixed, weights.weight, weights.bias, cache.inputs, segments)
        values, b, c = mixed.split(self._channels, dim=-1)
        values = values.unflatten(-1, (-1, self.head_dim))
        b, c = (each.unflatten(-1, (-1, self.state_size)) for each in (b, c))
        low, high = self.limits
        out = kernels.scan(
            values, dt, b, c, self.rate, self.shift, self.skip, cache.states, segments, low=low, high=high
        ).flatten(1)  # [T, H * P]
        return self.out(self._normed(kernels.modulate(out, z, "silu")), batch)

    def _normed(self, x: Tensor) -> Tensor:
        """x [T, H * P], normalised group by group; a group of all ranks' heads by the squares of all."""
        if self._summed_over is not None:
            return norm_of_ranks(x, self.norm_weight, self.eps, self._summed_over)
        if self.groups == 1:
            return self.kernels.rms_norm(x, self.norm_weight, self.eps)
        weight = self.norm_weight.view(self.groups, -1)
        return self.kernels.rms_norm(x.unflatten(-1, (self.groups, -1)), weight, self.eps).flatten(1)


class ShortConvolution(Weighted):
    """A convolution between two gates (LFM2): project to both and x, gate, convolve, gate, project.

    `index` is the layer's number in the model. What it keeps of a sequence are its last inputs alone.
    """

    def __init__(
        self, name: str, index: int, size: int, kernel: int, build: Build, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.index = index
        self.kernels = build.kernels
        channels = SubLayer("", size, "heads")
        self.projections = Linear(size, in_one_tensor(f"{name}.in_proj", [channels] * 3), build, bias=bias)
        self.convolution = Convolution(f"{name}.conv", [channels], kernel, bias=bias)
        self.out = from_heads(f"{name}.out_proj", size, 1, size, build, bias=bias)
        self.cache_spec = StateSpec((kernel - 1, size), (0,), build.state_dtype, size)

    def split(self, group: TensorParallelGroup) -> None:
        """Keep this rank's channels of the states; the sub-layers are cut by themselves."""
        self.cache_spec = self.cache_spec.local(group.rank, group.size)

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, E] -> [T, E]; the states behind the tokens are in the cache then."""
        before, behind, x = self.projections(x, batch).chunk(3, dim=-1)
        weights, cache = self.convolution, state_cache(batch, self.index)
        out = self.kernels.convolve(
            x, weights.weight, weights.bias, cache.inputs, segments_in(batch), gates=(before, behind)
        )
        return self.out(out, batch)


def evenly(count: int, group: TensorParallelGroup) -> ShardRange:
    """This rank's part of so many heads or groups. Raises CheckpointError where ranks would have different numbers."""
    if count % group.size:
        raise CheckpointError(
            f"{count} heads or groups of recurrent layers cannot be shared evenly by {group.size} ranks (--tp-size)."
        )
    return shard_range("heads", count, 1, group.rank, group.size)


def times(heads: ShardRange, size: int) -> ShardRange:
    """The rows of these heads, `size` each."""
    return ShardRange(*(size * each for each in heads))
