"""MXFP4, NVFP4 and float8 experts in the layouts of FlashInfer's fused kernels, with fakes that undo these layouts."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import recorded_flashinfer
import recorded_fused
from ops.matmul.grouped import E2M1, GroupedWeight
from ops.matmul.rounded_rows import round_rows
from ops.moe import GroupedMixture, fused_weights, native, with_flashinfer, with_trtllm_gen

SIZE, INNER, EXPERTS = 160, 96, 3  # no multiples of what the kernels need
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in recorded_flashinfer.modules().items():
        monkeypatch.setitem(sys.modules, name, module)


def experts_in_mxfp4(size: int = SIZE, inner_size: int = INNER, *, biased: bool = True) -> GroupedMixture:
    generator = torch.Generator().manual_seed(3)

    def draw(out_size: int, in_size: int) -> GroupedWeight:
        codes = torch.randint(0, 16, (EXPERTS, out_size, in_size), generator=generator, dtype=torch.uint8)
        exponents = torch.randint(-6, -2, (EXPERTS, out_size, in_size // 32), generator=generator)
        return GroupedWeight(codes, exponents.float().exp2(), table=E2M1, powers=True)

    biases = [torch.randn(EXPERTS, size, generator=generator).to(BF16) for size in (2 * inner_size, size)]
    return GroupedMixture(draw(2 * inner_size, size), draw(size, inner_size), *(biases if biased else (None, None)))


def drawn(num_tokens: int = 9, size: int = SIZE) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    weights, experts = native.route(torch.randn(num_tokens, EXPERTS, generator=generator), 2, renormalise=True)
    return torch.randn(num_tokens, size, generator=generator).to(BF16), weights, experts


def wanted(mixture: GroupedMixture, activation: str, size: int = SIZE) -> Tensor:
    x, weights, experts = drawn(size=size)
    plain = native.prepare_grouped_experts(mixture, torch.float32)
    plain = plain._replace(
        gate_up_bias=None if plain.gate_up_bias is None else plain.gate_up_bias.float(),
        down_bias=None if plain.down_bias is None else plain.down_bias.float(),
    )
    return native.mix(x.float(), plain, weights, experts, activation)


def distance(found: Tensor, expected: Tensor) -> float:
    return ((found.float() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("activation", ["silu", "clamped_swiglu"])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("kernels", ["cutlass", "trtllm in bfloat16", "trtllm in MXFP8"])
def test_mxfp4_experts_equal_the_dequantised_ones(kernels: str, biased: bool, activation: str) -> None:
    mixture, rounds = experts_in_mxfp4(biased=biased), kernels == "trtllm in MXFP8"
    backend: Any = with_flashinfer
    mix = with_flashinfer.mix
    if kernels != "cutlass":
        backend, mix = with_trtllm_gen, with_trtllm_gen.make(rounds=rounds)["mix"]
    prepared = backend.prepare_grouped_experts(mixture, BF16)
    assert (prepared.gate_up.shape, prepared.down.shape) == ((EXPERTS, 2 * INNER, SIZE), (EXPERTS, SIZE, INNER))
    x, weights, experts = drawn()
    found = mix(x, prepared, weights, experts, activation)
    assert (found.shape, found.dtype, found.is_contiguous()) == (x.shape, BF16, True)
    assert distance(found, wanted(mixture, activation)) < (0.06 if rounds else 0.006)
    with pytest.raises(ValueError, match="one by one"):
        backend.one_expert(prepared, 0, SIZE, INNER)
    with pytest.raises(ValueError, match="do not compute experts with gelu. Use --moe-runner-backend triton"):
        mix(x, prepared, weights, experts, "gelu")


def test_float8_experts_on_blackwell_equal_the_dequantised_ones() -> None:
    generator = torch.Generator().manual_seed(5)

    def draw(out_size: int, in_size: int) -> GroupedWeight:
        numbers = torch.randn(EXPERTS, out_size, in_size, generator=generator).to(torch.float8_e4m3fn)
        blocks = (0.5 + torch.rand(EXPERTS, out_size // 128, in_size // 128, generator=generator)) * in_size**-0.5
        return GroupedWeight(numbers.view(torch.uint8), blocks.repeat_interleave(128, 1), bits=8, floating=True)

    mixture = GroupedMixture(draw(256, 384), draw(384, 128))
    prepared = with_trtllm_gen.prepare_grouped_experts(mixture, BF16)
    x, weights, experts = drawn(size=384)
    x = round_rows(x, 128)  # in torch: a Triton kernel may not run here
    assert distance(with_trtllm_gen.mix(x, prepared, weights, experts, "silu"), wanted(mixture, "silu", 384)) < 0.04
    with pytest.raises(ValueError, match="with clamped_swiglu"):
        with_trtllm_gen.mix(x, prepared, weights, experts, "clamped_swiglu")
    with pytest.raises(ValueError, match="one by one"):
        with_trtllm_gen.one_expert(prepared, 0, 384, 128)
    with pytest.raises(ValueError, match="Use --moe-runner-backend triton"):
        with_trtllm_gen.prepare_grouped_experts(mixture, torch.float16)


def experts_in_nvfp4() -> GroupedMixture:
    generator = torch.Generator().manual_seed(6)

    def draw(out_size: int, in_size: int, num_tensors: int) -> GroupedWeight:
        codes = torch.randint(0, 16, (EXPERTS, out_size, in_size), generator=generator, dtype=torch.uint8)
        numbers = (40 * torch.rand(EXPERTS, out_size, in_size // 16, generator=generator)).to(torch.float8_e4m3fn)
        factors = torch.tensor([3e-4, 2e-4, 7e-4]).view(EXPERTS, 1, 1)
        inputs = 1e-3 * (1 + torch.rand(EXPERTS, num_tensors, generator=generator))
        return GroupedWeight(codes, numbers.float() * factors, table=E2M1, input_scales=inputs)

    return GroupedMixture(draw(2 * INNER, SIZE, 2), draw(SIZE, INNER, 1))


@pytest.mark.parametrize("backend", [with_flashinfer, with_trtllm_gen])
def test_nvfp4_experts_are_those_of_rounded_inputs(backend: Any) -> None:
    mixture = experts_in_nvfp4()
    prepared = backend.prepare_grouped_experts(mixture, BF16)
    assert (prepared.gate_up.shape, prepared.down.shape) == ((EXPERTS, 2 * INNER, SIZE), (EXPERTS, SIZE, INNER))
    x, weights, experts = drawn()
    found = backend.mix(x, prepared, weights, experts, "silu")
    assert (found.shape, found.dtype, found.is_contiguous()) == (x.shape, BF16, True)
    assert distance(found, native.mix_rounded(x.float(), mixture, weights, experts)) < 0.02
    assert 0.05 < distance(found, wanted(mixture, "silu")) < 0.2  # what Triton computes
    with pytest.raises(ValueError, match="one by one"):
        backend.one_expert(prepared, 0, SIZE, INNER)
    with pytest.raises(ValueError, match="with clamped_swiglu"):
        backend.mix(x, prepared, weights, experts, "clamped_swiglu")


@pytest.mark.parametrize("backend", [with_flashinfer, with_trtllm_gen])
def test_nvfp4_experts_that_the_kernels_lack_are_refused(backend: Any) -> None:
    mixture = experts_in_nvfp4()
    biased = mixture._replace(down_bias=torch.zeros(EXPERTS, SIZE))
    for other in (mixture._replace(down=mixture.down._replace(input_scales=None)), biased):
        with pytest.raises(ValueError, match="with scales of the inputs and without biases.*Use --moe-runner-backend"):
            backend.prepare_grouped_experts(other, BF16)
    scales = mixture.gate_up.scales.clone()
    scales[1, :INNER] *= 1.3
    with pytest.raises(ValueError, match="one factor .* for an expert's gate and up"):
        backend.prepare_grouped_experts(mixture._replace(gate_up=mixture.gate_up._replace(scales=scales)), BF16)


def test_new_weights_overwrite_the_old_ones_in_their_memory() -> None:
    old, new = (with_flashinfer.prepare_grouped_experts(each, BF16) for each in (experts_in_mxfp4(), _others()))
    expected = [part.clone() for part in new.gate_up.parts]  # type: ignore[attr-defined]
    held = torch.nn.Parameter(old.gate_up, requires_grad=False)
    assert held.untyped_storage().nbytes() == new.gate_up.untyped_storage().nbytes() == new.gate_up.nbytes
    held.untyped_storage().copy_(new.gate_up.untyped_storage())
    assert all(map(torch.equal, held.detach().parts, expected))  # type: ignore[attr-defined]


def _others() -> GroupedMixture:
    mixture = experts_in_mxfp4()
    return mixture._replace(gate_up=mixture.gate_up._replace(codes=mixture.gate_up.codes.flip(1)))


def test_layouts_equal_those_of_the_installed_library() -> None:
    """FlashInfer's own functions on a CPU: shuffled rows, alternate rows, and exponents for Hopper (0.6.13)."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
        del sys.modules[name]
    library = pytest.importorskip("flashinfer", exc_type=ImportError)
    rows = torch.arange(256 * 3).view(256, 3)
    assert torch.equal(library.shuffle_matrix_a(rows, 128), recorded_fused.shuffle_matrix_a(rows, 128))
    up, gate = rows.view(1, 2, 128, 3).unbind(1)
    alternate = with_trtllm_gen._alternate(up, gate)[0]
    assert torch.equal(library.reorder_rows_for_gated_act_gemm(rows), alternate)
    exponents = torch.randint(0, 256, (2, 64, 8), dtype=torch.uint8)
    if library.__version__ == "0.6.13":
        ours = recorded_fused.interleave_moe_scales_for_sm90_mixed_gemm(exponents)
        assert torch.equal(library.fused_moe.interleave_moe_scales_for_sm90_mixed_gemm(exponents), ours)


def test_exponents_are_those_of_the_checkpoint() -> None:
    scales = torch.tensor([[[2.0**-127, 2.0**-3, 1.0, 2.0**127]]])
    weight = GroupedWeight(torch.zeros(1, 1, 128, dtype=torch.uint8), scales, table=E2M1, powers=True)
    assert fused_weights.is_mxfp4(weight)
    assert fused_weights.mxfp4(weight).scales.tolist() == [[[0, 124, 127, 254]]]
    assert not fused_weights.is_mxfp4(weight._replace(powers=False))
