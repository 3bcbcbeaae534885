"""Kernels of recurrent layers in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import kernel_memory
from kernel_cases.recurrence import CASES, Case, expected, outputs
from kernel_mutants import backend_with_mutant

pytestmark = pytest.mark.interpreter

NORM_ERROR = {torch.float32: 1e-5, torch.float16: 2e-3}  # of all values of a result together


def is_close(case: Case, found: list[Tensor], wanted: list[Tensor]) -> bool:
    """Whether each value in float32 is within 1e-4, and each result in half precision within a norm of 2e-3."""
    dtype = torch.float16 if torch.float16 in (case.dtype, case.pool_dtype) else torch.float32
    for one, other in zip(found, wanted, strict=True):
        difference = (one.double() - other.double()).norm() / other.double().norm()
        if not difference < NORM_ERROR[dtype]:
            return False
        if dtype == torch.float32 and not torch.allclose(one, other, atol=2e-5, rtol=1e-4):
            return False
    return True


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_compute_one_token_after_another(name: str) -> None:
    from ops.recurrence import with_triton

    found, wanted = outputs(with_triton, CASES[name]), expected(CASES[name])
    assert [each.dtype for each in found] == [each.dtype for each in wanted]
    assert is_close(CASES[name], found, wanted)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("rows that share states", "tl.where(shared == 1, 0, run)", "run"),
        ("rows that share states", "(theirs_read == write[:, None])", "(theirs_read == -9)"),
        ("a prompt", "(before != own - 1)", "(before != own)"),
        ("prompts and single tokens", "first_chunk += tl.sum", "first_chunk = tl.sum"),
        (
            "rows that share states",
            "tl.store(links + own * COLUMNS + LAST, 1 - later",
            "tl.store(links + own * COLUMNS + LAST, 1",
        ),
        ("drafts", "source = tl.where(found, earlier, source)", "source = tl.where(found, earlier - earlier, source)"),
        ("a prompt", "tl.where(rows, count + kept - KEPT, 0)", "tl.where(rows, kept, 0)"),
        ("single tokens", "tl.store(new + (tap - 1) * CHANNELS, past", "tl.store(new + (tap - 1) * CHANNELS, total"),
        ("drafts", "state *= tl.exp(-scale * time)", "state *= tl.exp(-time)"),
        ("a prompt", "while width < CHUNK:", "while width < CHUNK // 2:"),
        ("a prompt", "key_scale * tl.exp(ends - total)", "key_scale"),
        ("a prompt", "state * decay, input_precision", "state, input_precision"),
        ("drafts", "tl.minimum(tl.maximum(time, low), high)", "tl.maximum(time, low)"),
        ("a prompt", "(time * tl.exp(ends - total))", "time"),
        ("a prompt", "tl.exp(between) * time[None, :]", "tl.exp(between)"),
    ],
)
def test_a_broken_kernel_is_noticed(
    name: str, old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Races are noticed too, although the interpreter runs programs in order."""
    monkeypatch.setattr(kernel_memory, "unchecked_modules", None)
    broken = backend_with_mutant("recurrence", old, new, tmp_path)
    try:
        found = outputs(broken, CASES[name])
    except Exception as error:
        assert "addresses" in str(error) or "program" in str(error)
        return
    assert not is_close(CASES[name], found, expected(CASES[name]))
