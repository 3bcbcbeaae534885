"""Activation kernels in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_cases.activation import CASES, outputs
from kernel_comparison import agree, differ
from kernel_mutants import mutant
from ops.activation import native

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_equals_native(name: str) -> None:
    from ops.activation import with_triton

    found, wanted = (outputs(backend, CASES[name]) for backend in (with_triton, native))
    agree(found, wanted)
    assert [x.dtype for x in found] == [x.dtype for x in wanted]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("0.044715 * gates * gates * gates", "0.044715 * gates * gates"),
        ("gates * tl.sigmoid(gates)", "tl.sigmoid(gates)"),
        ("0.7071067811865476", "1.0"),
        ("tl.maximum(gates, 0.0)", "gates"),
    ],
)
def test_a_broken_kernel_is_noticed(old: str, new: str, tmp_path: Path) -> None:
    broken = mutant("activation", old, new, tmp_path)
    assert any(differ(outputs(broken, case), outputs(native, case)) for case in CASES.values())
