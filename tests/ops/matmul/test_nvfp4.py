"""NVFP4: rounding of inputs and products, compared with compressed-tensors, and FlashInfer's products with fakes."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import recorded_flashinfer
import recorded_nvfp4
from ops.matmul import nvfp4, with_fp4, with_triton
from ops.matmul.fused_weight import FusedWeight
from ops.matmul.grouped import E2M1, GroupedWeight

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in recorded_flashinfer.modules().items():
        monkeypatch.setitem(sys.modules, name, module)


def weight(out_size: int = 96, in_size: int = 160, *, input_scales: Tensor | None = None) -> GroupedWeight:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 16, (out_size, in_size), generator=generator, dtype=torch.uint8)
    scales = (40 * torch.rand(out_size, in_size // 16, generator=generator)).to(torch.float8_e4m3fn).float() * 3e-4
    inputs = torch.tensor([0.0011, 0.0013]) if input_scales is None else input_scales
    return GroupedWeight(codes, scales, table=E2M1, input_scales=inputs)


def rows(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(BF16)


def test_rows_are_rounded_as_compressed_tensors_does() -> None:
    quantization: Any = pytest.importorskip("compressed_tensors.quantization")
    forward: Any = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    settings = quantization.preset_name_to_scheme("NVFP4", ["Linear"]).input_activations
    x, factor = rows(32, 64).float(), torch.tensor(0.0021)
    grouped = x.unflatten(1, (-1, 16))
    scales, zeros = quantization.utils.calculate_qparams(
        grouped.amin(2), grouped.amax(2), settings, global_scale=1 / factor
    )
    wanted = forward.fake_quantize(x, scales, zeros, settings, global_scale=1 / factor)
    found = nvfp4.round_rows(x, factor)
    assert torch.equal(found.scales.float(), scales.float())
    torch.testing.assert_close(found.dequantised() * factor, wanted, rtol=1e-6, atol=1e-6)


def test_numbers_become_the_nearest_and_halves_the_even_ones() -> None:
    numbers = torch.tensor(E2M1[:8])
    halves = (numbers[1:] + numbers[:-1]) / 2
    assert nvfp4.to_e2m1(halves).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert nvfp4.to_e2m1(-halves).tolist() == [8, 10, 10, 12, 12, 14, 14]
    assert nvfp4.to_e2m1(torch.tensor([0.26, 0.74, 9.0, -7.0, 0.0])).tolist() == [1, 1, 7, 15, 0]
    assert nvfp4.to_e2m1(torch.tensor(E2M1)).tolist() == list(range(16))


def test_rows_beyond_the_calibrated_range_are_clipped() -> None:
    found = nvfp4.round_rows(torch.tensor([[10.0] * 16 + [1.0] + [0.0] * 15]), 1e-3)
    assert found.scales[0, 0].item() == 448
    values = (found.dequantised() * 1e-3)[0]
    torch.testing.assert_close(values[:17], torch.tensor([2.688] * 16 + [0.96]), rtol=0.08, atol=0)
    assert not values[17:].any()


@pytest.mark.parametrize(("num_rows", "columns"), [(1, 1), (130, 6), (256, 8)])
def test_scales_are_tiled(num_rows: int, columns: int) -> None:
    scales = torch.randint(0, 256, (num_rows, columns), dtype=torch.uint8)
    tiles = nvfp4.tiled(scales)
    assert torch.equal(tiles, recorded_nvfp4.in_tiles(scales))
    assert torch.equal(recorded_nvfp4.from_tiles(tiles, num_rows, columns), scales)
    assert torch.equal(nvfp4.tiled(torch.stack((scales, scales)))[1], tiles)


@pytest.mark.parametrize("shape", [(1, 160), (5, 160), (2, 70, 160)])
@pytest.mark.parametrize("dtype", [torch.float16, BF16])
def test_products_are_those_of_rounded_rows(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    given, x, bias = weight(), rows(*shape).to(dtype), torch.randn(96).to(dtype)
    packed = with_fp4.prepare_grouped(given, dtype)
    assert isinstance(packed, FusedWeight)
    assert (packed.shape, with_fp4.row_group(packed)) == ((96, 160), None)
    assert packed.nbytes < 96 * 160 * 0.75
    for found, wanted in (
        (with_fp4.linear(x, packed, bias), nvfp4.linear(x, given, bias)),
        (with_fp4.logits(x, packed), nvfp4.linear(x, given)),
    ):
        assert (found.dtype, found.shape) == (dtype, (*shape[:-1], 96))
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
    plain = x.float() @ given.dequantised().T  # what Triton computes
    distance = (with_fp4.logits(x, packed).float() - plain).norm() / plain.norm()
    assert 0.03 < distance < 0.12


def test_a_column_is_read_back_by_an_input_that_is_not_rounded() -> None:
    given = weight()
    packed = with_fp4.prepare_grouped(given, BF16)
    size = nvfp4.exact_input(packed)
    columns = with_fp4.linear((torch.eye(160) * size).to(BF16), packed).float() / size
    torch.testing.assert_close(columns, given.dequantised().T, rtol=4e-3, atol=1e-7)
    assert nvfp4.exact_input(torch.ones(3, 3)) == 1.0


def test_triton_gets_other_weights() -> None:
    given = weight()
    uneven = given._replace(scales=given.scales * torch.linspace(1, 1.3, 96).unsqueeze(1))
    for other, dtype in (
        (given._replace(input_scales=None), BF16),
        (given, torch.float32),
        (weight(96, 144), BF16),
        (weight(80, 160), BF16),
        (uneven, BF16),
    ):
        packed = with_fp4.prepare_grouped(other, dtype)
        assert type(packed) is type(with_triton.prepare_grouped(other, dtype))
        assert not isinstance(packed, FusedWeight)
        assert with_fp4.row_group(packed) is None
    x = torch.randn(3, 16)
    torch.testing.assert_close(with_fp4.linear(x, torch.ones(4, 16), torch.ones(4)), x @ torch.ones(16, 4) + 1)


def test_the_factor_of_a_weight_is_found() -> None:
    given = weight()
    found = nvfp4.factored(given)
    assert found is not None
    rounded, factor = found
    torch.testing.assert_close(rounded.dequantised() * factor, given.dequantised())
    assert nvfp4.factored(given._replace(scales=torch.zeros_like(given.scales))) is not None
