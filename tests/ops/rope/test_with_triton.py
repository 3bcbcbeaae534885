"""Rotation kernels in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_cases.rope import CASES, outputs
from kernel_comparison import agree, differ
from kernel_mutants import mutant
from ops.rope import native

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_equals_native(name: str) -> None:
    from ops.rope import with_triton

    found, wanted = (outputs(backend, CASES[name]) for backend in (with_triton, native))
    agree(found, wanted)
    assert [x.dtype for x in found] == [x.dtype for x in wanted]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("second * cos + first * sin", "second * cos - first * sin"),
        ("heads * head_stride + 2 * angles", "heads * head_stride + angles"),
        ("k + token * k_token_stride", "k + token * k_head_stride"),
    ],
)
def test_a_broken_kernel_is_noticed(old: str, new: str, tmp_path: Path) -> None:
    broken = mutant("rope", old, new, tmp_path)
    assert any(differ(outputs(broken, case), outputs(native, case)) for case in CASES.values())
