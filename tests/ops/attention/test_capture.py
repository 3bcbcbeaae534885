"""Requirements of CUDA graphs on Triton attention: launches depend only on shapes, not on host data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ops.attention import AttentionMetadata, AttentionOptions

with_triton = pytest.importorskip("ops.attention.with_triton")

PAGE, WIDTH, ROWS = 4, 8, 3


class Recorder:
    """Replaces a kernel and records its launches."""

    def __init__(self, launches: list[Any]) -> None:
        self.launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            plain = [arg for arg in arguments if not isinstance(arg, torch.Tensor)]
            self.launches.append((grid, plain, options))

        return launch


def launches(monkeypatch: pytest.MonkeyPatch, inputs: AttentionMetadata) -> list[Any]:
    noted: list[Any] = []
    for kernel in ("_decode_kernel", "_merge_kernel", "_prefill_kernel"):
        monkeypatch.setattr(with_triton, kernel, Recorder(noted))
    pool = torch.zeros(WIDTH, 2, PAGE, 16)
    with_triton.make_attend()(torch.zeros(ROWS, 4, 16), pool, pool, inputs, AttentionOptions(scale=1.0))
    return noted


def test_rows_of_any_length_are_launched_alike(monkeypatch: pytest.MonkeyPatch):
    table = np.zeros((ROWS, WIDTH), np.int32)
    short = AttentionMetadata.build([0] * ROWS, [1] * ROWS, table, PAGE)
    long = AttentionMetadata.build([PAGE * WIDTH - 1] * ROWS, [1] * ROWS, table, PAGE)
    unknown = replace(long, starts_host=[])
    first, *others = (launches(monkeypatch, inputs) for inputs in (short, long, unknown))
    assert len(first) == 2
    assert all(other == first for other in others)


def test_a_wider_table_is_launched_with_another_stride_alone(monkeypatch: pytest.MonkeyPatch):
    """The fixed width of the buffers is captured, not that of the longest row."""
    narrow, wide = (
        launches(
            monkeypatch,
            AttentionMetadata.build([0] * ROWS, [1] * ROWS, np.zeros((ROWS, width), np.int32), PAGE),
        )
        for width in (WIDTH, 2 * WIDTH)
    )
    assert [grid for grid, _, _ in narrow] == [grid for grid, _, _ in wide]
    assert narrow != wide
