"""The processes that compute one copy of the model together with this one, and a runner that leads them."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import torch

from ops.cpp.executor import NotRecordable
from ops.machine import Machine
from ops.select import Kernels
from runtime.batch import Batch, Tokens
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import Plan
from runtime.config.resolve.graphs import within
from runtime.distributed.message import encode, encode_batch
from runtime.distributed.rendezvous import TOKEN_VARIABLE, Gate, fingerprint, listen
from runtime.distributed.spawn import Worker, gather_all, tell_all
from runtime.errors import ConfigurationError, WorkerFailed
from runtime.kv_cache.pools import KVPool
from runtime.kv_cache.sizing import StepMemory
from runtime.models.decoder import Decoder
from runtime.worker.compiled import CompiledForward
from runtime.worker.cpu_graph import CpuGraph
from runtime.worker.cuda_graph import CudaGraphRunner
from runtime.worker.device import Device, open_device
from runtime.worker.forward_batch import Forward
from runtime.worker.model_runner import ModelRunner, ModelStep, PipelinedStep
from runtime.worker.sampler import Sampler
from runtime.worker.worker import Member

logger = logging.getLogger("penstock.core")

LOOPBACK = "127.0.0.1"
BLAME_S = 1.0  # to learn which rank is gone when a step failed
FINISH_S = 5.0  # for steps in flight when the engine ends


class Crew:
    """All ranks of one copy of the model: rank 0 is this process, each of the others a worker.

    `load`, then `join`; `close` at any time, after which no process and no file is left.
    """

    def __init__(self, plan: Plan, facts: ModelFacts, first_device: int = 0) -> None:
        self._plan = plan
        self._first_device = first_device  # how many devices other replicas have before ours
        self._facts = facts
        self._directory: Path | None = None  # where the ranks find each other
        self.workers: list[Worker] = []
        self.member: Member | None = None
        self.steps: StepMemory | None = None  # what steps take, where `load` could find out
        self.seconds_sending = 0.0  # what the last batch took

    async def load(self) -> list[Mapping[str, int]]:
        """Start the workers and load every rank's weights; returns each rank's memory.

        Raises `WorkerFailed` naming the rank, or what rank 0 raised (`CheckpointError`, ...).
        """
        parallel = self._plan.parallel
        ranks = parallel.ranks
        if self._shares_processors():
            torch.set_num_threads(self._num_threads())
        setups = [self._setup(rank) for rank in range(ranks)]
        for rank in parallel.ranks_here[1:]:
            self.workers.append(Worker.start(rank, self._environment()))
        if parallel.meeting is not None:
            with _in_time(parallel.join_timeout_s, "report from the other machines"):
                elsewhere = range(len(parallel.ranks_here), ranks)
                self.workers += await self._gate(parallel.meeting).admit(elsewhere)
        for worker in self.workers:
            worker.send(encode({"setup": setups[worker.rank]}))
        reports: list[dict[str, Any]] = []

        async def receive() -> None:
            reports.extend(await gather_all(self.workers))

        with _in_time(self._plan.parallel.join_timeout_s, "load the model"):
            async with anyio.create_task_group() as loading:
                loading.start_soon(receive)
                self.member = member = await anyio.to_thread.run_sync(Member, setups[0])
        if member.device.type == "cuda" and ranks == 1:
            self.steps = await anyio.to_thread.run_sync(member.measure, self._plan)
        return [member.memory(), *(report["loaded"] for report in reports)]

    async def join(self, num_pages: int, num_slots: int) -> KVPool:
        """Have all ranks meet and make their pools; returns rank 0's."""
        if self.member is None:
            raise RuntimeError("Ranks join when they are loaded.")
        plan = self._plan
        store, listening = self._store()
        join = {
            "store": store,
            "address": plan.parallel.meeting[0] if plan.parallel.meeting else LOOPBACK,
            "timeout_s": max(plan.parallel.join_timeout_s, plan.schedule.watchdog_timeout_s),
            "num_pages": num_pages,
            "num_slots": num_slots,
            "page_size": plan.cache.page_size,
            "kv_dtype": plan.cache.kv_dtype,
        }
        tell_all(self.workers, {"join": join})
        with _in_time(plan.parallel.join_timeout_s, "meet"):
            async with anyio.create_task_group() as joining:
                joining.start_soon(gather_all, self.workers)
                meet = partial(self.member.join, {**join, "listening": listening})
                pool = await anyio.to_thread.run_sync(meet, abandon_on_cancel=True)
        return pool

    async def lead(self, pool: KVPool, num_slots: int) -> ModelRunner | CrewRunner:
        """The runner of the joined crew, which then owns and closes it. May take minutes to compile."""
        if self.member is None:
            raise RuntimeError("Nobody leads a crew that has not loaded.")
        device, mesh = self.member.device, self.member.mesh
        kernels = self.member.kernels
        own = open_device(device)
        sampler = Sampler(
            self._facts.vocab_size,
            num_slots,
            own,
            choose=kernels.choose,
            penalize=kernels.penalize,
            apply_bitmask=kernels.apply_bitmask,
            score=kernels.score,
        )
        model = self.member.take_model()
        forward, improve = await anyio.to_thread.run_sync(self._forward, model, pool, own, num_slots)
        inner = ModelRunner(
            model,
            pool,
            sampler,
            num_slots=num_slots,
            device=own,
            mesh=mesh,
            forward=forward,
            improve=improve,
            tape=self._tape(model, pool, kernels, num_slots),
        )
        return CrewRunner(inner, self) if self.workers else inner

    def _tape(self, model: Decoder, pool: KVPool, kernels: Kernels, num_slots: int) -> CpuGraph | None:
        """Whole steps in one call, where all kernels can be recorded."""
        if kernels.executor is None or self._plan.parallel.ranks > 1:
            return None
        schedule = self._plan.schedule
        capacity = (schedule.chunk_tokens or schedule.max_prefill_tokens) + num_slots
        try:
            return CpuGraph(model, pool, kernels, capacity, num_slots)
        except NotRecordable as reason:
            logger.info("Steps are computed operation by operation: %s.", reason)
            return None

    def _forward(
        self, model: Decoder, pool: KVPool, device: Device, num_slots: int
    ) -> tuple[Forward, Callable[[], bool] | None]:
        """How steps are computed, and what makes them faster while the engine runs."""
        plan = self._plan
        graphs = plan.graphs
        forward: Forward = model
        if graphs.compile_max_rows:
            forward = CompiledForward(model, pool, graphs.compile_max_rows)
            forward.compile(device)
        if not graphs.sizes:
            if not device.is_host:
                logger.info("No CUDA graphs are captured: %s.", graphs.reasons.get("sizes", ""))
            return forward, None
        captured = CudaGraphRunner(
            forward,
            pool,
            device,
            within(graphs, num_slots),
            max_pages=min(pool.num_pages, -(-plan.model.context_length // pool.page_size)),
            collect_garbage=graphs.collect_garbage,
            profile=graphs.profile,
        )
        return captured, captured.capture_next

    def launch(self, batch: Batch) -> None:
        """Send the batch to every worker; returns at once."""
        began = time.perf_counter()
        frame = encode_batch(batch)
        for worker in self.workers:
            worker.send(frame)
        self.seconds_sending = time.perf_counter() - began

    def end(self) -> None:
        """Have the first stage end the oldest step that it only began; returns at once."""
        parallel = self._plan.parallel
        if parallel.pp_size > 1:
            tell_all(self.workers[: parallel.tp_size - 1], {"end": True})

    async def watch(self) -> None:
        """Never returns; raises `WorkerFailed` when a worker failed or is gone, and kills the others."""
        try:
            async with anyio.create_task_group() as watching:
                for worker in self.workers:
                    watching.start_soon(worker.watch)
        except ExceptionGroup as group:
            self.kill()
            raise _first_failure(group) from group

    async def blame(self) -> WorkerFailed | None:
        """Which worker's end explains a failed step, if one does. `watch` must be running."""
        for worker in self.workers:
            if failure := await worker.failure(BLAME_S / len(self.workers)):
                return failure
        return None

    def kill(self) -> None:
        """End the workers now; whoever waits for them here is let go. From any thread."""
        for worker in self.workers:
            worker.kill()
        if self.member is not None:
            self.member.mesh.abort()

    def detach(self) -> None:
        """Close the links, upon which the workers end in order. On the loop."""
        for worker in self.workers:
            worker.detach()

    def reap(self) -> None:
        """Wait until no worker is left; give everything back. Blocks."""
        for worker in self.workers:
            worker.reap()
        if self.member is not None:
            self.member.mesh.close()
            self.member = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    async def close(self) -> None:
        """End a crew that never ran."""
        self.detach()
        self.kill()
        await anyio.to_thread.run_sync(self.reap)

    def _setup(self, rank: int) -> dict[str, Any]:
        plan = self._plan
        place = {"rank": rank, "tp_size": plan.parallel.tp_size, "pp_size": plan.parallel.pp_size}
        index = self._first_device + rank % len(plan.parallel.ranks_here)
        device = _device(plan.model.device, index, plan.parallel.gpu_step)
        model = replace(plan.model, device=device)
        return {
            "place": place,
            "facts": asdict(self._facts) if rank else self._facts,
            "model": asdict(model) if rank else model,
            "kernels": {
                "choices": dict(plan.kernels.choices),
                "settings": plan.kernels.settings,
                "fallback": dict(plan.kernels.fallback) if plan.kernels.fallback is not None else None,
            },
            "compiled": plan.graphs.compile_max_rows > 0,
        }

    def _gate(self, meeting: tuple[str, int]) -> Gate:
        token = os.environ.get(TOKEN_VARIABLE, "")
        if not token:
            logger.warning(
                "Who reaches %s:%d can take a rank's place and read prompts: set %s, everywhere the same.",
                *meeting,
                TOKEN_VARIABLE,
            )
        return Gate(meeting, token, fingerprint(self._facts))

    def _store(self) -> tuple[str | dict[str, Any], int]:
        """Where the ranks find each other; over the network with a socket that listens there, else -1."""
        parallel = self._plan.parallel
        if parallel.meeting is None:
            self._directory = Path(tempfile.mkdtemp(prefix="penstock-"))  # for our eyes only (0700)
            return str(self._directory / "store"), -1
        listening = listen(parallel.meeting[0], parallel.store_port or 0)
        host, port = listening.getsockname()[:2]
        return {"host": host, "port": port, "name": secrets.token_hex(16)}, listening.detach()

    def _environment(self) -> dict[str, str]:
        return {"OMP_NUM_THREADS": str(self._num_threads())} if self._shares_processors() else {}

    def _shares_processors(self) -> bool:
        """Whether this process and others compute on one CPU, and nobody said with how many threads."""
        parallel = self._plan.parallel
        several = self._plan.model.device == "cpu" and parallel.ranks * parallel.dp_size > 1
        return several and "OMP_NUM_THREADS" not in os.environ

    def _num_threads(self) -> int:
        """Each rank's part of the processors: with more threads, a step takes many times longer."""
        parallel = self._plan.parallel
        return max(1, Machine.probe().num_cpus // (len(parallel.ranks_here) * parallel.dp_size))


class CrewRunner:
    """Leads the crew: what it launches, every rank computes. Any failed step is the end of the whole crew."""

    def __init__(self, inner: ModelRunner, crew: Crew) -> None:
        self.crew = crew
        self._inner = inner

    def launch(self, batch: Batch) -> CrewStep:
        """Enqueue the batch on every rank; returns at once."""
        self.crew.launch(batch)
        return CrewStep(self._inner.launch(batch), self.crew)

    async def watch(self) -> None:
        """Never returns; raises `WorkerFailed` when a worker failed or is gone."""
        try:
            await self.crew.watch()
        finally:
            self.crew.detach()

    def close(self) -> None:
        """Finish what was launched, as far as that is possible, and end the workers. Blocks."""
        too_late = threading.Timer(FINISH_S, self.crew.kill)
        too_late.daemon = True
        too_late.start()
        self._inner.close()
        too_late.cancel()
        too_late.join()
        self.crew.reap()


class CrewStep:
    """A batch that every rank computes."""

    __slots__ = ("_crew", "_inner")

    def __init__(self, inner: ModelStep | PipelinedStep, crew: Crew) -> None:
        self._inner = inner
        self._crew = crew

    async def tokens(self) -> Tokens:
        """The step's tokens. Raises `WorkerFailed`: ranks that failed in different places cannot go on."""
        self._crew.end()
        try:
            return await self._inner.tokens()
        except Exception as error:  # whatever it was, the other ranks now wait for what will not come
            failure = await self._crew.blame()
            raise failure or WorkerFailed("Rank 0 (this process) failed in a step.") from error


@contextmanager
def _in_time(seconds: float, what: str) -> Iterator[None]:
    """Turn too long a wait into a refusal that says what to do."""
    try:
        with anyio.fail_after(seconds):
            yield
    except TimeoutError as error:
        raise ConfigurationError(
            f"The ranks did not {what} within {seconds:g} s; see --dist-timeout."
        ) from error


def _device(device: str, index: int, step: int) -> str:
    """The device of the model's rank with this index on its machine: GPUs from the first one on."""
    if device == "cpu":
        return device
    return f"cuda:{int(device.partition(':')[2] or 0) + index * step}"


def _first_failure(group: BaseExceptionGroup) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
