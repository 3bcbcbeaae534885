"""The checks of memory accesses in interpreted kernels find deliberate errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kernel_memory
from kernel_mutants import mutant

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("inside = columns < width", "inside = columns < width + 1", "outside its tensors"),
        ("tl.store(out + row * width", "tl.store(out + row * (width - 1)", "written by several programs"),
    ],
)
def test_a_kernel_with_a_wrong_address_is_noticed(
    old: str, new: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_memory, "unchecked_modules", None)
    broken = mutant("activation", old, new, tmp_path)
    # the interpreter wraps errors of a program; races are found after all programs
    with pytest.raises(Exception, match=fault):
        broken.gate(torch.randn(3, 20), "silu")


def test_a_program_that_reads_what_another_writes_is_noticed() -> None:
    from ops.kv import with_triton

    pool = torch.zeros(4, 2, 4, 8)
    with pytest.raises(kernel_memory.MemoryFault, match="reads what another program writes"):
        with_triton.copy_pages([pool], [pool], torch.tensor([0, 1]), torch.tensor([1, 2]))


def test_every_launch_is_checked() -> None:
    from ops.activation import with_triton

    before = kernel_memory.num_checked
    with_triton.gate(torch.randn(3, 20), "silu")
    assert kernel_memory.num_checked == before + 1
