"""Normalisation kernels in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_cases.norm import CASES, outputs
from kernel_comparison import agree, differ
from kernel_mutants import mutant
from ops.norm import native

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_equals_native(name: str) -> None:
    from ops.norm import with_triton

    found, wanted = (outputs(backend, CASES[name]) for backend in (with_triton, native))
    agree(found, wanted)
    assert [x.dtype for x in found] == [x.dtype for x in wanted]


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
