"""Answers with replayed CUDA graphs, and a check that graphs were replayed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import anyio
import pytest
import torch

from greedy import GREEDY
from on_device.greedy_tokens import answers, both_times, engine_options, ids_of
from runtime.worker.model_runner import ModelRunner
from serve import Engine

Tokens = list[list[int]]


async def eager_and_replayed(
    path: str, device: str, *, dtype: str = "float32", sampling: Mapping[str, Any] = GREEDY, **options: Any
) -> tuple[Tokens, Tokens]:
    """Return the answers of an engine without graphs, and of an engine with all graphs captured.

    Raises AssertionError if the second engine captured no graph, or replayed none on a GPU.
    """
    eager = await answers(path, device, dtype=dtype, sampling=sampling, disable_cuda_graph=True, **options)
    async with Engine(path, **engine_options(device, dtype), **options) as engine:
        await ids_of(engine)
        await prepared(engine)
        with counted_replays() as replays:
            replayed = await both_times(engine, sampling)
    assert bool(replays) == device.startswith("cuda")
    return eager, replayed


async def prepared(engine: Engine) -> None:
    """Wait until all graphs are captured."""
    [runner] = engine.core.runners
    assert isinstance(runner, ModelRunner)
    while runner.capturing:
        await anyio.sleep(0.02)


@contextmanager
def counted_replays() -> Iterator[list[object]]:
    """Count the replays: the list gets one entry per replay of any graph."""
    replays: list[object] = []
    replay = torch.cuda.CUDAGraph.replay

    def counted(self: torch.cuda.CUDAGraph) -> None:
        replays.append(self)
        replay(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda.CUDAGraph, "replay", counted)
        yield replays
