"""CUDA graphs of a model on several ranks: two ranks in threads, with real collectives and a fake device."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fake_core
import late_steps
from fake_device import ReplayingDevice
from late_steps import PAGE_SIZE
from runtime.batch import Batch, Sampling
from runtime.config.plan import ExpertPlan, GraphPlan, KernelPlan, ParallelPlan
from runtime.distributed.group_runner import decode_batch, encode_batch
from runtime.distributed.link import HEAD, decode
from runtime.errors import EngineFailure
from runtime.mesh.axis import Axis
from runtime.mesh.rank_info import RankInfo
from runtime.mesh.rendezvous import Rendezvous
from runtime.worker import worker as worker_module
from runtime.worker.model_runner import StepExecutor
from runtime.worker.worker import ModelWorker
from runtime.worker.worker_setup import TARGET, CacheSetup, ModelSetup, WorkerSetup

CACHE = CacheSetup(num_pages=12, page_size=PAGE_SIZE, kv_dtype="float32", num_sequences=4)
PLAN = replace(fake_core.make_plan(), parallel=ParallelPlan(tp_size=2))
TIMEOUT_S = 60.0
STEP_TOKENS = 70  # more than the context


class Ranks:
    """Two ranks, each with its own device."""

    def __init__(
        self,
        folder: Path,
        sizes: tuple[int, ...],
        prompt_sizes: tuple[int, ...] = (),
        *,
        family: str = "qwen3",
        ep_size: int = 1,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.rendezvous = Rendezvous(host="127.0.0.1", timeout_s=timeout_s, path=str(folder / "store"))
        self.workers = [
            ModelWorker(
                WorkerSetup(
                    rank_info=RankInfo(rank=rank, tp_size=2, ep_size=ep_size),
                    models={TARGET: ModelSetup(late_steps.facts(family), late_steps.model_plan(family))},
                    kernels=KernelPlan(),
                    graphs=GraphPlan(sizes=sizes, prompt_sizes=prompt_sizes),
                    step_tokens=STEP_TOKENS,
                    experts=ExpertPlan(ep_size=ep_size),
                )
            )
            for rank in range(2)
        ]

    def together(self, lead: Callable[[ModelWorker], Any], follow: Callable[[ModelWorker], Any]) -> list[Any]:
        """Return the results of both ranks, or their exceptions."""
        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(work, worker) for work, worker in zip((lead, follow), self.workers)]
            return [future.exception() or future.result() for future in futures]

    def start(self) -> list[Any]:
        self.together(*[lambda worker: worker.join(CACHE, self.rendezvous)] * 2)
        return self.together(lambda worker: worker.lead(PLAN, TARGET), lambda worker: worker.follow(TARGET))

    def tokens(self, executors: list[StepExecutor], batches: list[Batch]) -> list[list[list[int]]]:
        def follow(_: Any) -> None:
            for batch in batches:
                content = encode_batch(batch)
                length = HEAD.unpack_from(content)[1]
                executors[1].begin(decode_batch(decode(bytearray(content[HEAD.size :]), length)))
                executors[1].follow()

        found, nothing = self.together(lambda _: [executors[0].run(batch)().tokens for batch in batches], follow)
        assert nothing is None
        return found


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> list[ReplayingDevice]:
    """The devices in the order of their creation."""
    made: list[ReplayingDevice] = []

    def open_device(_: torch.device) -> ReplayingDevice:
        made.append(ReplayingDevice())
        return made[-1]

    monkeypatch.setattr(worker_module, "open_device", open_device)
    monkeypatch.setattr(worker_module, "_select", lambda *_, **__: (late_steps.kernels(), False))
    return made


def batches() -> list[Batch]:
    """Return batches: a prompt for each of three rows, single tokens of two and of three rows, and another prompt."""
    steps = [(3, 0, 5), (3, 5, 1), (2, 6, 1), (3, 7, 1), (3, 8, 3)]
    return [
        Batch(
            number=number,
            sequences=(None,) * rows,  # type: ignore[arg-type]
            starts=np.full(rows, start, np.int32),
            counts=np.full(rows, count, np.int32),
            sequence_indices=np.arange(rows, dtype=np.int32),
            token_ids=np.arange(3, 3 + rows * count, dtype=np.int32) if count > 1 else np.full(rows, -1, np.int32),
            page_table=np.arange(3 * 3, dtype=np.int32).reshape(3, 3)[:rows],
            sampling=Sampling(
                positions=np.arange(1, rows + 1, dtype=np.int32) * count - 1,
                row_of=np.arange(rows, dtype=np.int32),
                greedy=np.ones(rows, np.bool_),
                uniform=np.zeros(rows, np.float32),
            ),
        )
        for number, (rows, start, count) in enumerate(steps)
    ]


@pytest.mark.parametrize(
    ("family", "ep_size"),
    [
        ("qwen3", 1),
        ("deepseek_v2", 2),  # latent attention, and experts that are divided among the ranks
    ],
)
def test_all_ranks_warm_up_capture_and_replay_the_same_steps(
    family: str, ep_size: int, tmp_path: Path, devices: list[ReplayingDevice], monkeypatch: pytest.MonkeyPatch
):
    found = []
    for name, sizes, prompt_sizes in (("eager", (), ()), ("replayed", (2, 4), (8, 10, 16))):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(ModelWorker, "_warms_up", lambda self, device, sizes=sizes: bool(sizes))
        ranks = Ranks(tmp_path / name, sizes, prompt_sizes, family=family, ep_size=ep_size)
        executors = ranks.start()
        assert [type(executor) for executor in executors] == [StepExecutor] * 2, executors
        graphs = executors[0].cuda_graphs
        assert graphs is None or not graphs.is_waiting()  # nothing is left to capture
        found.append(ranks.tokens(executors, batches()))
        for worker in ranks.workers:
            worker.close()
    assert found[1] == found[0]
    assert [device.num_replays for device in devices] == [0, 0, 5, 5]


def test_sums_that_return_new_tensors_are_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Sums through symmetric memory do not write to their argument, which a layer must not read afterwards."""
    reduce, sums = Axis.all_reduce, []

    def elsewhere(self: Axis, x: torch.Tensor) -> torch.Tensor:
        total = reduce(self, x.clone())
        sums.append(x.shape)
        x.fill_(torch.nan)
        return total

    found = []
    for name, sizes in (("eager", ()), ("replayed", (2, 4))):
        (tmp_path / name).mkdir()
        ranks = Ranks(tmp_path / name, sizes)
        found.append(ranks.tokens(ranks.start(), batches()))
        for worker in ranks.workers:
            worker.close()
        monkeypatch.setattr(Axis, "all_reduce", elsewhere)
    assert found[1] == found[0]
    assert sums


def test_all_ranks_add_sums_of_the_same_padded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With other sizes on another rank, a collective would fail or wait forever."""
    ranks, reduce = Ranks(tmp_path, (2, 4), (8, 10, 16)), Axis.all_reduce
    executors, sizes = ranks.start(), ([], [])

    def noted(self: Axis, x: torch.Tensor) -> torch.Tensor:
        sizes[self.rank].append(len(x))
        return reduce(self, x)

    monkeypatch.setattr(Axis, "all_reduce", noted)
    ranks.tokens(executors, batches())
    assert sizes[0] == sizes[1]
    assert list(dict.fromkeys(sizes[0])) == [16, 4, 2, 10]  # prompts of 15 and of 9 tokens, single tokens of 3 and of 2
    for worker in ranks.workers:
        worker.close()


@pytest.mark.parametrize(
    ("method", "sizes", "prompt_sizes", "option"),
    [
        ("capture", (2, 4), (), "--disable-cuda-graph"),
        ("capture", (2,), (8,), "--disable-cuda-graph"),
        ("capture_parts", (2,), (8,), "--disable-piecewise-cuda-graph"),
    ],
)
def test_a_rank_that_cannot_capture_fails_the_start_with_its_reason(
    method: str,
    sizes: tuple[int, ...],
    prompt_sizes: tuple[int, ...],
    option: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    def broken(self: ReplayingDevice, run: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    ranks = Ranks(tmp_path, sizes, prompt_sizes)
    monkeypatch.setattr(ReplayingDevice, method, broken)
    failures = ranks.start()
    assert [type(failure) for failure in failures] == [EngineFailure] * 2
    assert "Rank 1 could not capture" in str(failures[1])
    assert "not permitted when stream is capturing" in str(failures[1])
    assert str(failures[1]).endswith(f"Disable them with {option}.")
    for worker in ranks.workers:
        worker.close()
