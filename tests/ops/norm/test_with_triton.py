"""Normalisation kernels in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernel_cases.norm import CASES, ROUND_CASES, outputs, rounded
from kernel_comparison import agree, assert_rounded, differ
from kernel_mutants import mutant
from ops.norm import native

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_equals_native(name: str) -> None:
    from ops.norm import with_triton

    found, wanted = (outputs(backend, CASES[name]) for backend in (with_triton, native))
    agree(found, wanted)
    assert [x.dtype for x in found] == [x.dtype for x in wanted]


@pytest.mark.parametrize("name", ROUND_CASES)
def test_rows_are_normalised_and_rounded_as_by_two_operations(name: str) -> None:
    from ops.norm import with_triton

    normed, total = rounded(with_triton, name)
    agree([torch.Tensor(normed), total], [torch.Tensor(x) for x in rounded(native, name)])
    assert_rounded(normed, ROUND_CASES[name][2])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("mean_square + eps", "mean_square"),
        ("factor += 1.0", "factor += 0.0"),
        ("values += tl.load(residual", "values -= tl.load(residual"),
        ("num_heads * token_stride", "num_heads * num_heads * WIDTH"),
        ("tl.where(inside, values - mean, 0.0)", "values - mean"),
        ("normed += tl.load(bias", "normed -= tl.load(bias"),
    ],
)
def test_a_broken_kernel_is_noticed(old: str, new: str, tmp_path: Path) -> None:
    broken = mutant("norm", old, new, tmp_path)
    assert any(differ(outputs(broken, case), outputs(native, case)) for case in CASES.values())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tl.max(tl.abs(wide), axis=1)", "tl.max(wide, axis=1)"),
        ("tl.max(tl.abs(grouped), axis=2)", "tl.max(grouped, axis=2)"),
        ("rows * groups + group, scale", "rows * groups + group, scale * 2"),
        ("wide = result.to(tl.float32)", "wide = normed"),
    ],
)
def test_a_broken_rounding_is_noticed(old: str, new: str, tmp_path: Path) -> None:
    broken = mutant("norm", old, new, tmp_path)

    def differs(name: str) -> bool:
        try:
            assert_rounded(rounded(broken, name)[0], ROUND_CASES[name][2])
        except AssertionError:
            return True
        return False

    assert any(differs(name) for name in ROUND_CASES)
