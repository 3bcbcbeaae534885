"""Recurrent layers, which keep one state of fixed size per sequence instead of keys and values per token.

A pool has one slot per state. A *span* is a number of consecutive tokens of one sequence. `Segments` gives, for each
span of the step, the slot of the state before the span and the slot for the state after it. Slot 0 of every pool
contains zeros, the initial state of a sequence, and is never written. Padding rows of a captured graph write to the
last slot, which no other row reads; a backend may omit these writes. A backend file defines

    convolve(x [T, C], weight [K, C], bias [C] | None, pool [N, K - 1, C], segments, *,
             gates (before [T, C], after [T, C]) | None = None) -> [T, C]

`convolve` returns silu(convolution(x)), a causal convolution of each channel over the last K tokens of the sequence.
A state is the last K - 1 rows of x. With `gates`, `convolve` returns after * convolution(before * x), and a state is
the last K - 1 rows of before * x. The result is computed in float32 and rounded once.

    delta_rule(q [T, G, D], k [T, G, D], v [T, H, E], a [T, H], b [T, H], rate [H], shift [H], pool [N, H, D, E],
               segments) -> [T, H, E]

`delta_rule` computes the gated delta rule (arXiv 2412.06464). q and k are normalised to length 1, and q is divided by
sqrt(D). H / G consecutive heads of v share a head of q and k. With
decay = exp(-exp(rate) * softplus(a + shift)) and beta = sigmoid(b), each token updates the state S:

    S = decay * S;  S = S + k (beta * (v - k S));  out = q S

in float32. `rate` and `shift` are float32; pools may have any floating dtype.

    scan(x [T, H, P], dt [T, H], b [T, G, N], c [T, G, N], rate [H], shift [H], skip [H], pool [L, H, N, P], segments,
         *, low, high) -> [T, H, P]

`scan` computes the selective scan of Mamba 2 (arXiv 2405.21060) in float32. dt is replaced by softplus(dt + shift),
clamped to low .. high. Then each token updates the state S:

    S = exp(-exp(rate) * dt) * S + b (dt * x);  out = c S + skip * x
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ops.sampling.native import to_device

ZEROS = 0  # slot of zeros, the initial state


class Span(NamedTuple):
    """Consecutive tokens of one sequence: `count` tokens of the flat batch, from index `start` on."""

    read: int  # slot of the state before the tokens
    write: int  # slot of the state after the tokens
    start: int
    count: int


class Wave(NamedTuple):
    """Spans that can be computed at the same time, because no span reads a slot that another span writes."""

    tokens: Tensor  # int64 [S], for each of the S spans that have only one token: index of its token in the flat batch
    reads: Tensor  # int64 [S], slot of the state before the token
    writes: Tensor  # int64 [S], slot of the state after the token
    spans: tuple[Span, ...]  # the spans with more than one token


@dataclass(eq=False)
class Segments:
    """The spans of a step's tokens, with their state slots. Built once per step, and read by every layer."""

    # int32 [S, 4], the fields of `Span`. In a CPU graph, S is the capacity of this buffer: C++ kernels read spans until
    # these cover all tokens of the step.
    spans: Tensor
    host: NDArray[np.int32] | None = None  # copy of `spans` on the host; None: `waves` copies them from the device
    # Whether a CUDA graph captures the step. All spans then have one token, but the host does not know them.
    captured: bool = False
    # Whether a captured step may have spans that continue from other spans of the step. If not, all are `independent`.
    chained: bool = False
    # Whether `host` has the right slots. If not, only the device knows them: spans of one token may read and write
    # other slots, but depend on each other as in `host`.
    slots_known: bool = True
    # Values that a backend derives from the spans once per step, by a key of the backend.
    plans: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def build(cls, spans: Sequence[Span], device: torch.device | str = "cpu") -> Self:
        """Return `Segments` with these spans. Together the spans must cover all tokens of the step, in order."""
        return cls(torch.tensor(spans, dtype=torch.int32, device=device).view(-1, 4))

    @cached_property
    def waves(self) -> tuple[Wave, ...]:
        """The spans, grouped into waves, which are computed one after another. A wave depends only on earlier waves.

        Without `host`, this property blocks while the spans are copied from the device.
        """
        if self.captured:
            reads, writes, tokens, _ = self.spans.long().unbind(1)
            # With chains, each token is a wave, because the host does not know how they depend on each other.
            size = 1 if self.chained else max(len(tokens), 1)
            parts = zip(tokens.split(size), reads.split(size), writes.split(size), strict=True)
            return tuple(Wave(*part, ()) for part in parts)
        rows = (self.spans if self.host is None else self.host).tolist()
        spans = [Span(*each) for each in rows]
        waves: list[list[int]] = []
        written: dict[int, int] = {}  # slot -> number of the wave after the last wave that writes it
        read: dict[int, int] = {}  # slot -> number of the wave after the last wave that reads it
        for index, span in enumerate(spans):
            number = max(written.get(span.read, 0), read.get(span.write, 0))
            while len(waves) <= number:
                waves.append([])
            waves[number].append(index)
            written[span.write] = number + 1
            if span.read != span.write:
                read[span.read] = max(read.get(span.read, 0), number + 1)
        return tuple(self._wave(each, spans) for each in waves)

    def _wave(self, indices: Sequence[int], spans: Sequence[Span]) -> Wave:
        single, device = [index for index in indices if spans[index].count == 1], self.spans.device
        if self.slots_known:
            columns = torch.tensor([(*spans[index][:3],) for index in single], dtype=torch.int64)
            reads, writes, tokens = to_device(columns.view(-1, 3).t().contiguous(), device)
        else:
            chosen = self.spans[to_device(torch.tensor(single, dtype=torch.int64), device)].long()
            reads, writes, tokens = chosen[:, 0], chosen[:, 1], chosen[:, 2]
        return Wave(tokens, reads, writes, tuple(spans[index] for index in indices if spans[index].count > 1))


def single_tokens(spans: NDArray[np.int32]) -> bool:
    """Return whether all spans [S, 4] have one token."""
    return bool((spans[:, 3] == 1).all())


def independent(spans: NDArray[np.int32]) -> bool:
    """Return whether all spans [S, 4] have one token, and no span reads or writes a slot that another span writes."""
    reads, writes = spans[:, 0], spans[:, 1]
    return single_tokens(spans) and len(np.unique(writes)) == len(writes) and not np.isin(reads, writes).any()
