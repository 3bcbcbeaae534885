"""Layers that keep a state of one size for each sequence instead of keys and values for each token.

States lie in pools, one line each; `Segments` says which tokens go on from which line and where the state behind them
is put. Line 0 of every pool is zeros, never written: what a sequence begins with. A backend file holds

    convolve(x [T, C], weight [K, C], bias [C] | None, pool [N, K - 1, C], segments, *,
             gates (before [T, C], behind [T, C]) | None = None) -> [T, C]

silu of the causal convolution of each channel over the last K tokens of its own sequence. A state is the last K - 1
lines of x. With `gates` there is no silu: the convolution is of before * x, of which the states are too, and is
multiplied with behind, all in float32 and rounded once.

    delta_rule(q [T, G, D], k [T, G, D], v [T, H, E], a [T, H], b [T, H], rate [H], shift [H], pool [N, H, D, E],
               segments) -> [T, H, E]

The gated delta rule (arXiv 2412.06464): with q and k of length 1, q over sqrt(D), each of them for H / G heads in a
row, decay = exp(-exp(rate) * softplus(a + shift)) and beta = sigmoid(b), token by token

    S = decay * S;  S = S + k (beta * (v - k S));  out = q S

in float32. `rate` and `shift` are float32, pools may be of any floating dtype.

    scan(x [T, H, P], dt [T, H], b [T, G, N], c [T, G, N], rate [H], shift [H], skip [H], pool [L, H, N, P], segments,
         *, low, high) -> [T, H, P]

The selective scan of Mamba 2 (arXiv 2405.21060) in float32: with dt = softplus(dt + shift) held between low and high,

    S = exp(-exp(rate) * dt) * S + b (dt * x);  out = c S + skip * x
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import torch
from torch import Tensor

ZEROS = 0  # the line of zeros


class Span(NamedTuple):
    """Several tokens of one sequence: `count` from `start` on in the flat batch."""

    read: int
    write: int
    start: int
    count: int


class Wave(NamedTuple):
    """Segments of which none reads what another one writes. (Nobody reads a line that several of them write.)"""

    tokens: Tensor  # int64 [S], the segments of one token each
    reads: Tensor  # int64 [S]
    writes: Tensor  # int64 [S]
    spans: tuple[Span, ...]  # the others


@dataclass(eq=False)
class Segments:
    """Runs of tokens that go on from a line of the pools each; made once for a step, read by every layer."""

    # int32 [S, 4], as `Span` has them; while a step is captured of any shape, and its tokens say how many there are.
    spans: Tensor

    @classmethod
    def build(cls, spans: Sequence[Span], device: torch.device | str = "cpu") -> Self:
        """Of these, which hold all tokens of a step in order."""
        return cls(torch.tensor(spans, dtype=torch.int32, device=device).view(-1, 4))

    @cached_property
    def waves(self) -> tuple[Wave, ...]:
        """The spans in the order in which their results depend on each other (blocking copies, both ways)."""
        spans, device = [Span(*each) for each in self.spans.tolist()], self.spans.device
        waves: list[list[Span]] = []
        written: dict[int, int] = {}  # line -> the wave behind the last one that writes it
        read: dict[int, int] = {}  # line -> the wave behind the last one that reads it
        for span in spans:
            number = max(written.get(span.read, 0), read.get(span.write, 0))
            while len(waves) <= number:
                waves.append([])
            waves[number].append(span)
            written[span.write] = number + 1
            if span.read != span.write:
                read[span.read] = max(read.get(span.read, 0), number + 1)
        return tuple(_wave(each, device) for each in waves)


def _wave(spans: list[Span], device: torch.device | str) -> Wave:
    single = [span for span in spans if span.count == 1]
    columns = torch.tensor([(span.start, span.read, span.write) for span in single], dtype=torch.int64)
    tokens, reads, writes = columns.view(-1, 3).t().contiguous().to(device)
    return Wave(tokens, reads, writes, tuple(span for span in spans if span.count > 1))
