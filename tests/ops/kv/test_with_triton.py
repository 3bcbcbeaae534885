"""Cache kernels in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernel_cases.kv import CASES, outputs
from kernel_mutants import mutant
from ops.kv import native

pytestmark = pytest.mark.interpreter


def same(backend, name: str) -> bool:
    found, wanted = (outputs(module, CASES[name]) for module in (backend, native))
    return all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_equals_native(name: str) -> None:
    from ops.kv import with_triton

    assert same(with_triton, name)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("slot % PAGE", "0"),
        ("token * v_token_stride", "token * v_head_stride"),
        ("keys.to(tl.float32) * k_factor", "keys.to(tl.float32)"),
        ("tl.clamp(values.to(tl.float32) * v_factor, -LARGEST, LARGEST)", "values * v_factor * 0.5"),
        ("source + source_page * source_stride", "source + target_page * source_stride"),
    ],
)
def test_a_broken_kernel_is_noticed(old: str, new: str, tmp_path: Path) -> None:
    broken = mutant("kv", old, new, tmp_path)
    assert not all(same(broken, name) for name in CASES)
