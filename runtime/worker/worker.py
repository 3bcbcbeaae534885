"""One rank from its setup to its steps: the same in the engine's process (rank 0) and in worker processes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch

from ops.backends import SAMPLING
from ops.cpp.build import BuildError
from ops.cpp.kernel_launcher import NotCapturable
from ops.machine import Machine
from ops.select import Kernels, select
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import GraphPlan, KernelPlan, ModelPlan, Plan
from runtime.config.pooling import Pooling
from runtime.config.resolve.graphs import within
from runtime.distributed.mesh import Mesh, RankInfo
from runtime.distributed.rendezvous import Rendezvous
from runtime.errors import EngineFailure
from runtime.kv_cache.kinds import PAGED
from runtime.kv_cache.pools import KVPool
from runtime.kv_cache.registry import KINDS, by_kind
from runtime.kv_cache.sizing import StepMemory
from runtime.models.decoder import Decoder
from runtime.models.loader import load_model
from runtime.worker.compiled import CompiledForward, compilable
from runtime.worker.cpu_graph import CpuGraph
from runtime.worker.cuda_graph import Choice, CudaGraphRunner
from runtime.worker.device import Device, open_device
from runtime.worker.logits_dump import LogitsDump
from runtime.worker.memory_profile import profile_memory
from runtime.worker.model_runner import StepExecutor
from runtime.worker.sampler import Sampler
from runtime.worker.step_inputs import Forward

logger = logging.getLogger("penstock.core")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """What a rank loads. Travels to other processes as JSON."""

    rank_info: RankInfo
    facts: ModelFacts
    model: ModelPlan  # with this rank's device
    kernels: KernelPlan
    graphs: GraphPlan  # which steps every rank captures

    @classmethod
    def of(cls, plan: Plan, facts: ModelFacts, rank: int, first_device: int) -> Self:
        """The setup of this rank of a replica that has `first_device` devices of other replicas before its own."""
        parallel = plan.parallel
        device = plan.model.device
        if device != "cpu":
            index = first_device + rank % len(parallel.ranks_here)
            device = f"cuda:{int(device.partition(':')[2] or 0) + index * parallel.gpu_step}"
        return cls(
            rank_info=RankInfo(rank=rank, tp_size=parallel.tp_size, pp_size=parallel.pp_size),
            facts=facts,
            model=replace(plan.model, device=device),
            kernels=plan.kernels,
            graphs=plan.graphs,
        )

    @classmethod
    def decode(cls, body: Mapping[str, Any], path: str | None) -> Self:
        """From JSON. `path` is where this machine has the checkpoint, if not where the sender has it."""
        here = {} if path is None else {"path": path}
        facts = {**body["facts"], **here, "eos_ids": frozenset(body["facts"]["eos_ids"])}
        facts["pooling"] = Pooling.decode(facts.get("pooling"))
        return cls(
            rank_info=RankInfo(**body["rank_info"]),
            facts=ModelFacts(**facts),
            model=ModelPlan(**{**body["model"], **here}),
            kernels=KernelPlan(**body["kernels"]),
            graphs=GraphPlan(**body["graphs"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSetup:
    """The size of the KV pool and of what is kept for each running sequence. Travels as JSON."""

    num_pages: int
    page_size: int
    kv_dtype: str
    num_sequences: int
    kinds: Mapping[str, int] = field(default_factory=dict)  # units of the kinds of caches beside the pages


class ModelWorker:
    """One rank: its share of the weights at once, of the KV pool after `join`, and then its part of every step."""

    def __init__(self, setup: WorkerSetup) -> None:
        """Loads the weights, which takes seconds to minutes. Raises what `load_model` raises."""
        model = setup.model
        self.facts = setup.facts
        self.device = torch.device(model.device)
        self.mesh = Mesh(setup.rank_info, self.device)
        self.kernels = _select(setup.kernels)
        self._context_length, self._graphs = model.context_length, setup.graphs
        self._raw_logprobs = setup.kernels.raw_logprobs
        self._captures_choice = SAMPLING[setup.kernels.sampling_backend].captured
        if setup.graphs.compile_max_rows:
            self.kernels = compilable(self.kernels)
        layers = setup.rank_info.stage_layers(self.facts.num_layers)
        decoder = load_model(self.facts, model, self.kernels, self.mesh, layers, setup.rank_info)
        if model.by_transformers:
            from runtime.worker.transformers_check import tried  # imports transformers' models

            decoder = tried(decoder, self.facts, self.device, model.context_length)
        self.cache_specs = decoder.cache_specs  # of the whole model
        self.weight_bytes = sum(parameter.nbytes for parameter in decoder.parameters())
        self._model: Decoder | None = decoder
        self._pool: KVPool | None = None
        self._cache: CacheSetup | None = None

    @property
    def kernels_description(self) -> str:
        """Which implementation of each operation runs, and which arithmetic it uses, in one line."""
        backends = ", ".join(
            f"{operation} {file}" for operation, file in sorted(self.kernels.backends.items())
        )
        return f"{self.kernels.description}; {backends}"

    def memory(self) -> dict[str, int]:
        """What the size of the KV pool depends on, in bytes."""
        if self.device.type == "cuda":
            available, total = torch.cuda.mem_get_info(self.device)
        else:
            machine = Machine.probe()
            available, total = machine.available_bytes, machine.total_bytes
        return {"available": available, "total": total, "weights": self.weight_bytes}

    def profile_memory(self, plan: Plan) -> StepMemory:
        """What the largest steps take, by running them. Blocks for seconds; for a rank that computes alone.

        Raises `ConfigurationError` when there is too little memory for one of them.
        """
        device = open_device(self.device)
        # Layers whose kind has pages use the one page here.
        kinds = {
            name: 1
            for name in by_kind(self.cache_specs, plan)
            if name != PAGED and "page_table" not in KINDS[name].scratch_arrays([], 0)
        }
        cache = CacheSetup(
            num_pages=1,
            page_size=plan.cache.page_size,
            kv_dtype=plan.cache.kv_dtype,
            num_sequences=plan.scheduler.max_running,
            kinds=kinds,
        )
        pool = self._make_pool(cache)
        executor = StepExecutor(
            self._loaded,
            pool,
            self._loaded,
            num_sequences=cache.num_sequences,
            device=device,
            sampler=self._make_sampler(cache.num_sequences, device),
        )
        steps = profile_memory(executor, plan, kinds)
        del executor, pool
        device.release_unused()  # or the driver would count it as used
        return steps

    def join(
        self,
        cache: CacheSetup,
        rendezvous: Rendezvous | None,
        *,
        address: str | None = None,
        listening: int = -1,
    ) -> int:
        """Meet the other ranks, if there are any, and make the KV pool -> its bytes. Blocks until all are there.

        `address` is this machine's, where it is not the rendezvous' host; `listening` rank 0's socket there. Raises
        RuntimeError when ranks are missing, torch.OutOfMemoryError (on a GPU) or OSError when the pool does not fit.
        """
        if rendezvous is not None:
            self.mesh.join(rendezvous, address=address, listening=listening)
        self._cache, self._pool = cache, self._make_pool(cache)
        return self._pool.nbytes

    def lead(self, plan: Plan) -> StepExecutor:
        """Rank 0's steps, with what makes them faster: CUDA graphs, compiled layers or the CPU graph.

        The executor owns model and pool from now on. May take minutes to compile, or to capture where other ranks
        take part, which have to be in `follow` then; `EngineFailure` where a rank cannot capture.
        """
        model, pool, cache = self._hand_over()
        device = open_device(self.device)
        forward = self._make_forward(model, pool, device, cache)
        cuda_graphs = forward if isinstance(forward, CudaGraphRunner) else None
        folder = plan.kernels.logits_folder
        dump = LogitsDump(folder) if folder is not None else None
        return StepExecutor(
            model,
            pool,
            forward,
            num_sequences=cache.num_sequences,
            device=device,
            sampler=self._make_sampler(cache.num_sequences, device, dump),
            mesh=self.mesh,
            cpu_graph=self._make_cpu_graph(model, pool, cache, plan),
            cuda_graphs=cuda_graphs,
            nan_detection=plan.kernels.nan_detection,
        )

    def follow(self) -> StepExecutor:
        """The steps of a rank that rank 0 leads. The executor owns model and pool from now on. Captures as `lead`."""
        model, pool, cache = self._hand_over()
        device = open_device(self.device)
        forward = self._make_forward(model, pool, device, cache)
        return StepExecutor(
            model, pool, forward, num_sequences=cache.num_sequences, device=device, mesh=self.mesh
        )

    def close(self) -> None:
        """Leave the other ranks, and free model and pool if they were not handed over."""
        self.mesh.abort()
        self.mesh.close()
        self._model = self._pool = None

    @property
    def _loaded(self) -> Decoder:
        if self._model is None:
            raise RuntimeError("The model of this rank was handed over already.")
        return self._model

    def _hand_over(self) -> tuple[Decoder, KVPool, CacheSetup]:
        """Model and pool, once: whoever has them decides when their memory is freed."""
        model, pool, cache = self._loaded, self._pool, self._cache
        if pool is None or cache is None:
            raise RuntimeError("This rank has not joined the others yet.")
        self._model = self._pool = None
        return model, pool, cache

    def _make_pool(self, cache: CacheSetup) -> KVPool:
        return KVPool(
            self.mesh.rank_info.local_specs(self.cache_specs, self.facts.num_layers),
            cache.num_pages,
            cache.page_size,
            getattr(torch, cache.kv_dtype),
            self.device,
            kinds=cache.kinds,
        )

    def _make_sampler(self, num_sequences: int, device: Device, dump: LogitsDump | None = None) -> Sampler:
        return Sampler(
            self.facts.vocab_size,
            num_sequences,
            device,
            choose=self.kernels.choose,
            penalize=self.kernels.penalize,
            score=self.kernels.score,
            raw_logprobs=self._raw_logprobs,
            dump=dump,
        )

    def _make_cpu_graph(self, model: Decoder, pool: KVPool, cache: CacheSetup, plan: Plan) -> CpuGraph | None:
        """Whole steps in one call, where all kernels can be recorded."""
        if self.kernels.launcher is None or plan.parallel.ranks > 1:
            return None
        capacity = plan.scheduler.step_prompt_tokens + cache.num_sequences
        try:
            return CpuGraph(
                model,
                pool,
                self.kernels,
                capacity,
                cache.num_sequences,
                context_length=plan.model.context_length,
            )
        except NotCapturable as reason:
            logger.info("Steps are computed operation by operation: %s.", reason)
            return None

    def _make_forward(self, model: Decoder, pool: KVPool, device: Device, cache: CacheSetup) -> Forward:
        """How hidden states are computed: by CUDA graphs where some can be captured.

        Where several ranks compute, all are captured here: a capture holds the ranks' collectives, so that all of
        them have to capture the same sizes in the same order, with no step in between.
        """
        graphs, info = self._graphs, self.mesh.rank_info
        forward: Forward = model
        if graphs.compile_max_rows:
            forward = CompiledForward(model, pool, graphs.compile_max_rows)
            forward.compile(device)
        if not graphs.sizes:
            if not device.is_host:
                logger.info("No CUDA graphs are captured: %s.", graphs.reasons.get("sizes", ""))
            return forward
        captured = CudaGraphRunner(
            forward,
            pool,
            device,
            within(graphs, cache.num_sequences),
            max_pages=min(pool.num_pages, -(-self._context_length // pool.page_size)),
            # Where ranks share layers, only the first has logits: there graphs end at the hidden states.
            choice=Choice(model.logits, self.kernels.choose, greedy_only=not self._captures_choice)
            if info.world_size == 1
            else None,
            collect_garbage=graphs.collect_garbage,
            profile=graphs.profile,
        )
        if info.world_size == 1:
            return captured
        try:
            while captured.capture_next():
                pass
        except Exception as error:  # whatever a driver or a kernel says
            raise EngineFailure(
                f"Rank {info.rank} could not capture its CUDA graphs: {error}. --disable-cuda-graph goes without."
            ) from error
        return captured


def _select(plan: KernelPlan) -> Kernels:
    """The chosen kernels, or the second choice where those in C++ cannot be compiled."""
    try:
        return select(plan.choices, plan.settings)
    except BuildError as error:
        if plan.fallback is None:
            raise
        logger.warning("The kernels in C++ cannot be used, torch's are slower: %s", error)
        return select(plan.fallback, plan.settings)
