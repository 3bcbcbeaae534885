"""Rank 0 ends common steps: each attention group gets the tokens that it would get alone."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from draft_steps import random_step
from runtime.batch import Batch
from runtime.constraint import HostData
from runtime.mesh.mesh import Mesh
from runtime.mesh.rank_info import RankInfo
from runtime.worker.common_step import CommonStep, CommonStepLeader
from runtime.worker.device import CpuDevice
from runtime.worker.sampler import Sampler
from runtime.worker.step_inputs import samples_on_host

VOCAB, ROWS = 8, 8


def leader(logits: torch.Tensor) -> CommonStepLeader:
    """Return rank 0 of two groups, whose model returns these logits [N, V] in place of computing them."""

    def forward(batch: Batch, group_tokens: tuple[int, ...]) -> Any:
        requested = torch.zeros(0 if batch.sampling is None else len(batch.sampling.positions), dtype=torch.int64)
        return SimpleNamespace(requested=requested, samples=samples_on_host(batch)), torch.zeros(len(batch.counts), 1)

    executor = cast(
        Any,
        SimpleNamespace(
            device=CpuDevice(),
            last_tokens=torch.zeros(ROWS, dtype=torch.int64),
            lengths=torch.zeros(ROWS, dtype=torch.int32),
            enqueueing=nullcontext,
            profiled=lambda batch: nullcontext(),
            pool=SimpleNamespace(page_size=16),
            propose=lambda batch: (batch, batch),
            forward=forward,
            observe=lambda *results: None,
        ),
    )
    model = cast(Any, SimpleNamespace(head=SimpleNamespace(tied=False), logits=lambda states: logits))
    pool = cast(Any, SimpleNamespace(kinds={}, scratch_page=0))
    step = CommonStep(executor, model, pool, Mesh(RankInfo(), torch.device("cpu")))
    return CommonStepLeader(step, executor, model, [Sampler(VOCAB, ROWS, CpuDevice()) for _ in range(2)])


def random_group(rng: np.random.Generator) -> tuple[Batch, torch.Tensor, list[list[int]]]:
    """Return a batch with drafts and late host data, its logits, and the expected tokens of each row."""
    batch, ids, expected = random_step(rng)
    assert batch.sampling is not None
    late = {index for index in range(len(ids)) if rng.random() < 0.2}
    data = {index: HostData() for index in range(len(ids))}
    for index in data.keys() - late:
        data[index].give()
    for row, tokens in enumerate(expected):
        places = np.flatnonzero(batch.sampling.row_of == row).tolist()
        del tokens[next((count for count, index in enumerate(places) if index in late), len(places)) :]
    logits = torch.nn.functional.one_hot(ids, VOCAB).float()
    return replace(batch, sampling=replace(batch.sampling, host_data=data)), logits, expected


def test_rows_with_drafts_end_before_late_host_data_in_every_group():
    rng = np.random.default_rng(3)
    for _ in range(8):
        groups = [random_group(rng) for _ in range(2)]
        outputs = leader(torch.cat([logits for _, logits, _ in groups])).run([batch for batch, _, _ in groups])()
        for output, (_, _, expected) in zip(outputs, groups, strict=True):
            assert output is not None
            assert output.tokens == expected
