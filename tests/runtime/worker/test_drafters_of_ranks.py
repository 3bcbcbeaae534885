"""A draft model or head beside several ranks on a device whose results the host must not read.

Two ranks run in threads, with real collectives and graphs on a fake device. The first one has the draft model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

import pytest
import torch

import fake_core
import late_steps
from fake_device import ReplayingDevice
from late_steps import MAX_DRAFTS, PAGE_SIZE
from runtime.batch import Batch, StepOutput, StepShare
from runtime.config.plan import DraftPlan, GraphPlan, KernelPlan, ParallelPlan, Plan
from runtime.distributed.group_runner import decode_batch, decode_share, encode_batch, encode_share
from runtime.distributed.link import HEAD, Frame, decode
from runtime.mesh.rendezvous import Rendezvous
from runtime.worker import worker as worker_module
from runtime.worker.device import Read
from runtime.worker.model_runner import StepExecutor
from runtime.worker.worker import ModelWorker
from runtime.worker.worker_setup import (
    DRAFT,
    TARGET,
    CacheSetup,
    DrafterSetup,
    ModelSetup,
    WorkerSetup,
    rank_info,
)

PROMPTS = [([3 + i, 9, 4 + 3 * i, 7, 5 + i][: 1 + i % 5], 3 + 2 * i) for i in range(9)]
CACHE = CacheSetup(num_pages=24, page_size=PAGE_SIZE, kv_dtype="float32", num_sequences=4)
GROUPS = {"tp_size": 2, "dp_size": 2, "dp_attention": True}
TIMEOUT_S = 60.0
STEP_TOKENS = 70  # more than the context


class PresentDevice(ReplayingDevice):
    """A device that is not the host: draft ids and the lengths of sequences stay on it."""

    is_host = False


class Ranks:
    """Two ranks, which compute steps in place of the executor of `late_steps.Steps`."""

    graph_runners = ()  # several ranks capture their graphs at the start

    def __init__(self, folder: Path, draft: ModelSetup, plan: Plan, sizes: tuple[int, ...]) -> None:
        parallel = plan.parallel
        served = ModelSetup(late_steps.facts(), late_steps.model_plan())
        drafts = plan.scheduler.max_row_drafts
        self.workers = [
            ModelWorker(
                WorkerSetup(
                    rank_info=rank_info(plan, rank),
                    models={TARGET: served, DRAFT: draft} if rank_info(plan, rank).drafts else {TARGET: served},
                    kernels=KernelPlan(),
                    graphs=GraphPlan(sizes=sizes),
                    step_tokens=STEP_TOKENS,
                    head_layers=() if plan.draft.algorithm == "EAGLE" else None,
                    max_drafts=drafts,
                    max_step_drafts=4 * drafts,
                    takes_branches=plan.scheduler.takes_branches,
                    drafter=DrafterSetup.of(plan),
                )
            )
            for rank in range(2)
        ]
        self._pool = ThreadPoolExecutor(2)
        rendezvous = Rendezvous(host="127.0.0.1", timeout_s=TIMEOUT_S, path=str(folder / "store"))
        self._together(*[lambda worker=worker: worker.join(CACHE, rendezvous) for worker in self.workers])
        first, second = self.workers
        self.first: StepExecutor
        self.first, self.second = self._together(lambda: first.lead(plan, TARGET), lambda: second.follow(TARGET))
        self._has_groups = parallel.dp_attention

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self.workers:
            worker.close()
        self._pool.shutdown()

    def run(self, batch: Batch) -> Read[StepOutput]:
        """Compute a step on both ranks. The second one gets the batch as a worker process would."""
        if self._has_groups:
            return self._run_groups(batch)
        there = decode_batch(received(encode_batch(batch)))

        def lead() -> Read[StepOutput]:
            if not self.first.pipelined:
                return self.first.run(batch)
            self.first.begin(batch)
            return self.first.end()

        def follow() -> None:
            if self.first.pipelined:
                self.second.relay(there)
            else:
                self.second.begin(there)
                self.second.follow()

        return self._together(lead, follow)[0]

    def _run_groups(self, batch: Batch) -> Read[StepOutput]:
        """Compute the batch in both attention groups. Every third step is done group by group, beside an idle one."""
        steps = [[batch, None], [None, batch]] if batch.number % 3 == 0 else [[batch, batch]]
        outputs = list[StepOutput]()
        for batches in steps:
            shares = [StepShare.of(each) for each in batches]
            there, same = decode_share(received(encode_share(batches[1], shares)))
            assert same == shares
            leader, follower = self.workers[0].common_leader, self.workers[1].common_step
            assert leader is not None
            assert follower is not None
            read, _ = self._together(partial(leader.run, batches), partial(follower.take_part, there, shares))
            outputs += [output for output in read() if output is not None]
        assert [output.tokens for output in outputs[1:]] == [outputs[0].tokens]
        return lambda: outputs[-1]

    def _together(self, *works: Callable[[], Any]) -> list[Any]:
        return [future.result(TIMEOUT_S) for future in [self._pool.submit(work) for work in works]]


def received(content: bytes) -> Frame:
    return decode(bytearray(content[HEAD.size :]), HEAD.unpack_from(content)[1])


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> list[PresentDevice]:
    """The devices in the order of their creation."""
    made: list[PresentDevice] = []

    def open_device(_: torch.device) -> PresentDevice:
        made.append(PresentDevice())
        return made[-1]

    kernels = replace(late_steps.kernels(), choose=late_steps.choose)
    monkeypatch.setattr(worker_module, "open_device", open_device)
    monkeypatch.setattr(worker_module, "_select", lambda *_, **__: (kernels, False))
    return made


def draft_setup(kind: str) -> ModelSetup:
    if kind == "EAGLE":
        facts, plan = late_steps.head_facts_and_plan()
        return ModelSetup(facts, plan, whole=True)
    facts = late_steps.facts() if kind == "same" else late_steps.facts("qwen3", num_hidden_layers=1, seed=9)
    return ModelSetup(facts, replace(late_steps.model_plan(), path=facts.path), whole=True)


def plan_of(kind: str, ranks: dict[str, Any], topk: int) -> Plan:
    plan = fake_core.make_plan()
    algorithm = "EAGLE" if kind == "EAGLE" else "STANDALONE"
    schedule = replace(
        plan.scheduler,
        max_drafts=MAX_DRAFTS,
        max_model_drafts=MAX_DRAFTS,
        draft_topk=topk,
        max_tree_drafts=MAX_DRAFTS * topk,
    )
    return replace(plan, parallel=ParallelPlan(**ranks), scheduler=schedule, draft=DraftPlan(algorithm=algorithm))


@pytest.mark.parametrize(
    ("kind", "ranks", "sizes", "depth", "topk"),
    [
        ("same", {"tp_size": 2}, (4, 8, 24), 2, 1),
        pytest.param("other", {"tp_size": 2}, (), 1, 1, marks=pytest.mark.slow),
        ("same", {"pp_size": 2}, (), 0, 1),
        ("EAGLE", {"tp_size": 2}, (4, 8, 24), 2, 1),
        ("EAGLE", {"pp_size": 2}, (), 0, 1),
        ("same", GROUPS, (), 2, 1),
        ("other", {"tp_size": 2}, (4, 8, 24), 1, 6),
        ("EAGLE", GROUPS, (), 1, 6),
    ],
    ids=str,
)
def test_all_ranks_verify_the_drafts_of_the_first(
    kind: str,
    ranks: dict[str, Any],
    sizes: tuple[int, ...],
    depth: int,
    topk: int,
    tmp_path: Path,
    devices: list[PresentDevice],
) -> None:
    expected, seen = late_steps.outputs(PROMPTS, depth=depth), list[Batch]()
    with Ranks(tmp_path, draft_setup(kind), plan_of(kind, ranks, topk), sizes) as made:

        def change(steps: late_steps.Steps) -> None:
            steps.executor = cast("Any", made)

        found = late_steps.outputs(
            PROMPTS,
            depth=depth,
            draft_model=late_steps.other_model(),  # for the scheduler only
            draft_methods="model",
            watch=seen.append,
            change=change,
            topk=topk,
        )
        assert found == expected
        lengths = [executor.lengths.tolist() for executor in (made.first, made.second)]
        assert made.first.pipelined or lengths[0] == lengths[1]
    drafted = [batch for batch in seen if batch.drafts is not None]
    assert drafted
    assert topk == 1 or any(batch.drafts is not None and batch.drafts.branches is not None for batch in drafted)
    assert not depth or any(batch.unknown_starts is not None for batch in drafted)
    if sizes:
        assert min(device.num_replays for device in devices) > 5
    if kind == "same":
        assert len(seen) < len(late_seen(depth)) / 1.5


def late_seen(depth: int) -> Sequence[Batch]:
    """Return the steps of plain decoding."""
    seen = list[Batch]()
    late_steps.outputs(PROMPTS, depth=depth, watch=seen.append)
    return seen
