"""Embedding kernels in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_cases.embedding import CASES, outputs
from kernel_comparison import agree, differ
from kernel_mutants import mutant
from ops.embedding import native

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_equal_native(name: str) -> None:
    from ops.embedding import with_triton

    found, wanted = (outputs(backend, CASES[name]) for backend in (with_triton, native))
    agree(found, wanted)
    assert [x.dtype for x in found] == [x.dtype for x in wanted]


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("a later part", "tl.load(token_ids + token) - first_id", "tl.load(token_ids + token)"),
        ("the first part", "(index >= 0) & (index < num_ids)", "index >= 0"),
        ("soft cap", "2.0 / SOFT_CAP", "1.0 / SOFT_CAP"),
        ("scaled", ".to(tl.float32) * scale", ".to(tl.float32)"),
        ("scaled", ".to(tl.float32) * vector_scale", ".to(tl.float32)"),
    ],
)
def test_a_broken_kernel_is_noticed(name: str, old: str, new: str, tmp_path: Path) -> None:
    broken = mutant("embedding", old, new, tmp_path)
    assert differ(outputs(broken, CASES[name]), outputs(native, CASES[name]))
