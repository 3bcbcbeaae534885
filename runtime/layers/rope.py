"""Rotary position embedding, including the scalings that extend a model beyond its trained context."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ops.rope import HeadNorms, Rotation
from ops.select import Kernels
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.rope_parameters import RopeParameters


class Rope(nn.Module):
    """Rotates queries and keys by a table of `context_length` positions, computed once in float32.

    One instance serves all layers with equal parameters. Scalings that depend on the length of a sequence ("dynamic",
    "longrope") use `context_length` instead: the angles of cached keys must not change while their sequence grows, and
    sequences of any length must be able to share a cached prefix.
    """

    table: Tensor
    axis_of_pair: Tensor | None  # int32 [R / 2]: the position axis of each pair; None: positions have one axis

    def __init__(self, parameters: RopeParameters, context_length: int, kernels: Kernels, device: torch.device) -> None:
        super().__init__()
        self.interleaved = parameters.interleaved
        self.kernels = kernels
        frequencies, factor = inverse_frequencies(parameters, context_length)
        positions = torch.arange(context_length, dtype=torch.float32, device="cpu")
        angles = torch.outer(positions, frequencies)  # [N, R / 2]
        table = torch.cat((angles.cos(), angles.sin()), dim=-1) * factor
        self.register_buffer("table", table.to(device), persistent=False)
        axes = parameters.axis_of_pair
        axis_of_pair = torch.tensor(axes, dtype=torch.int32, device=device) if axes else None
        self.register_buffer("axis_of_pair", axis_of_pair, persistent=False)

    def forward(self, q: Tensor, k: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Return the rotated q [T, H, D] and k [T, K, D]. May overwrite its arguments.

        Raises ValueError if positions have three axes and the parameters have no sections.
        """
        table, positions, interleaved, _, plan_cache = self.rotation(batch)
        return self.kernels.rotate(q, k, table, positions, interleaved=interleaved, plan_cache=plan_cache)

    def rotation(self, batch: ForwardBatch, norms: HeadNorms | None = None) -> Rotation:
        """Return the rotation of the batch's tokens. Kernels apply `norms` before the rotation.

        Raises ValueError if positions have three axes and the parameters have no sections.
        """
        table, positions, plan_cache = self.table, batch.positions, batch.attention.plan_cache
        if batch.position_axes is not None:
            key = (__name__, id(self))
            if key not in plan_cache:
                plan_cache[key] = self._angles(batch.position_axes)
            table, positions = plan_cache[key], None
        return Rotation(table, positions, self.interleaved, norms, plan_cache)

    def _angles(self, axes: Tensor) -> Tensor:
        """Return the cosines and sines [T, R] of tokens at positions [3, T]."""
        if self.axis_of_pair is None:
            raise ValueError("Positions have three axes, and this model's rotary embedding has no sections.")
        return self.kernels.angles(self.table, axes, self.axis_of_pair)


class QueryScale(nn.Module):
    """Multiplies queries by a factor that grows with the position, to sharpen attention over long texts.

    The factor at position p is `1 + strength * log(1 + floor(p / step))` (arXiv 2501.19399). Positions count from
    `first`, which is 1 in Llama 4. The rotation kernels compute the product: their table has the factor as cosine and 0
    as sine.
    """

    table: Tensor

    def __init__(
        self,
        strength: float,
        step: int,
        context_length: int,
        kernels: Kernels,
        device: torch.device,
        *,
        first: int = 0,
    ) -> None:
        super().__init__()
        self.kernels = kernels
        positions = torch.arange(first, context_length + first, dtype=torch.float32, device="cpu")
        scales = torch.log1p(torch.floor(positions / step)) * strength + 1.0
        table = torch.stack((scales, torch.zeros_like(scales)), dim=-1)  # [N, 2]
        self.register_buffer("table", table.to(device), persistent=False)

    def forward(self, q: Tensor, batch: ForwardBatch) -> Tensor:
        """Return the scaled q [T, H, D]. May overwrite q."""
        pairs = q.flatten(1).unflatten(1, (-1, 2))  # [T, H * D / 2, 2]
        cache = batch.attention.plan_cache
        scaled, _ = self.kernels.rotate(pairs, pairs[:, :0], self.table, batch.positions, plan_cache=cache)
        return scaled.reshape(q.shape)


def inverse_frequencies(parameters: RopeParameters, context_length: int) -> tuple[Tensor, float]:
    """Return each pair's angle per position, float32 [R / 2] on the CPU, and the factor that scales cosines and sines.

    Sources: linear, kaiokendev 2023; dynamic, "NTK-aware" scaling 2023; yarn, arXiv 2309.00071; longrope,
    arXiv 2402.13753; llama3, the Llama 3.1 reference code.
    """
    match parameters.kind:
        case "default":
            return _plain(parameters.theta, parameters.dim), 1.0
        case "linear":
            return _plain(parameters.theta, parameters.dim) / parameters.factor, 1.0
        case "dynamic":
            return _dynamic(parameters, context_length), 1.0
        case "llama3":
            return _llama3(parameters), 1.0
        case "yarn":
            return _yarn(parameters)
        case "longrope":
            return _longrope(parameters, context_length)
        case kind:
            raise ValueError(f"The rope type '{kind}' is not supported.")


def _exponents(dim: int) -> Tensor:
    return torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim


def _plain(theta: float, dim: int) -> Tensor:
    return 1.0 / theta ** _exponents(dim)


def _dynamic(p: RopeParameters, context_length: int) -> Tensor:
    stretch = p.factor * max(context_length, p.max_position) / p.max_position - (p.factor - 1)
    return _plain(p.theta * stretch ** (p.dim / (p.dim - 2)), p.dim)


def _llama3(p: RopeParameters) -> Tensor:
    """Divide low frequencies by the factor, keep high frequencies, and interpolate in between."""
    plain = _plain(p.theta, p.dim)
    waves_in_context = p.trained_context * plain / (2 * math.pi)
    smooth = (waves_in_context - p.low_freq_factor) / (p.high_freq_factor - p.low_freq_factor)
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * plain / p.factor + smooth * plain


def _yarn(p: RopeParameters) -> tuple[Tensor, float]:
    """Keep high frequencies, divide low frequencies by the factor, and blend both linearly in between."""

    def dimension(rotations: float) -> float:
        ratio = p.trained_context / (rotations * 2 * math.pi)
        return p.dim * math.log(ratio) / (2 * math.log(p.theta))

    low, high = dimension(p.beta_fast), dimension(p.beta_slow)
    if p.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, p.dim - 1)
    span = high - low if high != low else 0.001
    ramp = ((torch.arange(p.dim // 2, dtype=torch.float32, device="cpu") - low) / span).clamp(0, 1)
    plain = _plain(p.theta, p.dim)
    return plain / p.factor * ramp + plain * (1 - ramp), _yarn_attention_factor(p)


def _yarn_attention_factor(p: RopeParameters) -> float:
    def scale(multiplier: float) -> float:
        return 1.0 if p.factor <= 1 else 0.1 * multiplier * math.log(p.factor) + 1.0

    if p.attention_factor is not None:
        return p.attention_factor
    if p.mscale and p.mscale_all_dim:
        return scale(p.mscale) / scale(p.mscale_all_dim)
    return scale(1.0)


def _longrope(p: RopeParameters, context_length: int) -> tuple[Tensor, float]:
    """Divide each frequency by `short_factor` or, if the context is longer than the trained one, by `long_factor`."""
    divisors = p.long_factor if context_length > p.trained_context else p.short_factor
    frequencies = _plain(p.theta, p.dim) / torch.tensor(divisors, dtype=torch.float32, device="cpu")
    if p.attention_factor is not None:
        return frequencies, p.attention_factor
    if p.factor <= 1:
        return frequencies, 1.0
    return frequencies, math.sqrt(1 + math.log(p.factor) / math.log(p.trained_context))
