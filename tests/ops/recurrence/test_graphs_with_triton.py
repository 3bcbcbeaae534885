"""Captured graphs with Triton's kernels of recurrent layers, on a late device that executes interpreted launches."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

import late_steps
from fake_device import LateDevice
from late_launches import launches_on

pytestmark = pytest.mark.interpreter

# Prompts with and without snapshots; the second row continues from a snapshot of the first, in the same step.
PROMPTS = [([3, 9, 4, 7, 5, 8, 2, 6, 1], 4), ([3, 9, 4, 7, 5, 8, 2, 6, 7, 7], 5), ([6], 3), (list(range(2, 22)), 3)]
GREEDY = ({"temperature": 0.0},)


def use_triton(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Let all steps of the family use Triton's kernels of recurrent layers."""
    from ops.recurrence import with_triton

    kernels = replace(late_steps.kernels(), **{name: getattr(with_triton, name) for name in with_triton.__all__})
    model = late_steps.load_model(late_steps.facts(family), late_steps.model_plan(family), kernels)
    monkeypatch.setattr(late_steps, "_model", lambda family: model)


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_next",  # gated delta nets
        pytest.param("granitemoehybrid", marks=pytest.mark.slow),  # Mamba 2
        pytest.param("lfm2", marks=pytest.mark.slow),  # short convolutions
    ],
)
@pytest.mark.parametrize("with_drafts", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_captured_kernels_give_the_tokens_of_native(
    family: str, with_drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = late_steps.outputs(PROMPTS, family=family, ways=GREEDY)
    use_triton(monkeypatch, family)
    device = LateDevice(Random(1))
    with launches_on(device) as names:
        found = late_steps.outputs(
            PROMPTS,
            family=family,
            device=device,
            depth=2,
            sizes=(1, 2, 4, 16) if with_drafts else (1, 2, 4),
            capture_every=1,
            ways=GREEDY,
            drafts=expected if with_drafts else None,
        )
    assert found == expected
    assert "_single_kernel" in names
    assert "_chunk_kernel" in names
    assert "_link_kernel" in names
