"""Every row of the contact run launches its Triton kernels: here in the interpreter, at small sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.contact import choosing_rows, speeds, timing
from bench.gpu.figure import Failure
from bench.gpu.limits import Limits

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]


@pytest.mark.parametrize("kernels", speeds.KERNELS)
def test_rows_of_the_contact_run_launch_their_kernels(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draw: Callable[..., torch.Tensor] = timing.Place.draw

    def in_half(self: timing.Place, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Any:
        # the interpreter computes with numpy, which has no bfloat16
        return draw(self, *shape, scale=scale, dtype=torch.float16 if dtype == torch.bfloat16 else dtype)

    def once(call: Callable[[], object], device: str) -> float:
        call()
        return 1.0

    monkeypatch.setattr(timing, "fastest", once)
    monkeypatch.setattr(timing.Place, "kernels", "with_triton")
    monkeypatch.setattr(timing.Place, "draw", in_half)
    monkeypatch.setattr(speeds, "_runnable_files", lambda: ["with_triton"])
    monkeypatch.setitem(choosing_rows.SAMPLING, "triton", replace(choosing_rows.SAMPLING["triton"], needs=None))
    monkeypatch.delitem(speeds.FORMATS, "bfloat16")  # torch's product, of bfloat16 alone
    place = timing.Place("cpu", Limits(1.0, 1.0, 1.0, "bfloat16"), small=True)
    found = [row() for row in speeds.KERNELS[kernels](place)]
    assert found
    assert [row for row in found if isinstance(row, Failure)] == []
