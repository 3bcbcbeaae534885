"""Products with 8-bit and 4-bit weights in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import paged_forward
import quantized_checkpoints
import tiny_checkpoints
from kernel_cases.matmul import CASES, expected, inputs, outputs
from kernel_comparison import agree, differ
from kernel_mutants import backend_with_mutant, mutant
from ops.matmul import int8, native
from ops.select import select

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize("name", CASES)
def test_products_are_those_of_the_dequantised_weight(name: str) -> None:
    from ops.matmul import with_triton

    agree(outputs(with_triton, CASES[name]), expected(CASES[name]), slack=2)
    half = CASES[name]._replace(dtype=torch.float16)
    agree(outputs(with_triton, half), outputs(native, half), slack=2)


def test_a_weight_stays_in_4_bits_through_a_parameter() -> None:
    from ops.matmul import with_triton

    x, weight, _ = inputs(CASES["with zeros and a bias"])
    packed = with_triton.prepare_grouped(weight, torch.float16)
    held = torch.nn.Parameter(packed, requires_grad=False)
    assert held.shape == (70, 96)
    assert 70 * 96 // 2 + 2 * 70 * 3 * 4 <= held.nbytes < 6000
    wanted = with_triton.linear(x, packed)
    other = with_triton.prepare_grouped(weight._replace(codes=15 - weight.codes), torch.float16)
    assert not torch.equal(with_triton.linear(x, other), wanted)
    other.untyped_storage().copy_(held.untyped_storage())  # like a weight update
    assert torch.equal(with_triton.linear(x, other), with_triton.linear(x, held))
    assert torch.equal(with_triton.linear(x, held), wanted)


def test_scales_of_nvfp4_take_a_byte_each_and_are_the_checkpoints() -> None:
    from ops.matmul import with_triton

    _, weight, _ = inputs(CASES["floats with float8 scales"])
    packed: Any = with_triton.prepare_grouped(weight, torch.float16)
    codes, scales, _, factors = packed.parts
    assert (codes.nbytes, scales.nbytes, factors.nbytes) == (70 * 48, 70 * 6, 70 * 4)
    torch.testing.assert_close(with_triton.unpacked(packed.parts), weight.dequantised(), rtol=2**-21, atol=0)
    for scales in (torch.rand(70, 6), torch.rand(70, 6) * 3e5):
        other: Any = with_triton.prepare_grouped(weight._replace(scales=scales), torch.float16)
        assert other.parts.scales.dtype == torch.float32
        assert torch.equal(with_triton.unpacked(other.parts), weight._replace(scales=scales).dequantised())


def test_powers_of_two_of_any_size_are_scales_of_floats() -> None:
    from ops.matmul import with_triton

    x, weight, _ = inputs(CASES["floats with exponents"])
    exponents = torch.randint(-40, -20, weight.scales.shape)
    for shift in (0, 60):  # the scales themselves, times 2 ** 126, would be infinite
        scales = torch.exp2((exponents + shift).float())
        packed: Any = with_triton.prepare_grouped(weight._replace(scales=scales), torch.float32)
        assert packed.parts.scales.dtype == torch.uint8
        wanted = weight._replace(scales=scales).dequantised()
        assert torch.equal(with_triton.unpacked(packed.parts), wanted)
        found = with_triton.linear(x, packed)
        torch.testing.assert_close(found, x @ wanted.T, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("form", ["awq", "mxfp4", pytest.param("nvfp4", marks=pytest.mark.slow)])
def test_a_checkpoint_stays_in_4_bits_with_its_experts(form: str, tmp_path: Path) -> None:
    kernels = select({"matmul": "with_triton", "moe": "with_triton"})
    if form == "awq":
        quantized, plain = quantized_checkpoints.write(tmp_path, "awq", "qwen3_moe")
    elif form == "nvfp4":
        quantized, _ = quantized_checkpoints.write(tmp_path, "compressed-tensors", "qwen3_moe", preset="NVFP4A16")
        plain = quantized
    else:
        source = tiny_checkpoints.cached("gpt_oss", **quantized_checkpoints.SHAPE | {"intermediate_size": 64})
        quantized_checkpoints.write_mxfp4(Path(source), tmp_path)
        quantized = plain = str(tmp_path)  # native kernels dequantise it, and another test proves that they read it
    kept: Any = paged_forward.load(quantized, kernels=kernels)
    assert type(kept.layers[0].attention.qkv.weight).__name__ == ("Parameter" if form == "mxfp4" else "Packed")
    assert type(kept.layers[0].mlp.gate_up).__name__ == "Packed"
    if form == "nvfp4":
        for weight in (kept.layers[0].attention.qkv.weight, kept.layers[0].mlp.gate_up):
            assert weight.parts.scales.dtype == torch.float8_e4m3fn
    ids = [[5, 9, 80, 17]]
    mine, theirs = (paged_forward.all_logits(model, ids, 16) for model in (kept, paged_forward.load(plain)))
    torch.testing.assert_close(mine[0], theirs[0], rtol=0, atol=0.01 * float(theirs[0].std()))


def test_what_the_kernel_does_not_take_is_dequantised() -> None:
    from ops.matmul import with_triton

    _, weight, _ = inputs(CASES["with zeros and a bias"])
    for other in (weight._replace(table=(*range(15), 0.5)), weight._replace(scales=torch.ones(70, 4))):
        other = other._replace(shifts=None)
        found = with_triton.prepare_grouped(other, torch.float32)
        assert torch.equal(found, other.dequantised())


@pytest.mark.parametrize("shape", [(3, 40, 48), (40, 70, 130)])
def test_8_bits_are_rounded_as_elsewhere(shape: tuple[int, int, int]) -> None:
    from ops.matmul import with_triton

    num_rows, out_size, in_size = shape
    x, weight, bias = torch.randn(2, num_rows, in_size), torch.randn(out_size, in_size), torch.randn(out_size)
    x *= in_size**-0.5
    agree(
        [with_triton.linear(x, with_triton.prepare(weight, bits=8), bias)],
        [int8.linear(x, int8.prepare(weight, bits=8), bias)],
        slack=2,
    )
    assert with_triton.prepare(weight) is weight
    with pytest.raises(ValueError, match="8 bits, not to 3"):
        with_triton.prepare(weight, bits=3)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("one row", "tl.interleave(both & 15, both >> 4)", "tl.interleave(both >> 4, both & 15)"),
        ("one row", "(inputs // GROUP)[None, :]", "(0 * inputs)[None, :]"),
        ("groups of more than a step that it does not divide", "min(GROUP, step, LARGEST_GROUP)", "min(GROUP, step)"),
        ("floats with exponents", "packed << 6", "packed << 3"),
        ("floats with exponents", "packed & 0x81C081C0", "packed & 0x01C081C0"),
        ("floats with exponents", "(packed >> 7) & 0x00400040", "(packed >> 7) & 0x00000040"),
        ("floats with exponents", "tl.join(one, second)", "tl.join(second, one)"),
        ("floats in groups of 16", "scaled.reshape(lines, step // 2, 2)", "numbers.reshape(lines, step // 2, 2)"),
        ("floats with float8 scales", "(scale.to(tl.int16) & 0x7F) << 7", "(scale.to(tl.int16) & 0x7F) << 6"),
        ("floats with float8 scales", "total *= tl.load(factors + columns", "total *= tl.load(factors + 0 * columns"),
        ("one row", "first = tl.program_id(2) * per_split", "first = 0 * per_split"),
        ("with zeros and a bias", "total += tl.sum(a, axis=1)[:, None]", "total += 0 * tl.sum(a, axis=1)[:, None]"),
        ("with zeros and a bias", "grouped += tl.load", "grouped += 0 * tl.load"),
        (
            "more rows and outputs than a tile",
            "if bias is not None:\n        total +=",
            "if bias is not None:\n        total -=",
        ),
        (
            "more rows and outputs than a tile",
            "rows.to(tl.int64)[:, None] * x_stride",
            "0 * rows[:, None] * x_stride",
        ),
    ],
)
def test_a_broken_kernel_is_noticed(name: str, old: str, new: str, tmp_path: Path) -> None:
    from ops.matmul import triton_e2m1, triton_four_bits

    steps = (Path(str(each.__file__)).read_text(encoding="utf-8") for each in (triton_e2m1, triton_four_bits))
    in_step = any(old in text for text in steps)
    broken = (backend_with_mutant if in_step else mutant)("matmul", old, new, tmp_path)
    cases = [CASES[name], CASES[name]._replace(dtype=torch.float16)]  # weights are scaled before or after the product
    assert any(differ(outputs(broken, case), expected(case), slack=2) for case in cases)
