"""Recurrent layers against transformers' functions, for any division of a sequence into steps. In C++ the division
does not change any bit.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as mamba
from transformers.models.lfm2 import modeling_lfm2 as lfm2
from transformers.models.qwen3_next import modeling_qwen3_next as delta

from cpp_kernels import backend
from ops.recurrence import ZEROS, Segments, Span, native

LENGTHS = (70, 1, 9, 131)
CUTS = ((), (1,), (1, 2, 3), (64,), (30, 31, 95, 130))


def cut(length: int, cuts: tuple[int, ...]) -> list[tuple[int, int]]:
    borders = [0, *(each for each in cuts if each < length), length]
    return list(pairwise(borders))


def steps(cuts: tuple[int, ...]) -> list[list[tuple[int, int, int]]]:
    """Return the (row, first, end) that each step computes, if rows are divided at these positions."""
    parts = [cut(length, cuts) for length in LENGTHS]
    return [
        [(row, *each[number]) for row, each in enumerate(parts) if number < len(each)]
        for number in range(max(map(len, parts)))
    ]


def run(operation, inputs: list[list[torch.Tensor]], pool: torch.Tensor, cuts: tuple[int, ...]):
    """Run `operation(operands, segments)` over several steps, and return the outputs of each row. Row r has slot r +
    1.
    """
    outputs: list[list[torch.Tensor]] = [[] for _ in LENGTHS]
    for step in steps(cuts):
        spans, place = [], 0
        for row, first, end in step:
            spans.append(Span(row + 1 if first else ZEROS, row + 1, place, end - first))
            place += end - first
        operands = [torch.cat([each[row][first:end] for row, first, end in step]) for each in inputs]
        out = operation(operands, Segments.build(spans))
        for (row, _, _), part in zip(step, out.split([span.count for span in spans]), strict=True):
            outputs[row].append(part)
    assert not pool[ZEROS].any()
    return [torch.cat(each) for each in outputs]


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(length, *shape).to(dtype) for length in LENGTHS]


@pytest.fixture(params=["native", "with_cpp"])
def kernels(request: pytest.FixtureRequest) -> Any:
    return native if request.param == "native" else backend("recurrence", 2)


@pytest.mark.parametrize("cuts", CUTS)
def test_delta_rule(cuts: tuple[int, ...], kernels: Any) -> None:
    torch.manual_seed(0)
    groups, heads, size, out_size = 2, 4, 8, 6
    rate, shift = torch.randn(heads), torch.randn(heads)
    inputs = [drawn(groups, size), drawn(groups, size), drawn(heads, out_size), drawn(heads), drawn(heads)]
    pool = torch.zeros(len(LENGTHS) + 1, heads, size, out_size)
    found = run(
        lambda each, segments: kernels.delta_rule(*each, rate=rate, shift=shift, pool=pool, segments=segments),
        inputs,
        pool,
        cuts,
    )
    for row, ours in enumerate(found):
        q, k, v, a, b = (each[row].unsqueeze(0) for each in inputs)
        theirs, state = delta.torch_recurrent_gated_delta_rule(
            q,
            k,
            v,
            g=-rate.exp() * F.softplus(a + shift),
            beta=b.sigmoid(),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        torch.testing.assert_close(ours, theirs[0], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(pool[row + 1], state[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("cuts", CUTS)
def test_scan(cuts: tuple[int, ...], kernels: Any) -> None:
    torch.manual_seed(0)
    groups, heads, size, state_size = 2, 4, 6, 8
    rate, shift, skip = torch.randn(heads), torch.randn(heads), torch.randn(heads)
    inputs = [drawn(heads, size), drawn(heads), drawn(groups, state_size), drawn(groups, state_size)]
    pool = torch.zeros(len(LENGTHS) + 1, heads, state_size, size)
    limits = {"low": 0.01, "high": 1.5}
    found = run(
        lambda each, segments: kernels.scan(
            *each, rate=rate, shift=shift, skip=skip, pool=pool, segments=segments, **limits
        ),
        inputs,
        pool,
        cuts,
    )
    for row, ours in enumerate(found):
        x, dt, b, c = (each[row].unsqueeze(0) for each in inputs)
        theirs, state = mamba.mamba2_chunk_scan(
            x,
            dt,
            -rate.exp(),
            b,
            c,
            chunk_size=16,
            D=skip,
            dt_bias=shift,
            dt_softplus=True,
            dt_limit=(0.01, 1.5),
            return_final_states=True,
        )
        torch.testing.assert_close(ours, theirs[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(pool[row + 1].transpose(1, 2), state[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("biased", [True, False])
def test_convolution(cuts: tuple[int, ...], biased: bool, kernels: Any) -> None:
    torch.manual_seed(0)
    size, kernel = 10, 4
    weight, bias = torch.randn(size, kernel), torch.randn(size) if biased else None
    pool, inputs = torch.zeros(len(LENGTHS) + 1, kernel - 1, size), [drawn(size)]
    found = run(
        lambda each, segments: kernels.convolve(
            *each, weight=weight.t().contiguous(), bias=bias, pool=pool, segments=segments
        ),
        inputs,
        pool,
        cuts,
    )
    for ours, x in zip(found, inputs[0], strict=True):
        theirs = delta.causal_conv1d_fn(x.t().unsqueeze(0), weight, bias, activation="silu")[0].t()
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolution_between_gates(cuts: tuple[int, ...], biased: bool, dtype: torch.dtype, kernels: Any) -> None:
    torch.manual_seed(0)
    size, kernel = 150, 3
    weight, bias = torch.randn(size, kernel).to(dtype), torch.randn(size).to(dtype) if biased else None
    pool, inputs = torch.zeros(len(LENGTHS) + 1, kernel - 1, size), [drawn(3 * size, dtype=dtype)]

    def operation(each: list[torch.Tensor], segments: Segments) -> torch.Tensor:
        before, after, x = each[0].chunk(3, dim=-1)
        return kernels.convolve(x, weight.t().contiguous(), bias, pool, segments, gates=(before, after))

    found = run(operation, inputs, pool, cuts)
    atol, rtol = (1e-5, 1e-4) if dtype == torch.float32 else (1e-2, 1e-2)
    for row, (ours, given) in enumerate(zip(found, inputs[0], strict=True)):
        before, after, x = given.float().chunk(3, dim=-1)
        wide = None if bias is None else bias.float()
        convolved = lfm2.causal_conv1d_fn((before * x).t().unsqueeze(0), weight.float(), wide)[0].t()
        torch.testing.assert_close(ours.float(), after * convolved, atol=atol, rtol=rtol)
        if len(x) >= kernel:
            assert torch.equal(pool[row + 1], (before * x)[1 - kernel :])


def test_segments_wait_for_what_they_read_and_for_those_who_read_what_they_overwrite() -> None:
    spans = [Span(ZEROS, 1, 0, 3), Span(ZEROS, 2, 3, 1), Span(1, 3, 4, 2), Span(2, 2, 6, 1), Span(4, 1, 7, 1)]
    waves = Segments.build(spans).waves
    assert [[*wave.tokens.tolist(), *(span.start for span in wave.spans)] for wave in waves] == [
        [3, 0],
        [6, 4],
        [7],
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "out_size"), [(128, 80), (70, 64), (256, 40)])
def test_states_in_cpp_are_those_of_torch_and_the_same_bits_however_cut(
    dtype: torch.dtype, pool_dtype: torch.dtype, size: int, out_size: int
) -> None:
    torch.manual_seed(0)
    groups, heads = 2, 4
    numbers = {name: torch.randn(heads) for name in ("rate", "shift", "skip")}
    shapes = ((groups, size), (groups, size), (heads, out_size), (heads,), (heads,))
    inputs = [drawn(*shape, dtype=dtype) for shape in shapes]

    def outputs(kernels: Any, name: str, cuts: tuple[int, ...]) -> list[torch.Tensor]:
        pool = torch.zeros(len(LENGTHS) + 1, heads, size, out_size, dtype=pool_dtype)

        def operation(each: list[torch.Tensor], segments: Segments) -> torch.Tensor:
            q, k, v, a, b = each
            given = {"pool": pool, "segments": segments, **numbers}
            if name == "scan":
                return kernels.scan(v, a, k, q, **given, low=0.1, high=1.0)
            del given["skip"]
            return kernels.delta_rule(q, k, v, a, b, **given)

        return [*run(operation, inputs, pool, cuts), pool]

    for name in ("scan", "delta_rule"):
        whole = outputs(backend("recurrence", 2), name, ())
        for ours, theirs in zip(whole, outputs(native, name, ()), strict=True):
            error = (ours.double() - theirs.double()).norm() / theirs.double().norm()
            assert error < (1e-5 if pool_dtype == dtype == torch.float32 else 5e-3)
        if pool_dtype == torch.float32:  # the pool does not round states
            cut = outputs(backend("recurrence", 1), name, (1, 2, 33, 64))
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(whole, cut, strict=True))
