"""Activation kernels in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernel_cases.activation import CASES, ROUND_CASES, Case, inputs, outputs
from kernel_comparison import agree, assert_rounded, differ
from kernel_mutants import mutant
from ops.activation import native

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_equals_native(name: str) -> None:
    from ops.activation import with_triton

    found, wanted = (outputs(backend, CASES[name]) for backend in (with_triton, native))
    agree(found, wanted)
    assert [x.dtype for x in found] == [x.dtype for x in wanted]


@pytest.mark.parametrize("name", ROUND_CASES)
def test_rows_are_gated_and_rounded_as_by_two_operations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ops.activation import with_triton

    case, group = ROUND_CASES[name]
    wanted = native.gate_round(inputs(case), case.activation, group)
    for largest in (with_triton.MAX_BLOCK, 64):  # one kernel; then two kernels, because rows exceed a block
        monkeypatch.setattr(with_triton, "MAX_BLOCK", largest)
        found = with_triton.gate_round(inputs(case), case.activation, group)
        agree([torch.Tensor(found)], [torch.Tensor(wanted)])
        assert_rounded(found, group)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tl.max(tl.abs(grouped), axis=1)", "tl.max(grouped, axis=1)"),
        ("row * num_groups + group, scale", "row * num_groups + group, scale * 2"),
        ("tl.program_id(1) * (BLOCK // GROUP) + tl", "tl"),
    ],
)
def test_a_broken_rounding_is_noticed(old: str, new: str, tmp_path: Path) -> None:
    broken = mutant("activation", old, new, tmp_path)

    def differs(case: Case, group: int) -> bool:
        try:
            assert_rounded(broken.gate_round(inputs(case), case.activation, group), group)
        except AssertionError:
            return True
        return False

    assert any(differs(*each) for each in ROUND_CASES.values())


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
