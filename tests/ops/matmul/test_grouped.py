"""Grouped weights with few bits: rounding, packing and products."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from cpp_kernels import DTYPES, LESSER, THREADS, backend
from ops.matmul.grouped import (
    GroupedWeight,
    GroupForm,
    common_form,
    factor_scales,
    round_to_float8,
    round_to_groups,
)
from ops.matmul.with_cpp import PackedWeight, PackedWeight4
from ops.select import select

NF4 = (-1.0, -0.69, -0.52, -0.39, -0.28, -0.18, -0.09, 0.0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1.0)
WHOLE_NUMBERS = tuple(map(float, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)))
SHAPES = [(1, 8, 8), (32, 32, 32), (100, 256, 128), (33, 96, 96), (70, 160, 16)]  # (O, I, group)
# each needs its own build
PROCESSORS = [(), *(pytest.param(march, marks=pytest.mark.slow) for march in LESSER.values())]


def weight(
    out_size: int, in_size: int, group: int, *, shifted: bool = False, table: Any = None, bits: int = 4
) -> GroupedWeight:
    generator = torch.Generator().manual_seed(out_size + in_size)
    made = GroupedWeight(
        torch.randint(0, 1 << bits, (out_size, in_size), generator=generator, dtype=torch.uint8),
        0.01 + torch.rand(out_size, in_size // group, generator=generator),
        torch.randn(out_size, in_size // group, generator=generator) if shifted else None,
        bits=bits,
    )
    return made if table is None else made._replace(table=table)


def halved(made: GroupedWeight) -> Tensor:
    """Round as kernels for bfloat16 do: 16-bit scales, a bfloat16 table."""
    table = tuple(torch.tensor(made.table).bfloat16().tolist())
    shifts = None if made.shifts is None else made.shifts.half().float()
    return made._replace(scales=made.scales.half().float(), shifts=shifts, table=table).dequantised()


@pytest.mark.parametrize("march", PROCESSORS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_those_of_the_dequantised_weight(dtype: torch.dtype, march: tuple[str, ...]) -> None:
    kernels = backend("matmul", 2, *march)
    cases = [(4, shape, table) for shape in SHAPES for table in (None, NF4)]
    cases += [(bits, (100, 192, 32 if bits == 5 else 16), None) for bits in (5, 6, 8)]
    for (bits, shape, table), shifted in product(cases, (False, True)):
        given = weight(*shape, shifted=shifted, table=table, bits=bits)
        packed = kernels.prepare_grouped(given, dtype)
        assert isinstance(packed, PackedWeight4)
        plain = given.dequantised() if dtype == torch.float32 else halved(given)
        for rows in (1, 3, 13, 30):
            x, bias = torch.randn(rows, shape[1]).to(dtype), torch.randn(shape[0]).to(dtype)
            wanted = x.double() @ plain.double().T
            bound = 1e-5 * float((x.double().abs() @ plain.double().abs().T).max())
            torch.testing.assert_close(kernels.logits(x, packed).double(), wanted, rtol=0, atol=bound)
            rounded = (wanted + bias).to(dtype)
            rtol = 2e-2 if dtype == torch.bfloat16 else 0.0
            torch.testing.assert_close(kernels.linear(x, packed, bias), rounded, rtol=rtol, atol=bound)


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_vocabulary_is_packed_in_pieces_and_looked_up(dtype: torch.dtype, bits: int) -> None:
    kernels = backend("matmul")
    given = weight(100, 64, 32, shifted=True, bits=bits)
    first, *others = (given.rows(slice(row, row + 32)) for row in range(0, 100, 32))
    packed = kernels.prepare_grouped(first, dtype, out_size=100)
    for number, piece in enumerate(others, 1):
        assert kernels.prepare_grouped(piece, dtype, into=packed, first=32 * number) is packed
    whole = kernels.prepare_grouped(given, dtype)
    assert packed.nbytes == whole.nbytes
    x = torch.randn(3, 64).to(dtype)
    assert torch.equal(kernels.logits(x, packed), kernels.logits(x, whole))
    with pytest.raises(ValueError, match="panels of 32"):
        kernels.prepare_grouped(first, dtype, into=packed, first=16)
    plain = (given.dequantised() if dtype == torch.float32 else halved(given)).to(dtype)
    ids = torch.tensor([0, 99, 31, 32, 64])
    found = backend("embedding").embed(ids, packed)
    torch.testing.assert_close(found, plain[ids], rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


def test_weights_of_several_forms_have_one_in_common_without_loss() -> None:
    given = [weight(8, 64, 32, shifted=True), weight(8, 64, 16, bits=6), weight(8, 64, 32, bits=5)]
    tabled = weight(8, 64, 32, table=WHOLE_NUMBERS)

    def form_of(each: GroupedWeight) -> GroupForm:
        return GroupForm(each.group, each.bits, each.table, each.shifts is not None)

    for weights, wanted in (
        (given[:2], GroupForm(16, 6)),
        (given[2:], GroupForm(32, 5, shifted=False)),
        ([given[0], tabled], GroupForm(32, 8)),
        # For 5 bits these shapes have no whole units.
        (
            [weight(8, 64, 16), given[2]],
            GroupForm(16, 6, shifted=False),
        ),
    ):
        form = common_form([form_of(each) for each in weights])
        assert form is not None
        assert form == wanted
        for each in weights:
            made = each.as_form(form)
            assert (made.group, made.bits) == (form.group, form.bits)
            torch.testing.assert_close(made.dequantised(), each.dequantised())
    assert common_form([form_of(tabled._replace(table=NF4)), form_of(given[0])]) is None
    assert common_form([GroupForm(48), GroupForm(32)]) is None


@pytest.mark.parametrize("march", PROCESSORS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rounded_rows_are_multiplied_exactly(dtype: torch.dtype, march: tuple[str, ...]) -> None:
    kernels = backend("matmul", 2, *march)
    for shape in SHAPES:
        for shifted, table in ((False, None), (True, None), (True, WHOLE_NUMBERS)):
            given = weight(*shape, shifted=shifted, table=table)._replace(rounded_rows=True)
            packed = kernels.prepare_grouped(given, dtype)
            plain = given.dequantised() if dtype == torch.float32 else halved(given)
            for rows in (1, 3, 13, 30):
                x = torch.randint(-127, 128, (rows, shape[1])).to(dtype)
                x[:, 0] = 127  # so that rounding to 8 bits is exact
                x *= 0.125
                wanted = x.double() @ plain.double().T
                bound = 1e-5 * float((x.double().abs() @ plain.double().abs().T).max())
                torch.testing.assert_close(kernels.logits(x, packed).double(), wanted, rtol=0, atol=bound)


def test_rows_are_not_rounded_where_the_table_holds_no_whole_numbers() -> None:
    kernels, given = backend("matmul"), weight(32, 64, 32, table=NF4)
    x = torch.randn(3, 64)
    found = [
        kernels.logits(x, kernels.prepare_grouped(given._replace(rounded_rows=asked), torch.float32))
        for asked in (False, True)
    ]
    assert torch.equal(*found)


def test_a_row_that_is_no_number_spoils_only_itself() -> None:
    kernels = backend("matmul")
    packed = kernels.prepare_grouped(weight(32, 64, 32)._replace(rounded_rows=True), torch.float32)
    x = torch.randn(3, 64)
    x[1, 5] = float("inf")
    found = kernels.logits(x, packed)
    assert found.isfinite().all(1).tolist() == [True, False, True]


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("march", [(), pytest.param(LESSER["AVX2"], marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_alone_and_among_others(dtype: torch.dtype, march: tuple[str, ...], num_threads: int) -> None:
    kernels = backend("matmul", num_threads, *march)
    for shifted, rounded, bits in (
        (False, False, 4),
        (True, False, 4),
        (True, True, 4),
        (False, False, 6),
        (True, False, 5),
        (True, False, 8),
    ):
        given = weight(100, 256, 32, shifted=shifted, bits=bits)._replace(rounded_rows=rounded)
        packed = kernels.prepare_grouped(given, dtype)
        x = torch.randn(300, 256).to(dtype)
        together = kernels.logits(x, packed)
        for row in (0, 1, 17, 255, 299):
            assert torch.equal(kernels.logits(x[row : row + 1], packed)[0], together[row])


def test_scales_of_16_bits_are_the_nearest() -> None:
    kernels = backend("matmul")
    scales = torch.tensor([[0.0], [6e-8], [3e-6], [6.1e-5], [1 / 3], [-0.7], [1000.3], [65504.0]])
    codes = torch.full((8, 8), 9, dtype=torch.uint8)  # codes of 1
    x = torch.zeros(1, 8, dtype=torch.bfloat16)
    x[0, 0] = 1
    found = kernels.logits(x, kernels.prepare_grouped(GroupedWeight(codes, scales), torch.bfloat16))
    assert torch.equal(found[0], scales[:, 0].half().float())


def test_four_bits_take_a_quarter_of_the_memory() -> None:
    kernels = backend("matmul")
    packed = kernels.prepare_grouped(round_to_groups(torch.randn(256, 512), 32), torch.bfloat16)
    assert packed.shape == (256, 512)
    assert packed.nbytes < 256 * 512 * 2 * 0.29


def test_scales_of_nvfp4_are_factored_without_loss() -> None:
    generator = torch.Generator().manual_seed(2)
    numbers = torch.randint(1, 127, (2, 90, 24), generator=generator, dtype=torch.uint8).view(torch.float8_e4m3fn)
    numbers[0, 0] = torch.zeros(24).to(numbers.dtype)
    numbers[0, 1, 1:] = torch.zeros(23).to(numbers.dtype)
    factors = torch.rand(2, 3, generator=generator).repeat_interleave(30, dim=1) * 1e-3
    scales = numbers.float() * factors.unsqueeze(-1)
    factored = factor_scales(scales)
    assert factored is not None
    found, of_rows = factored
    assert (found.shape, found.dtype, of_rows.shape) == (scales.shape, torch.float8_e4m3fn, (2, 90))
    torch.testing.assert_close(found.float() * of_rows.unsqueeze(-1), scales, rtol=2**-21, atol=0)
    assert factor_scales(torch.rand(3, 40, generator=generator)) is None
    mixed = torch.cat((scales[1], torch.rand(1, 24, generator=generator)))
    assert factor_scales(mixed) is None


def test_what_no_kernel_takes_is_dequantised() -> None:
    kernels, given = backend("matmul"), weight(32, 24, 12)
    assert isinstance(kernels.prepare_grouped(given, torch.float32), PackedWeight)
    assert torch.equal(kernels.prepare_grouped(given, torch.float16), given.dequantised().half())
    assert torch.equal(select().prepare_grouped(given, torch.float32), given.dequantised())
    with pytest.raises(ValueError, match="packed for another dtype"):
        kernels.linear(torch.zeros(1, 32), kernels.prepare_grouped(weight(8, 32, 32), torch.bfloat16))


def test_rounding_keeps_the_largest_of_a_group_and_brings_little_error() -> None:
    plain = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    rounded = round_to_groups(plain, 32)
    error = (rounded.dequantised() - plain).norm() / plain.norm()
    naive = plain.unflatten(1, (-1, 32))
    scale = naive.abs().amax(-1, keepdim=True) / 7
    worst = ((naive / scale).round() * scale - naive).norm() / plain.norm()
    assert error < 0.09
    assert error < 0.9 * worst
    exact = torch.tensor([[-8.0, 7, 3, 0, 1, -1, 5, -6] * 4]) * 0.37
    torch.testing.assert_close(round_to_groups(exact, 32).dequantised(), exact)
    assert torch.equal(round_to_groups(torch.zeros(1, 32), 32).dequantised(), torch.zeros(1, 32))
    with pytest.raises(ValueError, match="groups of 32"):
        round_to_groups(torch.zeros(1, 40), 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_float8_keeps_rows_of_zeros_and_small_rows(dtype: torch.dtype) -> None:
    plain = torch.tensor([[0.0, 0.0], [1e-5, -1e-5], [1.0, 0.5]]).repeat(1, 16).to(dtype)
    found = round_to_float8(plain).dequantised()
    torch.testing.assert_close(found, plain.float(), rtol=0.07, atol=0)
