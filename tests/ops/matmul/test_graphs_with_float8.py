"""Captured graphs with products, experts and a cache in float8, on a late device that executes interpreted launches."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from random import Random

import pytest
import torch

import late_steps
from fake_device import LateDevice
from late_launches import launches_on
from ops.select import OPERATIONS

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]

PROMPTS = [([3, 9, 4, 7, 5], 3), ([6], 3), ([8, 2, 6, 1], 2)]
GREEDY = ({"temperature": 0.0},)
IN_TRITON = ("activation", "kv", "matmul", "moe", "norm")


def test_graphs_in_float8_give_the_tokens_of_eager_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {
        field: getattr(import_module(f"ops.{operation}.with_triton"), field)
        for operation in IN_TRITON
        for field in OPERATIONS[operation][0]
    }
    kernels = replace(late_steps.kernels(), **parts)
    plan = replace(late_steps.model_plan("qwen3_moe"), quantization="fp8")
    model = late_steps.load_model(late_steps.facts("qwen3_moe"), plan, kernels)
    monkeypatch.setattr(late_steps, "_model", lambda family: model)
    monkeypatch.setattr(late_steps, "KV_DTYPE", torch.float8_e4m3fn)
    expected = late_steps.outputs(PROMPTS, family="qwen3_moe", ways=GREEDY)
    device = LateDevice(Random(1))
    with launches_on(device) as names:
        found = late_steps.outputs(
            PROMPTS,
            family="qwen3_moe",
            device=device,
            sizes=(1, 2, 4),
            prompt_sizes=(8,),
            capture_every=1,
            ways=GREEDY,
        )
    assert found == expected
    assert {"_product_kernel", "_grouped_kernel"} <= set(names)
