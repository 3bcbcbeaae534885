from __future__ import annotations

import subprocess
import sys

import pytest
from torch import Tensor

import late_steps
from ops.machine import Machine
from ops.select import select
from runtime.layers.forward_batch import ForwardBatch
from runtime.loading.loader import load_model
from runtime.worker.compiled import CompiledForward, compilable
from runtime.worker.device import CpuDevice

PROMPTS = [([3 + i, 9, 4 + 3 * i, 7][: 1 + i % 4], 3 + i) for i in range(6)]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(Machine.probe().compiler is None, reason="needs a C++ compiler")
def test_compiled_steps_give_the_same_tokens(monkeypatch: pytest.MonkeyPatch):
    model = load_model(late_steps.facts(), late_steps.model_plan(), compilable(select()))
    monkeypatch.setattr(late_steps, "model", lambda family: model)
    calls: list[int] = []

    def compiled(steps: late_steps.Steps) -> None:
        forward = CompiledForward(model, steps.pool, max_rows=3)
        forward.compile(CpuDevice())
        once = forward._compiled

        def counted(batch: ForwardBatch) -> Tensor:
            calls.append(batch.num_tokens)
            return once(batch)

        monkeypatch.setattr(forward, "_compiled", counted)
        steps.use_forward(forward)

    expected = late_steps.outputs(PROMPTS)
    assert late_steps.outputs(PROMPTS, change=compiled) == expected
    assert {1, 2, 3} <= set(calls)
    assert 4 not in calls


@pytest.mark.slow
def test_workers_import_the_compiler_only_to_compile() -> None:
    code = "import sys, runtime.worker.worker; print('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
