"""Layers in the place of attention that keep one state for each sequence (see `ops.recurrence`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from ops.recurrence import Segments
from runtime.errors import CheckpointError
from runtime.layers.build import Build
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.linear import Linear
from runtime.layers.norm import RMSNorm
from runtime.layers.sharding import TensorParallelGroup
from runtime.layers.weight import Shard, SubLayer, Weighted, frozen, parameter, whole

KIND = "state"  # of cache


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The inputs [lines, channels] that a layer's convolution looks back on, the shape and the dtype of its state."""

    inputs: tuple[int, int]
    shape: tuple[int, ...]
    dtype: str
    kind: ClassVar[str] = KIND
    first_lines: ClassVar[int] = 48  # of the pool of states, however small that of pages is
    tokens_a_line: ClassVar[int] = 512  # of the pool of pages go with each further one

    def local(self, tp_rank: int, tp_size: int) -> StateSpec:
        """The whole: layers with states are not cut over ranks."""
        return self

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
    """The weights of a causal convolution of each channel by itself: [K, C], and a bias [C] if there is one."""

    def __init__(self, name: str, channels: int, kernel: int, *, bias: bool = False) -> None:
        super().__init__()
        self.name = name
        self._shape, self._has_bias = (channels, 1, kernel), bias
        self.allocate()

    def allocate(self) -> None:
        self.weight = parameter(*self._shape)  # as checkpoints have it, until it is prepared
        self.bias = parameter(self._shape[0]) if self._has_bias else None

    def shards(self) -> Iterator[Shard]:
        yield whole(f"{self.name}.weight", self.weight, (None, None, None))
        if self.bias is not None:
            yield whole(f"{self.name}.bias", self.bias, (None,))

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
        keys, values = key_heads * key_dim, value_heads * value_dim
        self._sizes = (2 * keys + values, values)
        self._channels = (keys, keys, values)
        self.projections = Linear(size, projections[:4], build)
        self.gates = Linear(size, projections[4:], build, quantized=False)
        self.convolution = Convolution(f"{name}.conv1d", sum(self._channels), kernel)
        self.norm = RMSNorm(f"{name}.norm", value_dim, eps, build)
        self.out = Linear(values, [SubLayer(f"{name}.out_proj", size)], build)
        self.rate = parameter(value_heads, dtype=torch.float32)
        self.shift = parameter(value_heads, dtype=torch.float32)
        self.cache_spec = StateSpec(
            (kernel - 1, sum(self._channels)), (value_heads, key_dim, value_dim), build.state_dtype
        )

    def shards(self) -> Iterator[Shard]:
        yield whole(f"{self.name}.A_log", self.rate, (None,))
        yield whole(f"{self.name}.dt_bias", self.shift, (None,))

    def split(self, group: TensorParallelGroup) -> None:
        """Raises CheckpointError: states are not shared out over ranks."""
        raise uncuttable()

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
        inner, shared = heads * head_dim, groups * state_size
        self._channels = (inner, shared, shared)
        self._sizes = (inner, inner + 2 * shared, heads)
        self.projections = Linear(size, [SubLayer(f"{name}.in_proj", sum(self._sizes))], build, bias=bias)
        self.convolution = Convolution(f"{name}.conv1d", sum(self._channels), kernel, bias=convolution_bias)
        self.out = Linear(inner, [SubLayer(f"{name}.out_proj", size)], build, bias=bias)
        self.norm_weight = parameter(inner)
        self.rate, self.shift, self.skip = (parameter(heads, dtype=torch.float32) for _ in range(3))
        self.cache_spec = StateSpec(
            (kernel - 1, sum(self._channels)), (heads, state_size, head_dim), build.state_dtype
        )

    def shards(self) -> Iterator[Shard]:
        yield whole(f"{self.name}.norm.weight", self.norm_weight, (None,))
        for part, numbers in (("A_log", self.rate), ("dt_bias", self.shift), ("D", self.skip)):
            yield whole(f"{self.name}.{part}", numbers, (None,))

    def split(self, group: TensorParallelGroup) -> None:
        """Raises CheckpointError: states are not shared out over ranks."""
        raise uncuttable()

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
        """x [T, H * P], normalised group by group."""
        if self.groups == 1:
            return self.kernels.rms_norm(x, self.norm_weight, self.eps)
        weight = self.norm_weight.view(self.groups, -1)
        return self.kernels.rms_norm(x.unflatten(-1, (self.groups, -1)), weight, self.eps).flatten(1)


def uncuttable() -> CheckpointError:
    return CheckpointError("This model has recurrent layers: it cannot be cut (--tp-size 1).")
