"""Experts in FlashInfer's layout, with a fake that computes them as FlashInfer documents."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import recorded_flashinfer
from kernel_cases.moe import CASES, Case, expected, inputs, outputs
from kernel_comparison import agree
from ops.matmul.grouped import GroupedWeight
from ops.matmul.rounded_rows import round_rows
from ops.matmul.with_triton import row_group
from ops.moe import GroupedMixture, Mixture, native, with_flashinfer

OURS: Any = SimpleNamespace(
    route=native.route, prepare_experts=with_flashinfer.prepare_experts, mix=with_flashinfer.mix
)
WIDE: Any = {"size": 24, "inner_size": 40}
CHECKED = [
    name
    for name, case in CASES.items()
    if not case.elsewhere and case.activation == "silu" and not (case.weigh_inputs and case.top_k > 1)
]


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in recorded_flashinfer.modules().items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("name", [*CHECKED, "weights of one input"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_experts_are_those_of_the_reference(name: str, dtype: torch.dtype) -> None:
    case = CASES.get(name) or Case(top_k=1, scoring="sigmoid", renormalise=False, weigh_inputs=True)
    case = case._replace(dtype=dtype, **WIDE)
    agree(outputs(OURS, case), expected(case), 4.0)


def biased() -> Mixture:
    _, _, gate_up, down = inputs(Case(dtype=torch.bfloat16, **WIDE))
    return Mixture(gate_up, down, torch.randn(6, 80).bfloat16(), torch.randn(6, 24).bfloat16())


def test_one_expert_is_read_back_as_it_was() -> None:
    mixture = biased()
    prepared = with_flashinfer.prepare_experts(mixture)
    assert not torch.equal(prepared.gate_up, mixture.gate_up)
    for expert in range(6):
        found = with_flashinfer.one_expert(prepared, expert, 24, 40)
        for part, whole in zip(found, mixture, strict=True):
            assert part is not None
            assert whole is not None
            assert torch.equal(part[0], whole[expert])


def test_biases_follow_their_rows() -> None:
    mixture, (logits, x, _, _) = biased(), inputs(Case(dtype=torch.bfloat16, **WIDE))
    weights, experts = native.route(logits, 2, renormalise=True)
    found = with_flashinfer.mix(x, with_flashinfer.prepare_experts(mixture), weights, experts, "silu")
    torch.testing.assert_close(found, native.mix(x, mixture, weights, experts, "silu"), rtol=2e-2, atol=2e-2)


def test_what_the_kernels_lack_is_refused() -> None:
    mixture, (logits, x, _, _) = with_flashinfer.prepare_experts(biased()), inputs(Case(dtype=torch.bfloat16, **WIDE))
    weights, experts = native.route(logits, 2, renormalise=True)
    with pytest.raises(ValueError, match="gelu_tanh. Use --moe-runner-backend triton"):
        with_flashinfer.mix(x, mixture, weights, experts, "gelu_tanh")
    with pytest.raises(ValueError, match="Use triton"):
        with_flashinfer.mix(x, mixture, weights, experts, "silu", weigh_inputs=True)
    with pytest.raises(ValueError, match="multiples of 8, not 24 and 20"):
        with_flashinfer.prepare_experts(Mixture(*inputs(Case(dtype=torch.bfloat16))[2:]))


def in_blocks(inner_size: int = 256, size: int = 384) -> GroupedMixture:
    generator = torch.Generator().manual_seed(5)

    def draw(out_size: int, in_size: int) -> GroupedWeight:
        numbers = torch.randn(4, out_size, in_size, generator=generator).to(torch.float8_e4m3fn)
        blocks = (0.5 + torch.rand(4, -(-out_size // 128), in_size // 128, generator=generator)) * in_size**-0.5
        scales = blocks.repeat_interleave(128, 1)[:, :out_size]
        return GroupedWeight(numbers.view(torch.uint8), scales, bits=8, floating=True)

    return GroupedMixture(draw(2 * inner_size, size), draw(size, inner_size))


def test_float8_experts_are_those_of_the_dequantised_weights() -> None:
    given, x = in_blocks(), torch.randn(9, 384).bfloat16()
    packed = with_flashinfer.prepare_grouped_experts(given, torch.bfloat16)
    assert (packed.gate_up.shape, packed.down.shape) == ((4, 512, 384), (4, 384, 256))
    assert row_group(packed.gate_up) is None  # the kernels round the rows
    swapped = packed.gate_up.parts.codes  # type: ignore[attr-defined]
    assert torch.equal(torch.cat(swapped.view(torch.uint8).chunk(2, 1)[::-1], 1), given.gate_up.codes)
    weights, experts = native.route(torch.randn(9, 4), 2, renormalise=True)
    found = with_flashinfer.mix(x, packed, weights, experts, "silu").double()
    rounded = round_rows(x, 128)
    rows = rounded.numbers.double() * rounded.scales.double().repeat_interleave(128, 1)
    gate_up, down = given.gate_up.dequantised().double(), given.down.dequantised().double()
    wanted = torch.zeros_like(rows)
    for token, row in enumerate(rows):
        for weight, expert in zip(weights[token].double(), experts[token].tolist()):
            gate, up = (gate_up[expert] @ row).chunk(2)
            wanted[token] += weight * (down[expert] @ (gate * gate.sigmoid() * up))
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
    with pytest.raises(ValueError, match="not readable"):
        with_flashinfer.one_expert(packed, 0, 384, 256)


def test_float8_experts_that_the_kernels_lack_are_refused() -> None:
    whole, narrow = in_blocks(), in_blocks(192, 256)
    uneven = whole.down._replace(scales=whole.down.scales * torch.linspace(1, 2, 384).unsqueeze(1))
    cases = [
        (narrow, torch.bfloat16),
        (whole, torch.float16),
        (whole._replace(down=uneven), torch.bfloat16),
        (whole._replace(down_bias=torch.zeros(4, 384)), torch.bfloat16),
    ]
    for mixture, dtype in cases:
        with pytest.raises(ValueError, match="128 x 128 numbers.*Use --moe-runner-backend triton"):
            with_flashinfer.prepare_grouped_experts(mixture, dtype)


def test_weights_in_other_formats_are_left_to_triton() -> None:
    plain = Mixture(*inputs(Case())[2:])
    assert with_flashinfer.prepare_experts(plain) is plain
    assert with_flashinfer.prepare_experts(biased(), bits=8).gate_up.shape == (6, 80, 24)
