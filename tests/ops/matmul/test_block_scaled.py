"""Block-scaled float8 products of FlashInfer, with fakes that compute them as FlashInfer documents."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

import recorded_flashinfer
from ops.matmul import with_deepgemm, with_groupwise, with_triton
from ops.matmul.block_scaled import block_scales, has_blocks
from ops.matmul.grouped import GroupedWeight
from ops.matmul.rounded_rows import round_rows

pytestmark = pytest.mark.interpreter  # Triton rounds the rows for Blackwell

BF16 = torch.bfloat16
BOTH = pytest.mark.parametrize("backend", [with_deepgemm, with_groupwise])


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in recorded_flashinfer.modules().items():
        monkeypatch.setitem(sys.modules, name, module)


def weight(out_size: int = 256, in_size: int = 384) -> GroupedWeight:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randn(out_size, in_size, generator=generator).to(torch.float8_e4m3fn).view(torch.uint8)
    blocks = 0.5 + torch.rand(-(-out_size // 128), in_size // 128, generator=generator)
    return GroupedWeight(codes, blocks.repeat_interleave(128, 0)[:out_size], bits=8, floating=True)


def scales_of(packed: Tensor) -> Tensor:
    assert isinstance(packed, with_triton.Packed)
    return packed.parts.scales


def expected(x: Tensor, given: GroupedWeight, bias: Tensor) -> Tensor:
    """Return the product in float64 with rows that torch rounds."""
    rounded = round_rows(x, 128)
    rows = rounded.numbers.double() * rounded.scales.double().repeat_interleave(128, 1)
    return (rows @ given.dequantised().double().T + bias.double()).view(*x.shape[:-1], -1)


@BOTH
@pytest.mark.parametrize("shape", [(1, 384), (5, 384), (2, 4, 384)])
def test_products_are_those_of_rounded_rows(backend: ModuleType, shape: tuple[int, ...]) -> None:
    given, x, bias = weight(), torch.randn(shape).to(BF16), torch.randn(256).to(BF16)
    packed = backend.prepare_grouped(given, BF16)
    assert has_blocks(packed)
    assert packed.shape == (256, 384)
    rounded = round_rows(x, 128)  # as the norm before a product would
    rows = rounded if backend is with_groupwise and x.dim() == 2 else x
    found, wanted = backend.linear(rows, packed, bias), expected(x, given, bias)
    torch.testing.assert_close(found.double(), wanted, rtol=2e-2, atol=2e-1)
    assert found.dtype == BF16
    torch.testing.assert_close(
        backend.logits(rows, packed).double(), expected(x, given, 0 * bias), rtol=2e-2, atol=2e-1
    )
    assert backend.row_group(packed) == (None if backend is with_deepgemm else 128)


def test_scales_of_blocks_are_recovered() -> None:
    given = weight(192)
    blocks = block_scales(given)
    assert blocks is not None
    assert blocks.shape == (2, 3)
    assert torch.equal(blocks.repeat_interleave(128, 0)[:192], given.scales)


@BOTH
def test_other_weights_are_packed_as_for_triton(backend: ModuleType) -> None:
    given = weight()
    uneven = given._replace(scales=given.scales * torch.linspace(1, 2, 256).unsqueeze(1))
    per_row = given._replace(scales=given.scales[:, :1])
    narrow = weight(32)
    for other, dtype in ((uneven, BF16), (per_row, BF16), (narrow, BF16), (given, torch.float16)):
        packed = backend.prepare_grouped(other, dtype)
        assert not has_blocks(packed)
        assert torch.equal(scales_of(packed), scales_of(with_triton.prepare_grouped(other, dtype)))
        assert backend.row_group(packed) == with_triton.row_group(packed)
    x = torch.randn(3, 384)
    torch.testing.assert_close(backend.linear(x, torch.ones(4, 384)), x @ torch.ones(384, 4))


def test_a_matrix_of_64_outputs_is_for_hopper_only() -> None:
    given, x = weight(192), torch.randn(3, 384).to(BF16)
    packed = with_deepgemm.prepare_grouped(given, BF16)
    wanted = expected(x, given, torch.zeros(192))
    torch.testing.assert_close(with_deepgemm.linear(x, packed).double(), wanted, rtol=2e-2, atol=2e-1)
    assert not has_blocks(with_groupwise.prepare_grouped(given, BF16))
