"""Engines with the plan of a GPU, on the late device: steps overlap, and run in captured graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import late_steps
from fake_device import LateDevice
from ops.low_rank import LowRank
from ops.machine import Machine
from ops.select import Kernels
from runtime.config import Args
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import KernelPlan, Plan
from runtime.worker import worker as worker_module
from runtime.worker.cuda_graph import CudaGraphRunner
from serve.python import engine as engine_module

# Options for few captures, whose graphs all steps with drafts fit.
FEW_GRAPHS: dict[str, Any] = {"cuda_graph_bs": [4, 24], "piecewise_cuda_graph_tokens": [16, 48]}


def add_low_rank(y: Tensor, x: Tensor, weights: LowRank, slots: Tensor) -> Tensor:
    """Add the product of every token's slot without reading on the host which slots there are, as graphs require."""
    index = (slots.long() - 1).clamp(min=0)
    used = torch.arange(weights.a.shape[2]) < weights.ranks[index, None]  # [T, R]
    used &= (slots > 0)[:, None]
    shrunk = torch.einsum("ti,tpri->tpr", x, weights.a[index]) * used[:, None]
    part = (torch.arange(y.shape[1])[:, None] >= weights.ends).sum(1)  # [O]
    return y.add_(torch.einsum("tor,tro->to", shrunk[:, part], weights.b[index]))


def kernels() -> Kernels:
    """Return kernels that do not read values of the device on the host."""
    return replace(late_steps.kernels(), choose=late_steps.choose, add_low_rank=add_low_rank)


@contextmanager
def pretended_gpu(haste: float = 0.9) -> Iterator[list[CudaGraphRunner]]:
    """Make engines that start in this context compute on a late device, in float32. Yield their graph runners."""
    runners: list[CudaGraphRunner] = []
    prepare, create = engine_module.prepare, CudaGraphRunner.__init__

    def prepared(args: Args, machine: Machine, **more: Any) -> tuple[Plan, ModelFacts]:
        plan, facts = prepare(args, Machine.named("h200"), **more)
        return replace(
            plan,
            model=replace(plan.model, device="cpu", dtype="float32"),
            cache=replace(plan.cache, kv_dtype="float32"),
            kernels=KernelPlan(),
        ), facts

    def created(self: CudaGraphRunner, *args: Any, **more: Any) -> None:
        create(self, *args, **more)
        runners.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "prepare", prepared)
        patch.setattr(worker_module, "open_device", lambda _: LateDevice(Random(0), haste=haste))
        patch.setattr(worker_module, "_select", lambda *_, **__: (kernels(), False))
        patch.setattr(CudaGraphRunner, "__init__", created)
        yield runners
