"""Kernels of recurrent layers in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

import kernel_memory
from kernel_cases.recurrence import CASES, expected, is_close, outputs
from kernel_mutants import backend_with_mutant

pytestmark = pytest.mark.interpreter

FIRST = ("single tokens of a graph", "drafts", "rows that share states", "half precision")


@pytest.mark.parametrize(
    "name", [name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_the_kernels_compute_one_token_after_another(name: str) -> None:
    from ops.recurrence import with_triton

    found, wanted = outputs(with_triton, CASES[name]), expected(CASES[name])
    assert [each.dtype for each in found] == [each.dtype for each in wanted]
    assert is_close(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rows that share states", "prompts and single tokens"])
def test_spans_of_several_blocks_are_ordered(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ops.recurrence import triton_spans, with_triton

    monkeypatch.setattr(triton_spans, "SPANS_BLOCK", 4)
    assert is_close(outputs(with_triton, CASES[name]), expected(CASES[name]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("rows that share states", "tl.where(shared == 1, 0, run)", "run"),
        ("rows that share states", "(theirs_read == write[:, None])", "(theirs_read == -9)"),
        (
            "rows that share states",
            "tl.store(links + own * COLUMNS + LAST, 1 - later",
            "tl.store(links + own * COLUMNS + LAST, 1",
        ),
        ("drafts", "source = tl.where(found, earlier, source)", "source = tl.where(found, earlier - earlier, source)"),
        ("a prompt", "tl.where(rows, count + kept - KEPT, 0)", "tl.where(rows, kept, 0)"),
        (
            "single tokens of a graph",
            "tl.store(new + (tap - 1) * CHANNELS, past",
            "tl.store(new + (tap - 1) * CHANNELS, total",
        ),
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
    assert not is_close(found, expected(CASES[name]))
