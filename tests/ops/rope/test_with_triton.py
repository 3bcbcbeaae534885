"""Rotation kernels in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_cases.rope import CASES, FUSED_CASES, LATENT_CASES, FusedCase, agree_fused, agree_latent, outputs
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


@pytest.mark.parametrize("name", FUSED_CASES)
def test_norm_rotation_and_store_in_one_kernel_follow_the_formula(name: str) -> None:
    from ops.rope import with_triton

    agree_fused(with_triton, FUSED_CASES[name])


@pytest.mark.parametrize("name", LATENT_CASES)
def test_norm_rotation_and_store_of_latent_vectors_follow_the_formula(name: str) -> None:
    from ops.rope import with_triton

    agree_latent(with_triton, LATENT_CASES[name])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(block - 1) * HEADS_BLOCK", "0"),
        ("(x * scale * weights)", "(x * scale)"),
        ("axis=0) / RANK", "axis=0) / DIM"),
        ("k + token * k_stride", "k"),
        ("target + RANK", "target"),
    ],
)
def test_a_broken_kernel_of_latent_vectors_is_noticed(old: str, new: str, tmp_path: Path) -> None:
    broken, noticed = mutant("rope", old, new, tmp_path, "triton_latent"), 0
    for case in (LATENT_CASES["interleaved"], LATENT_CASES["DeepSeek-V3"]):
        try:
            agree_latent(broken, case)
        except AssertionError:
            noticed += 1
    assert noticed


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("second * cos + first * sin).to(x", "second * cos - first * sin).to(x"),
        ("+ slot % PAGE) * DIM", "+ 0) * DIM"),
        ("k + token * k_token_stride", "k + token * k_head_stride"),
        ("squares += tl.sum(rest * rest, axis=1)", "squares += 0.0"),
        ("return (x * scale * weights)", "return (x * scale)"),
        ("weights += 1.0", "weights += 0.5"),
        ("(block - query_blocks) * HEADS_BLOCK", "0"),
        ("values.to(tl.float32) * factor", "values.to(tl.float32)"),
    ],
)
def test_a_broken_fused_kernel_is_noticed(old: str, new: str, tmp_path: Path) -> None:
    broken = mutant("rope", old, new, tmp_path, "triton_fused")

    def differs(case: FusedCase) -> bool:
        try:
            agree_fused(broken, case)
        except AssertionError:
            return True
        return False

    assert any(differs(case) for case in FUSED_CASES.values())


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
