"""Mixture-of-experts kernels in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kernel_cases.moe import CASES, FOUR_BITS, outputs, outputs_of_4_bits
from kernel_comparison import agree, differ
from kernel_mutants import mutant
from ops.moe import native

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_equal_native(name: str) -> None:
    from ops.moe import with_triton

    found, wanted = (outputs(backend, CASES[name]) for backend in (with_triton, native))
    assert torch.equal(found[1], wanted[1])
    agree(found, wanted)
    assert [x.dtype for x in found] == [x.dtype for x in wanted]


@pytest.mark.parametrize("name", FOUR_BITS)
def test_experts_of_4_bits_equal_the_dequantised_ones(name: str) -> None:
    from ops.moe import with_triton

    many = [(40, torch.float16)] if name == "integers with zeros" else []
    for num_tokens, dtype in ((2, torch.float32), (3, torch.float16), *many):
        found, wanted = (
            outputs_of_4_bits(backend, FOUR_BITS[name], num_tokens, dtype) for backend in (with_triton, native)
        )
        agree(found, wanted, slack=4)


def test_experts_of_4_bits_stay_packed_and_are_readable_one_by_one() -> None:
    from ops.matmul.grouped import E2M1, GroupedWeight
    from ops.moe import GroupedMixture, with_triton

    codes, scales = torch.randint(0, 16, (2, 64, 32), dtype=torch.uint8), torch.full((2, 64, 1), 0.25)
    weight = GroupedWeight(codes, scales, table=E2M1, powers=True)
    mixture = GroupedMixture(weight, weight.rows(slice(None))._replace(codes=codes.flip(0)))
    packed = with_triton.prepare_grouped_experts(mixture, torch.float16)
    assert packed.gate_up.shape == codes.shape
    # One exponent for each line, with the parts' alignment, and one factor.
    assert packed.gate_up.nbytes == 2 * 64 * 32 // 2 + 256 + 2 * 64 * 4
    one = with_triton.one_expert(packed, 1, 32, 32)
    assert torch.equal(one.gate_up[0], weight.expert(1).dequantised())
    assert torch.equal(one.down[0], weight.expert(0).dequantised())


@pytest.mark.parametrize(("num_tokens", "top_k", "num_experts"), [(1, 1, 1), (70, 2, 5), (5, 3, 40), (50, 4, 40)])
def test_pairs_are_sorted_by_expert_and_number(
    num_tokens: int, top_k: int, num_experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ops.moe import triton_sort

    monkeypatch.setattr(triton_sort, "PART", 32)
    sort_pairs = triton_sort.sort_pairs
    experts = torch.randint(-1, num_experts, (num_tokens, top_k), dtype=torch.int32)  # -1: an expert of another rank
    order, starts = sort_pairs(experts, num_experts)
    assert torch.equal(order.long(), experts.flatten().argsort(stable=True))
    counts = (experts.flatten() + 1).bincount(minlength=num_experts + 1)
    assert starts.tolist() == counts.cumsum(0).tolist()


def test_pairs_are_read_twice_however_many_experts_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernel_memory import traffic
    from ops.moe import triton_sort

    monkeypatch.setattr(triton_sort, "PART", 32)
    experts = torch.randint(0, 100, (50, 2), dtype=torch.int32)
    with traffic() as loads:
        triton_sort.sort_pairs(experts, 100)
    assert loads.loads_from(experts) == 2 * experts.numel()


def test_logits_that_are_no_numbers_choose_experts_that_exist() -> None:
    from ops.moe.with_triton import route

    logits = torch.randn(3, 6)
    logits[1] = torch.nan
    _, experts = route(logits, 2, renormalise=True)
    assert experts.min() >= 0
    assert experts.max() < 6


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        (
            "equal logits",
            "tl.where(left == top, ids, EXPERTS - 1)",
            "tl.where(left >= top - 1, ids, EXPERTS - 1)",
        ),
        ("a few tokens", "scores = scores / (tl.sum(scores, axis=0) + 1e-20)", "scores = scores * 1.0"),
        (
            "scores as they are",
            "tl.sum(tl.exp(x - peak), axis=0)",
            "tl.sum(tl.exp(top_logits - peak), axis=0)",
        ),
        ("a few tokens", "expert.to(tl.int64) * OUT + columns", "0 * expert.to(tl.int64) + columns"),
        ("a few tokens", "other=0) // TOP_K if FROM_TOKENS", "other=0) if FROM_TOKENS"),
        ("products longer and wider than a tile", "tl.load(weight_rows + base", "tl.load(weight_rows"),
        ("a few tokens", "total += tl.load(weights + pair) * result", "total += result"),
    ],
)
def test_a_broken_kernel_is_noticed(name: str, old: str, new: str, tmp_path: Path) -> None:
    broken = mutant("moe", old, new, tmp_path)
    assert differ(outputs(broken, CASES[name]), outputs(native, CASES[name]))


@pytest.mark.parametrize(
    ("form", "old", "new"),
    [
        ("mxfp4", "weight + lines * (IN // 8)", "weight + columns * (IN // 8)"),
        ("integers with zeros", "lines[:, None] * (IN // 2)", "columns[:, None] * (IN // 2)"),
        ("integers with zeros", "shifts + lines", "shifts + columns"),
        ("nvfp4", "tl.load(bias + lines", "tl.load(bias + columns"),
        ("nvfp4", "factors + lines", "factors + columns"),
        ("integers with zeros", "(base // 2 + pairs_of_codes < IN // 2)", "(base // 2 + pairs_of_codes < 128)"),
    ],
)
def test_a_broken_kernel_of_4_bits_is_noticed(form: str, old: str, new: str, tmp_path: Path) -> None:
    broken = mutant("moe", old, new, tmp_path)
    found, wanted = (outputs_of_4_bits(each, FOUR_BITS[form], 3, torch.float16) for each in (broken, native))
    assert differ(found, wanted, slack=4)


@pytest.mark.parametrize(
    ("num_pairs", "old", "new"),
    [
        (30, "order + position + rank, lanes", "order + position + rank, position + rank"),
        (150, "firsts + before - (", "firsts - ("),
        (150, "(parts < part)", "(parts > part)"),
        (150, "tl.where(inside, chosen, BINS) * BLOCK + lanes)", "tl.where(inside, chosen, BINS) * BLOCK)"),
    ],
)
def test_a_broken_sort_is_noticed(num_pairs: int, old: str, new: str, tmp_path: Path) -> None:
    experts = torch.randint(-1, 7, (num_pairs, 1), dtype=torch.int32)
    broken: Any = mutant("moe", old, new, tmp_path, file="triton_sort")
    broken.PART = 32
    assert not torch.equal(broken.sort_pairs(experts, 7).order.long(), experts.flatten().argsort(stable=True))
