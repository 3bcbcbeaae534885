"""Memory of single experts: experts that swap their lines compute what the other one computed."""

from __future__ import annotations

import pytest
import torch

import cpp_kernels
from ops.matmul.grouped import round_experts
from ops.moe import GroupedMixture, Mixture
from ops.moe.pieces import expert_pieces
from ops.select import Kernels, select

EXPERTS, SIZE, INNER = 4, 64, 64


def plain() -> Mixture:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    return Mixture(
        draw(EXPERTS, 2 * INNER, SIZE), draw(EXPERTS, SIZE, INNER), draw(EXPERTS, 2 * INNER), draw(EXPERTS, SIZE)
    )


def prepared(kernels: Kernels, form: str, mixture: Mixture) -> Mixture:
    if form == "grouped":
        gate_up, down = round_experts(mixture.gate_up, 32), round_experts(mixture.down, 32)
        grouped = GroupedMixture(gate_up, down, mixture.gate_up_bias, mixture.down_bias)
        return kernels.prepare_grouped_experts(grouped, torch.float32)
    return kernels.prepare_experts(mixture, bits=8 if form == "8 bits" else None)


@pytest.mark.parametrize("form", ["torch", "packed", "8 bits", "grouped"])
def test_swapped_lines_are_swapped_experts(form: str) -> None:
    if form != "torch":
        cpp_kernels.library()
    kernels, mixture = select(None if form == "torch" else cpp_kernels.CHOICES), plain()
    order = [2, 0, 3, 1]
    wanted = prepared(kernels, form, Mixture(*(each[order] for each in mixture if each is not None)))
    moved = prepared(kernels, form, mixture)
    pieces = expert_pieces(moved, EXPERTS)
    assert sum(piece.numel() for piece in pieces) >= sum(each.numel() for each in mixture if each is not None) // 2
    for piece in pieces:
        piece.copy_(piece[order].clone())
    x, experts = torch.randn(5, SIZE), torch.tensor([[0, 1], [2, 3], [1, 3], [3, 0], [2, 1]], dtype=torch.int32)
    weights = torch.full((5, 2), 0.5)
    found, expected = (kernels.mix(x, each, weights, experts, "silu") for each in (moved, wanted))
    assert torch.equal(found, expected)
    assert not torch.equal(found, kernels.mix(x, prepared(kernels, form, plain()), weights, experts, "silu"))


def test_weights_that_triton_packs_have_a_line_for_each_expert() -> None:
    with_triton = pytest.importorskip("ops.matmul.with_triton")
    codes = torch.arange(EXPERTS * 6 * 8, dtype=torch.int8).view(EXPERTS, 6, 8)
    packed = with_triton.pack(with_triton.Parts(codes, torch.randn(EXPERTS, 6, 1)))
    first, second = expert_pieces([packed], EXPERTS)
    assert (first.shape, second.shape) == ((EXPERTS, 48), (EXPERTS, 24))
    first[0] = first[1].clone()
    assert torch.equal(packed.parts.codes[0], codes[1])
