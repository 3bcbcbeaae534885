"""LoRA adapters in CUDA graphs on a late device, compared with peft."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import late_steps
import paged_forward
import pretended_gpu
from fake_device import LateDevice
from greedy import model_path
from lora_adapters import adapted_model, adapter
from runtime.batch import ADAPTER, AdapterPlacement, Batch
from runtime.config.plan import LoraPlan
from runtime.config.resolve.graph_sizes import Buckets
from runtime.layers.batch_reads import batch_reads
from runtime.loading.facts import read_facts
from runtime.worker.adapters import Adapters
from runtime.worker.cuda_graph import CudaGraphRunner
from runtime.worker.step_inputs import Staging, prepare

LENGTH, PAGE_SIZE, NUM_PAGES = 12, 4, 16
IDS = torch.randint(1, 100, (4, LENGTH), generator=torch.Generator().manual_seed(5))
# Three adapters for two slots: the third takes the second slot when the second sequence has ended.
SLOTS = {0: 1, 1: 2, 2: 0, 3: 2}
STEPS = [
    [(0, 5), (1, 4), (2, 6)],
    *[[(0, 1), (1, 1), (2, 1)]] * 3,
    [(0, 1), (3, 5)],
    *[[(0, 1), (2, 1), (3, 1)]] * 3,
    [(3, 1)],
]
LAST_TOKENS = torch.zeros(4, dtype=torch.int64)


@cache
def folders() -> list[str | None]:
    base = model_path("llama")
    return [adapter(base, 1, 8), adapter(base, 2, 4, ("q_proj", "down_proj")), None, adapter(base, 3, 8, ("v_proj",))]


@cache
def expected(row: int) -> Tensor:
    """Return the hidden states [T, E] of peft's model for one sequence."""
    folder = folders()[row]
    model = adapted_model(model_path("llama"), folder or str(folders()[0]))
    with torch.no_grad(), nullcontext() if folder else model.disable_adapter():
        return model.base_model.model.model(IDS[row][None], use_cache=False).last_hidden_state[0]


def batches() -> Iterator[tuple[list[tuple[int, int]], Batch]]:
    """Yield the steps, with the row and the position of each row's last token."""
    done = [0] * 4
    table = np.arange(NUM_PAGES, dtype=np.int32)[: 4 * LENGTH // PAGE_SIZE].reshape(4, -1)
    for number, step in enumerate(STEPS):
        rows, counts = [row for row, _ in step], [count for _, count in step]
        starts = [done[row] for row in rows]
        values = np.array([SLOTS[row] for row in rows], np.int32)
        batch = replace(paged_forward.step_of(number, IDS, rows, starts, counts, table), row_values={ADAPTER: values})
        for row, count in step:
            done[row] += count
        yield [(row, done[row] - 1) for row in rows], batch


def apart(seed: int, slots: dict[int, int] = SLOTS, *, place_third: bool = True) -> float:
    """Return the largest difference from peft's hidden states. Single tokens must be computed by graphs."""
    path = model_path("llama")
    model = paged_forward.load(path, kernels=replace(late_steps.kernels(), add_low_rank=pretended_gpu.add_low_rank))
    device, facts = LateDevice(Random(seed)), read_facts(path, {})
    plan = LoraPlan(enabled=True, max_rank=8, max_slots=2, targets=None)
    adapters = Adapters(model, plan, facts, torch.float32, torch.device("cpu"))
    for number, folder in enumerate(folders()):
        if folder is not None:
            adapters.load(number, folder).result()
    pool, eager = paged_forward.pool_for(model, NUM_PAGES, PAGE_SIZE), []

    def forward(batch: Any) -> Tensor:
        eager.append(batch.num_tokens)
        return model(batch)

    buckets = Buckets((2, 4), padding=True)
    graphs = CudaGraphRunner(forward, pool, device, buckets, max_pages=NUM_PAGES, reads=batch_reads(model))
    while graphs.capture_next():
        pass
    staging, worst = Staging(device), 0.0
    placements = {0: [(1, 0), (2, 1)], 4: [(2, 3)] if place_third else []}
    with torch.inference_mode():
        for step, (places, batch) in enumerate(batches()):
            eager.clear()
            batch.row_values[ADAPTER][:] = [slots[row] for row, _ in places]
            with device.forward():
                for slot, number in placements.get(step, []):
                    adapters.place(AdapterPlacement(slot, number))
                hidden = graphs(prepare(batch, pool, staging, LAST_TOKENS).forward)
                found = hidden[torch.from_numpy(np.cumsum(batch.counts) - 1)]
            device.settle()
            assert bool(eager) == (batch.counts.max() > 1)
            for own, (row, position) in zip(found, places, strict=True):
                worst = max(worst, float((own - expected(row)[position]).abs().max()))
    adapters.close()
    return worst


@pytest.mark.parametrize("seed", range(2))
def test_graphs_compute_the_adapters_of_their_rows(seed: int) -> None:
    assert apart(seed) < 1e-4


@pytest.mark.slow
def test_a_wrong_slot_and_a_stale_slot_are_noticed() -> None:
    assert apart(0, {**SLOTS, 0: 2, 1: 1}) > 1e-2
    assert apart(0, {**SLOTS, 0: 0}) > 1e-2
    assert apart(0, place_third=False) > 1e-2
