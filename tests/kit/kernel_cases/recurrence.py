"""Test cases of recurrent layers, for every implementation."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ops.recurrence import Segments, Span, native

NUM_SLOTS = 16
# Upper bounds on the norm of the error, as a share of the norm of the result.
NORM_ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
BY_TOKEN = ("q", "k", "v", "a", "b", "x", "before", "after")


class Case(NamedTuple):
    spans: tuple[tuple[int, int, int], ...]  # slot to read, slot to write, number of tokens
    dtype: torch.dtype = torch.float32
    pool_dtype: torch.dtype = torch.float32  # of states; the inputs of convolutions are float32
    captured: bool = False  # whether the spans are unknown on the host, as in a graph
    chained: bool = False  # whether the graph is for rows with draft tokens
    groups: int = 2
    heads: int = 4
    key_dim: int = 20
    value_dim: int = 36
    kernel: int = 4
    channels: int = 70
    biased: bool = True


SINGLE = ((1, 2, 1), (0, 3, 1), (1, 4, 1), (5, 5, 1))
PROMPT = ((0, 1, 70), (1, 2, 9), (2, 1, 1))  # one row with two snapshots
MIXED = (
    (12, 13, 1),
    *((0, 1, 40), (1, 2, 3)),
    (14, 14, 1),
    *((1, 3, 2), (3, 4, 1)),  # continues from a snapshot that an earlier row writes
    *((6, 7, 17), (5, 6, 1)),  # overwrites a state that an earlier span reads
    *((0, 8, 1), (9, 8, 2)),  # both spans write the same slot
)
SCRATCH = NUM_SLOTS - 1
DRAFTS = (*((1, 2, 1), (2, 3, 1), (3, 7, 1)), (4, 5, 1), *((0, 6, 1), (6, 8, 1)), *[(0, SCRATCH, 1)] * 3)
CASES: dict[str, Case] = {
    "single tokens": Case(SINGLE),
    "single tokens of a graph": Case(SINGLE, captured=True),
    "drafts": Case(((1, 2, 1), (2, 3, 1), (4, 5, 3), (5, 6, 1), (0, 7, 5))),
    "drafts in a graph with padding rows": Case(DRAFTS, captured=True, chained=True),
    "a prompt": Case(PROMPT),
    "prompts and single tokens": Case((*PROMPT, (3, 4, 1), (0, 5, 33), (6, 7, 130))),
    "rows that share states": Case(MIXED),
    "two taps without a bias": Case(((0, 1, 1), (1, 2, 1), (2, 1, 1), (0, 3, 20)), kernel=2, biased=False),
    "states in half precision": Case((*SINGLE, (0, 6, 40)), pool_dtype=torch.float16),
    "half precision": Case((*PROMPT, *((3, 4, 1), (0, 5, 33))), torch.float16),
    "half precision, single tokens": Case(SINGLE, torch.float16),
}


def drawn(case: Case) -> dict[str, Tensor]:
    """Return the operands by name. Those of tokens are slices of wider rows, as a fused projection returns them."""
    random, tokens = torch.Generator().manual_seed(11), sum(count for *_, count in case.spans)

    def draw(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    parts = {"q": (case.groups, case.key_dim), "k": (case.groups, case.key_dim), "v": (case.heads, case.value_dim)}
    sizes = {name: heads * size for name, (heads, size) in parts.items()}
    sizes |= {"a": case.heads, "b": case.heads, "x": case.channels, "before": case.channels, "after": case.channels}
    wide = draw(tokens, sum(sizes.values())).split(list(sizes.values()), dim=1)
    operands = dict(zip(sizes, wide, strict=True))
    operands |= {name: operands[name].unflatten(1, shape) for name, shape in parts.items()}
    operands |= {name: draw(case.heads, dtype=torch.float32) for name in ("rate", "shift", "skip")}
    operands["weight"], operands["bias"] = draw(case.kernel, case.channels), draw(case.channels)
    inputs = draw(NUM_SLOTS, case.kernel - 1, case.channels).float()
    states = draw(NUM_SLOTS, case.heads, case.key_dim, case.value_dim, dtype=case.pool_dtype)
    inputs[0], states[0] = 0, 0
    return operands | {"inputs": inputs, "states": states}


def operations(
    backend: Any, case: Case, each: dict[str, Tensor], pools: tuple[Tensor, ...], segments: Segments
) -> list[Tensor]:
    """Run all operations for the tokens of `segments`, update the four pools, and return the results."""
    bias = each["bias"] if case.biased else None
    gates = each["before"], each["after"]
    recurrent = [each[name] for name in ("q", "k", "v", "a", "b", "rate", "shift")]
    scanned = [each[name] for name in ("v", "a", "k", "q", "rate", "shift", "skip")]
    return [
        backend.convolve(each["x"], each["weight"], bias, pools[0], segments),
        backend.convolve(each["x"], each["weight"], bias, pools[1], segments, gates=gates),
        backend.delta_rule(*recurrent, pools[2], segments),
        backend.scan(*scanned, pools[3], segments, low=0.02, high=1.5),
    ]


def pools_of(each: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Return the four pools for `operations`, one per operation."""
    return tuple(each[name].clone() for name in ("inputs", "inputs", "states", "states"))


def outputs(backend: Any, case: Case) -> list[Tensor]:
    """Return the results of all operations, then the pools."""
    spans, start = [], 0
    for read, write, count in case.spans:
        spans.append(Span(read, write, start, count))
        start += count
    segments = Segments.build(spans)
    if case.captured:
        segments = Segments(segments.spans.t().contiguous().t(), captured=True, chained=case.chained)
    each = drawn(case)
    pools = pools_of(each)
    return [*operations(backend, case, each, pools, segments), *written(case, pools)]


def written(case: Case, pools: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the slots of the pools that a backend must write. In a graph, it may omit those of padding rows."""
    return [pool[:SCRATCH] if case.captured else pool for pool in pools]


def expected(case: Case) -> list[Tensor]:
    """Compute the results with `native`: float32 pools token by token, other pools span by span.

    Pools of less precision round the state only after each span.
    """
    each, start, parts = drawn(case), 0, []
    pools = pools_of(each)
    for read, write, count in case.spans:
        tokens = slice(start, start + count)
        rows = {name: each[name][tokens] for name in BY_TOKEN}
        if case.pool_dtype == torch.float32:
            for token in range(count):
                one = {name: rows[name][token : token + 1] for name in BY_TOKEN}
                segments = Segments.build([Span(write if token else read, write, 0, 1)])
                parts.append(operations(native, case, each | one, pools, segments))
        else:
            parts.append(operations(native, case, each | rows, pools, Segments.build([Span(read, write, 0, count)])))
        start += count
    return [*(torch.cat(column) for column in zip(*parts, strict=True)), *written(case, pools)]


def is_close(found: list[Tensor], wanted: list[Tensor]) -> bool:
    """Return whether each result is within `NORM_ERROR` for the least precise dtype among the found results.

    If all results are float32, each single value must also be within 1e-4.
    """
    dtype = max((each.dtype for each in found), key=NORM_ERROR.__getitem__)
    for one, other in zip(found, wanted, strict=True):
        if not (one.double() - other.double()).norm() <= NORM_ERROR[dtype] * other.double().norm():
            return False
        if dtype == torch.float32 and not torch.allclose(one, other, atol=2e-5, rtol=1e-4):
            return False
    return True
