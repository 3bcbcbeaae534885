"""The model worker: one rank, in the engine's process (rank 0) or in a process of its own.

Loads models and makes executors.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ops.backends import SAMPLING
from ops.cpp.build import BuildError, Lifeline
from ops.cpp.kernel_launcher import NotCapturable
from ops.kv import native as native_kv
from ops.machine import Machine
from ops.progress import progress_bar
from ops.select import Kernels, must_compile, select
from runtime.batch import PageCopy
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import KernelPlan, Plan
from runtime.config.resolve.graphs import prompts_of, within
from runtime.errors import CheckpointError, ConfigurationError, EngineFailure
from runtime.kv_cache.kinds import PAGED, Specs
from runtime.kv_cache.pools import KVPool
from runtime.kv_cache.registry import KINDS, by_kind, local_specs
from runtime.kv_cache.sizing import StepMemory
from runtime.layers.batch_reads import batch_reads
from runtime.layers.expert_sharing import ExpertSharing
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.moe import mixtures
from runtime.loading.draft_facts import nextn_overrides
from runtime.loading.loader import load_model
from runtime.loading.staged_weights import StagedWeights
from runtime.loading.token_map import TokenRows, head_of_tokens, lm_head_tensor, read_token_map
from runtime.loading.weight_memory import stored_bytes
from runtime.loading.weight_update import LoadedWeights, WeightSource
from runtime.loading.whole_vocabulary import WholeVocabulary
from runtime.mesh.mesh import Mesh
from runtime.mesh.rank_info import RankInfo, Stage
from runtime.mesh.rendezvous import Rendezvous
from runtime.modeling.decoder import Decoder, states_for_draft_head
from runtime.modeling.draft_head import DraftHead
from runtime.worker.adapters import Adapters
from runtime.worker.common_step import CommonStep, CommonStepLeader
from runtime.worker.compiled import CompiledForward, compilable
from runtime.worker.cpu_graph import CpuGraph
from runtime.worker.cuda_graph import Choice, CudaGraphRunner
from runtime.worker.device import Device, open_device
from runtime.worker.device_drafter import DeviceDrafter
from runtime.worker.early_memory import allocate_early
from runtime.worker.expert_moves import RankExperts
from runtime.worker.expert_recorder import ExpertRecorder
from runtime.worker.host_drafter import HostDrafter
from runtime.worker.layer_ring import LayerRing
from runtime.worker.memory_profile import profile_memory
from runtime.worker.model_runner import StepExecutor
from runtime.worker.page_copies import CopyPages, PageCopier
from runtime.worker.prompt_graphs import PromptGraphs
from runtime.worker.relaxed_acceptance import RelaxedAcceptance
from runtime.worker.remote_instance import load_from_instance
from runtime.worker.sampler import Sampler
from runtime.worker.step_inputs import Forward, Staging
from runtime.worker.tensor_dump import TensorDump
from runtime.worker.two_batches import TwoBatchForward
from runtime.worker.warm_up import compiles_at_first_use, warm_up
from runtime.worker.worker_setup import DRAFT, TARGET, CacheSetup, DrafterSetup, ModelSetup, WorkerSetup

logger = logging.getLogger("penstock.core")

MEASURED_PAGES = 64  # number of pages that are copied to measure the speed of copies from the host


@dataclass(slots=True)
class _LoadedModel:
    """A loaded model that no executor has yet."""

    setup: ModelSetup
    source: WeightSource
    decoder: Decoder
    ring: LayerRing | None = None  # None: all layers stay on the device
    pool: KVPool | None = None  # allocated by `join`


class ModelWorker:
    """One rank: loads its shards of all models, allocates their KV pools in `join`, and creates step executors.

    Methods refer to a model by its name.
    """

    def __init__(self, setup: WorkerSetup, lifeline: Lifeline | None = None) -> None:
        """Load the weights, which takes seconds to minutes. Raises the errors of `load_model`.

        If `lifeline` is cut while kernels are compiled, the compilation ends with `BuildStopped`.
        """
        self.device = torch.device(setup.device)
        self.mesh = Mesh(setup.rank_info, self.device, symmetric=setup.symmetric_memory)
        self._alone = Mesh(RankInfo(rank=0, tp_size=1, pp_size=1), self.device)  # a mesh of one rank, for whole models
        self._whole = frozenset(name for name, model in setup.models.items() if model.whole)
        # Whether PyTorch computes the steps until `lead_in_cpp` has compiled the C++ kernels.
        self.compiles_later = setup.kernels.in_background and must_compile(
            setup.kernels.settings["with_cpp"].get("compiler")
        )
        self.kernels, self.lacks_kernels = _select(setup.kernels, lifeline, fall_back=self.compiles_later)
        if self.lacks_kernels and setup.models[TARGET].plan.deterministic:
            raise ConfigurationError(
                "--enable-deterministic-inference needs the C++ kernels, which cannot be compiled; the log says why."
            )
        self._graphs = setup.graphs
        self._two_batches = setup.two_batches
        self._raw_logprobs = setup.kernels.raw_logprobs
        self._sampling_backend = SAMPLING[setup.kernels.sampling_backend]
        if setup.graphs.compile_max_rows:
            self.kernels = compilable(self.kernels)
        self._setup = setup
        self._sharing = self._share_experts(setup)
        self.media_refusal = ""  # why the language model cannot take embeddings of media; "": it can, or has no encoder
        self._models = {name: self._load(name, model) for name, model in setup.models.items()}
        self._vocabulary = self._load_vocabulary(setup)
        self._adapters = self._make_adapters(setup)
        self.weight_bytes = {name: stored_bytes(model.decoder.parameters()) for name, model in self._models.items()}
        if self._vocabulary is not None:
            self.weight_bytes["draft vocabulary"] = sum(each.nbytes for each in self._vocabulary.parameters())
        if self._adapters is not None:
            self.weight_bytes["adapters"] = self._adapters.nbytes
        # Specs of the layers of the whole model, not sharded. Keys are (model name, layer index).
        self.cache_specs: Specs = {
            (name, index): spec
            for name, model in self._models.items()
            for index, spec in model.decoder.cache_specs.items()
        }
        self._num_layers = {name: model.facts.num_layers for name, model in setup.models.items()}
        self._cache: CacheSetup | None = None
        # This rank's part of common steps, if there are attention groups. On rank 0, `lead` sets `common_leader`. On
        # other ranks, `follow` sets `common_step`.
        self.common_leader: CommonStepLeader | None = None
        self.common_step: CommonStep | None = None

    @property
    def kernels_description(self) -> str:
        """One line with the implementation and arithmetic of each operation."""
        backends = ", ".join(f"{operation} {file}" for operation, file in sorted(self.kernels.backends.items()))
        return f"{self.kernels.description}; {backends}"

    def local_specs(self, rank_info: RankInfo) -> Specs:
        """Return the cache specs of this rank's layers, sharded."""
        return {
            (name, index): spec
            for name, num_layers in self._num_layers.items()
            if rank_info.drafts or name not in self._whole
            for index, spec in local_specs(self._specs_of(name), self._info_of(name, rank_info), num_layers).items()
        }

    def _info_of(self, name: str, rank_info: RankInfo) -> RankInfo:
        """Return the rank's coordinates for this model.

        A model that is not sharded has the coordinates of a single rank.
        """
        return self._alone.rank_info if name in self._whole else rank_info

    def memory(self) -> dict[str, int]:
        """Return the available, total and weight bytes of this rank, from which the KV pools are sized."""
        if self.device.type == "cuda":
            available, total = torch.cuda.mem_get_info(self.device)
        else:
            machine = Machine.probe()
            available, total = machine.available_bytes, machine.total_bytes
        return {"available": available, "total": total, "weights": sum(self.weight_bytes.values())}

    def profile_memory(self, plan: Plan) -> StepMemory:
        """Measure the memory of the largest steps by running them. Blocks for seconds. Only for a single rank.

        The result has the activation memory of the largest step of any model, because only one step runs at a time, and
        the memory of the graphs of all models. Raises `ConfigurationError` if a step does not fit into memory.
        """
        device = open_device(self.device)
        # One unit for each kind without pages (such as recurrent states). Kinds with their own pages (sliding windows)
        # are left out, so their layers use the pool's pages, of which the profile run needs only one.
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
        profiles, tables, target = [], 0, self._models[TARGET].decoder
        draft = self._models[DRAFT].decoder if DRAFT in self._models else None
        head = draft if isinstance(draft, DraftHead) else None
        if draft is not None:
            tables = DeviceDrafter.table_bytes(draft, cache.num_sequences, plan.scheduler.max_drafts)
        if head is not None:
            self._connect(head, target)
        for name, model in self._models.items():
            if model.ring is not None:
                model.ring.use(device)
            executor = StepExecutor(
                model.decoder,
                self._make_pool(name, cache),
                model.decoder if head is None else _forward_with_states(model.decoder, head),
                num_sequences=cache.num_sequences,
                device=device,
                sampler=self._make_sampler(model.setup.facts, cache.num_sequences, device),
            )
            profiles.append(profile_memory(executor, plan, kinds, verifies=name == TARGET))
            del executor
            device.release_unused()  # the driver counts memory that the allocator keeps as used
        return StepMemory(
            activation_bytes=max(steps.activation_bytes for steps in profiles),
            graph_bytes=sum(steps.graph_bytes for steps in profiles),
            table_bytes=tables,
            measured=True,
        )

    def join(
        self,
        cache: CacheSetup,
        rendezvous: Rendezvous | None,
        *,
        address: str | None = None,
        listening: int = -1,
    ) -> int:
        """Join the process group of several ranks, and allocate the KV pools. Return the size of the pools in bytes.

        Blocks until all ranks have joined. `address` is this machine's address, unless the machine is the rendezvous
        host. `listening` is the file descriptor of rank 0's listening socket. Raises RuntimeError if ranks are missing,
        and torch.OutOfMemoryError (on a GPU) or OSError if the pools do not fit.
        """
        if rendezvous is not None:
            self.mesh.join(rendezvous, address=address, listening=listening)
        self._cache, num_bytes = cache, 0
        for name, model in self._models.items():
            model.pool = self._make_pool(name, cache)
            num_bytes += model.pool.nbytes
            if cache.num_tier_pages and self.device.type == "cpu":  # a GPU's driver has allocated and locked the memory
                allocate_early(model.pool.host_tensors, cache.num_host_pages - cache.num_tier_pages)
        return num_bytes

    def lead(self, plan: Plan, name: str) -> StepExecutor:
        """Return rank 0's executor of a model, with CUDA graphs, a compiled forward pass or the CPU graph.

        The executor then owns the model and its pool. One thread must run the steps of all models. Compilation may take
        minutes, as may the capture of graphs with several ranks. All other ranks must call `follow` at the same time.
        Raises `EngineFailure` if a rank cannot capture.
        """
        loaded, pool, cache = self._hand_over(name)
        model = loaded.decoder
        device = open_device(self.device)
        if loaded.ring is not None:
            loaded.ring.use(device)
        vocabulary, draft = self._vocabulary, self._models.get(DRAFT)
        head = _own_head(draft)
        drafter = None
        if plan.scheduler.max_model_drafts:
            drafter = self._make_draft_model(DrafterSetup.of(plan), device, model)
        reads_states = isinstance(drafter, DeviceDrafter) and drafter.reads_states
        forward = self._make_forward(loaded.setup, model, pool, device, cache, keeps_states=reads_states)
        cuda_graphs = forward if isinstance(forward, CudaGraphRunner) else None
        cpu_graph = None
        if plan.kernels.dump_folder is None or name != TARGET:
            cpu_graph = self._make_cpu_graph(loaded.setup, model, pool, cache, plan.scheduler.step_prompt_tokens)
        relaxed = _relaxed(plan)
        sampler = self._make_sampler(loaded.setup.facts, cache.num_sequences, device, relaxed)
        if self._warms_up(device) and not loaded.setup.plan.is_embedding:
            with torch.inference_mode(), device.forward():
                sampler.warm_up(cache.num_sequences)
        fixed = forward is not model or cpu_graph is not None
        weights = self._loaded_weights(loaded, cache, name, fixed=fixed)
        self._follow_vocabulary(weights, model, vocabulary, None if draft is None else draft.decoder)
        if weights is not None and draft is not None and head is not None and plan.draft.algorithm == "NEXTN":
            self._update_head(weights, head, draft, fixed=fixed)
        executor = StepExecutor(
            model,
            pool,
            forward,
            num_sequences=cache.num_sequences,
            device=device,
            sampler=sampler,
            mesh=self.mesh,
            cpu_graph=cpu_graph,
            cuda_graphs=cuda_graphs,
            nan_detection=plan.kernels.nan_detection,
            copy_pages=self._copy_pages(cache),
            weights=weights,
            adapters=self._adapters if name == TARGET else None,
            draft_model=None if isinstance(drafter, DeviceDrafter) else drafter,
            device_drafter=drafter if isinstance(drafter, DeviceDrafter) else None,
            experts=self._rank_experts(name, model),
            head_layers=self._setup.head_layers,
            dump=_dump(plan, model) if name == TARGET else None,
        )
        num_groups = self.mesh.rank_info.dp_size
        if num_groups > 1:
            samplers = [sampler]
            for _ in range(1, num_groups):
                samplers.append(self._make_sampler(loaded.setup.facts, cache.num_sequences, device, relaxed=relaxed))
            step = CommonStep(executor, model, pool, self.mesh)
            self.common_leader = CommonStepLeader(step, executor, model, samplers)
        return executor

    def lead_in_cpp(self, plan: Plan, pool: KVPool, lifeline: Lifeline) -> tuple[StepExecutor, str]:
        """Compile the C++ kernels and load the served model again. Return its executor, and the kernels' description.

        Only for workers with `compiles_later`. `pool` is the KV pool of the executor that `lead` returned. This
        executor may run steps meanwhile. Raises `BuildError`, or `BuildStopped` after `lifeline` is cut.
        """
        cpp = {**plan.kernels.settings["with_cpp"], "lifeline": lifeline}
        self.kernels = select(plan.kernels.choices, {**plan.kernels.settings, "with_cpp": cpp})
        lifeline.check()
        model = self._load(TARGET, self._setup.models[TARGET])
        model.pool = pool
        self._models[TARGET] = model
        return self.lead(plan, TARGET), self.kernels_description

    def follow(self, name: str) -> StepExecutor:
        """Return the executor of a model on a rank other than 0. The executor then owns the model and its pool.

        With several ranks, it captures CUDA graphs together with `lead` on rank 0.
        """
        loaded, pool, cache = self._hand_over(name)
        model = loaded.decoder
        device = open_device(self.device)
        if loaded.ring is not None:
            loaded.ring.use(device)
        if self._setup.head_layers and self.mesh.rank_info.pp_size > 1:
            model.tap(self._setup.head_layers, self.kernels.join)
        vocabulary, draft = self._vocabulary, self._models.get(DRAFT)
        head, drafter = _own_head(draft), None
        if draft is not None:  # this rank leads an attention group
            drafter = self._make_draft_model(self._setup.drafter, device, model)
        forward = self._make_forward(loaded.setup, model, pool, device, cache)
        weights = self._loaded_weights(loaded, cache, name, fixed=forward is not model)
        self._follow_vocabulary(weights, model, vocabulary, None if draft is None else draft.decoder)
        if weights is not None and draft is not None and head is not None and self._setup.drafter.of_target:
            self._update_head(weights, head, draft, fixed=forward is not model)
        executor = StepExecutor(
            model,
            pool,
            forward,
            num_sequences=cache.num_sequences,
            device=device,
            mesh=self.mesh,
            copy_pages=self._copy_pages(cache),
            weights=weights,
            adapters=self._adapters if name == TARGET else None,
            draft_model=None if isinstance(drafter, DeviceDrafter) else drafter,
            device_drafter=drafter if isinstance(drafter, DeviceDrafter) else None,
            experts=self._rank_experts(name, model),
            head_layers=self._setup.head_layers,
        )
        if self.mesh.rank_info.dp_size > 1:
            self.common_step = CommonStep(executor, model, pool, self.mesh)
        return executor

    def close(self) -> None:
        """Leave the process group, and free models and pools that no executor owns."""
        self.mesh.abort()
        self.mesh.close()
        self._models.clear()

    def _share_experts(self, setup: WorkerSetup) -> ExpertSharing | None:
        """Return how ranks share the served model's experts, or None if these are neither shared nor recorded."""
        plan, info = setup.experts, setup.rank_info
        if plan.ep_size == 1 and not plan.records and plan.dispatch != "fake":
            return None
        return ExpertSharing(
            self.mesh.axis("ep"),
            num_redundant=plan.num_redundant,
            dispatch=plan.dispatch,
            exchanges=plan.exchange == "all_to_all",
            records=plan.records and info.rank % info.stage_size == 0,
            record_tokens=setup.step_tokens,
            first={int(layer): experts for layer, experts in setup.expert_places.items()},
        )

    def _sharing_of(self, name: str) -> ExpertSharing | None:
        return self._sharing if name == TARGET else None

    def _rank_experts(self, name: str, model: Decoder) -> RankExperts | None:
        sharing, setup = self._sharing_of(name), self._setup
        here = mixtures(model) if sharing is not None else {}
        if sharing is None or not here:
            return None
        num_layers, rank = self._num_layers[name], setup.rank_info.rank
        recorder = ExpertRecorder(here, sharing, setup.experts, rank, num_layers) if sharing.records else None
        return RankExperts(here, sharing, self.mesh.axis("stage"), recorder)

    def _load(self, name: str, setup: ModelSetup) -> _LoadedModel:
        mesh = self._alone if name in self._whole else self.mesh
        facts, plan, info = setup.facts, setup.plan, mesh.rank_info
        source = WeightSource.of(facts, plan)
        layers = info.stage_layers(facts.num_layers)
        decoder = load_model(facts, plan, self.kernels, mesh, layers, info, self._sharing_of(name))
        if plan.load_format == "remote_instance":
            load_from_instance(decoder, plan, info)
        if plan.by_transformers:
            from runtime.worker.transformers_check import verified  # here, because it imports transformers' models

            decoder = verified(decoder, facts, self.device, plan.context_length)
        if setup.takes_media:
            try:
                decoder.accept_media()
            except CheckpointError as error:
                self.media_refusal = str(error)
        ring = LayerRing(decoder, decoder.in_host, plan.offload_ahead + 1) if decoder.in_host else None
        return _LoadedModel(setup, source, decoder, ring)

    def _load_vocabulary(self, setup: WorkerSetup) -> Decoder | None:
        """Return a decoder with the whole embedding and LM head of the served model, for a draft head on this rank.

        Returns None if there is no draft head, or if the served model on this rank already has both.
        """
        draft, info = self._models.get(DRAFT), setup.rank_info
        if draft is None or not isinstance(draft.decoder, DraftHead):
            return None
        if info.stage_size == 1 or (info.tp_size == 1 and info.head_by_group):
            return None
        target, no_layers = setup.models[TARGET], Stage(range(0), first=True, last=False)
        plan = replace(target.plan, load_format="dummy") if self._gathers_vocabulary else target.plan
        return load_model(target.facts, plan, self.kernels, self._alone, no_layers, self._alone.rank_info)

    @property
    def _gathers_vocabulary(self) -> bool:
        """Whether a draft head's copy of the embedding and LM head comes from the ranks, not from a checkpoint."""
        return self._setup.models[TARGET].plan.load_format in ("sharded_state", "remote_instance")

    def _follow_vocabulary(
        self, weights: LoadedWeights | None, model: Decoder, copy: Decoder | None, draft: Decoder | None
    ) -> None:
        """Update a draft head's copies of vocabulary weights on this rank whenever the model's weights change.

        The copies are `copy` (the whole embedding and LM head, if several ranks divide them) and the LM head of a token
        map. The weights come from all ranks of the first stage.
        """
        info, target = self.mesh.rank_info, self._setup.models[TARGET]
        rows = None
        if isinstance(draft, DraftHead) and draft.frequent is not None:
            rows = TokenRows(*draft.frequent, lm_head_tensor(model))
        if self._setup.head_layers is None or not info.is_first_stage or (info.stage_size == 1 and rows is None):
            return
        if weights is None:
            if self._gathers_vocabulary and info.stage_size > 1:
                raise ConfigurationError(
                    f"With --load-format {target.plan.load_format} and --tp-size, a draft head takes no model with "
                    "layers in host memory; use --load-format auto."
                )
            return
        staged = None
        if copy is not None:
            staged = StagedWeights(copy, target.facts, target.plan, fixed=True, scaled_cache=False)
        ranks, gather = self.mesh.axis("tp"), self._gathers_vocabulary and info.stage_size > 1
        of_head = ranks if info.head_by_group else self.mesh.axis("stage")
        weights.follow(WholeVocabulary(ranks, of_head, staged, rows), gather=gather)

    def _update_head(self, weights: LoadedWeights, head: DraftHead, draft: _LoadedModel, *, fixed: bool) -> None:
        """Update the draft head of NEXTN with the model's `weights`, if it is in the same checkpoint."""
        facts, source = draft.setup.facts, draft.source
        if facts.path == self._setup.models[TARGET].facts.path:
            source = replace(source, plan=replace(source.plan, config_overrides=nextn_overrides(facts)))
            own = LoadedWeights(head, source, self.kernels, self._alone, fixed=fixed, scaled_cache=False)
            weights.update_head(own)

    def _make_adapters(self, setup: WorkerSetup) -> Adapters | None:
        if not setup.lora.enabled:
            return None
        model, target = self._models[TARGET], setup.models[TARGET]
        dtype = getattr(torch, target.plan.dtype)
        return Adapters(
            model.decoder,
            setup.lora,
            target.facts,
            dtype,
            self.device,
            by_transformers=target.plan.by_transformers,
        )

    def _hand_over(self, name: str) -> tuple[_LoadedModel, KVPool, CacheSetup]:
        """Return a model, its pool and the cache sizes, and drop this worker's references to them.

        The caller then decides when their memory is freed.
        """
        if name not in self._models:
            raise RuntimeError(f"The {name} of this rank was handed over already, or never loaded.")
        model, cache = self._models[name], self._cache
        if model.pool is None or cache is None:
            raise RuntimeError("This rank has not joined the others yet.")
        del self._models[name]
        return model, model.pool, cache

    def _loaded_weights(
        self, loaded: _LoadedModel, cache: CacheSetup, name: str, *, fixed: bool
    ) -> LoadedWeights | None:
        """Return the object that replaces the model's weights, or None if some of them are in host memory.

        `fixed` says whether the weights must keep their addresses, because graphs contain them.
        """
        if loaded.ring is not None:
            return None
        return LoadedWeights(
            loaded.decoder,
            loaded.source,
            self.kernels,
            self.mesh,
            fixed=fixed,
            scaled_cache=getattr(torch, cache.kv_dtype).itemsize == 1,
            experts=self._sharing_of(name),
        )

    def _specs_of(self, name: str) -> Specs:
        return {index: spec for (model, index), spec in self.cache_specs.items() if model == name}

    def _make_pool(self, name: str, cache: CacheSetup) -> KVPool:
        """Allocate the KV pool of a model. Draft models ignore the cache kinds of the served model."""
        own = {spec.kind for spec in self._specs_of(name).values()}
        return KVPool(
            local_specs(self._specs_of(name), self._info_of(name, self.mesh.rank_info), self._num_layers[name]),
            cache.num_pages,
            cache.page_size,
            getattr(torch, cache.kv_dtype),
            self.device,
            kinds={kind: count for kind, count in cache.kinds.items() if kind in own or name == TARGET},
            num_host_pages=cache.num_host_pages,
            in_blocks=cache.host_blocks,
        )

    def _copy_pages(self, cache: CacheSetup) -> CopyPages:
        return native_kv.copy_pages if cache.direct_copies else self.kernels.copy_pages

    def restore_s(self) -> float | None:
        """Measure the time in seconds to copy one page of all layers from the host to the device.

        Must be called after `join`. Returns None if there are no host pages.
        """
        pools = [model.pool for model in self._models.values() if model.pool is not None]
        cache = self._cache
        if cache is None or not cache.num_host_pages:
            return None
        count = min(MEASURED_PAGES, cache.num_pages, cache.num_host_pages)
        device = open_device(self.device)
        copier = PageCopier(pools, self._copy_pages(cache), device, Staging(device))
        pages = np.arange(count, dtype=np.int32)
        copies = [PageCopy("host", "device", pages, pages)]
        best = math.inf
        for _ in range(2):  # twice, because the system allocates the memory at the first copy
            began = time.monotonic()
            with device.forward():
                copier.enqueue(copies)
            device.record().wait()
            best = min(best, time.monotonic() - began)
        return best / count

    def _make_sampler(
        self,
        facts: ModelFacts,
        num_sequences: int,
        device: Device,
        relaxed: RelaxedAcceptance | None = None,
    ) -> Sampler:
        return Sampler(
            facts.vocab_size,
            num_sequences,
            device,
            choose=self.kernels.choose,
            penalize=self.kernels.penalize,
            score=self.kernels.score,
            raw_logprobs=self._raw_logprobs,
            relaxed=relaxed,
        )

    def _make_cpu_graph(
        self, setup: ModelSetup, model: Decoder, pool: KVPool, cache: CacheSetup, step_prompt_tokens: int
    ) -> CpuGraph | None:
        """Capture the CPU graph of a model. Return None if a kernel cannot be captured."""
        if self.kernels.launcher is None or (self.mesh.rank_info.world_size > 1 and not setup.whole):
            return None
        max_drafts = self._max_step_drafts(cache)
        capacity = step_prompt_tokens + cache.num_sequences + max_drafts
        try:
            return CpuGraph(
                model,
                pool,
                self.kernels,
                capacity,
                cache.num_sequences,
                context_length=setup.plan.context_length,
                max_samples=cache.num_sequences + max_drafts,
            )
        except NotCapturable as reason:
            logger.info("Steps are computed operation by operation: %s.", reason)
            return None

    def _max_step_drafts(self, cache: CacheSetup) -> int:
        """Return the maximum number of draft tokens in a step."""
        return min(self._setup.max_drafts * cache.num_sequences, self._setup.max_step_drafts)

    def _make_draft_model(self, setup: DrafterSetup, device: Device, target: Decoder) -> HostDrafter | DeviceDrafter:
        """Return the model or head that proposes tokens. A head is connected to `target` before graphs are captured.

        Raises `ConfigurationError` if the model has caches other than pages.
        """
        loaded, pool, cache = self._hand_over(DRAFT)
        if len(pool.paged) < len(pool):
            raise ConfigurationError(
                f"--speculative-draft-model-path: {loaded.setup.facts.architecture} has sliding-window or recurrent "
                "layers, which a draft model must not have; choose another model."
            )
        decoder, num_sequences, most = loaded.decoder, cache.num_sequences, setup.max_drafts
        if isinstance(decoder, DraftHead):
            self._connect(decoder, target)
            self._limit_vocabulary(decoder, target if self._vocabulary is None else self._vocabulary, setup.token_map)
            self._vocabulary = None
        sampler = self._make_sampler(loaded.setup.facts, num_sequences, device)
        if not device.is_host:
            is_head = isinstance(decoder, DraftHead)
            forward = self._make_forward(
                loaded.setup, decoder, pool, device, cache, chooses=False, keeps_states=is_head, compiles=False
            )
            return DeviceDrafter(decoder, pool, device, sampler, num_sequences, most, forward, setup.topk)
        graph = self._make_cpu_graph(loaded.setup, decoder, pool, cache, setup.step_prompt_tokens)
        return HostDrafter(decoder, pool, device, sampler, num_sequences, most, graph, setup.topk)

    def _connect(self, head: DraftHead, target: Decoder) -> None:
        """Give a draft head the target's embedding and LM head, and make the target keep the states that it reads."""
        head.share(target if self._vocabulary is None else self._vocabulary)
        if head.taps:
            target.tap(head.taps, self.kernels.join)

    def _limit_vocabulary(self, head: DraftHead, vocabulary: Decoder, token_map: str | None) -> None:
        """If there is a token map, give the draft head an LM head that has only the rows of the map's tokens."""
        if token_map is not None:
            target = self._setup.models[TARGET]
            ids = read_token_map(token_map, head.vocab_size)
            small = head_of_tokens(vocabulary, target.facts, target.plan, self.kernels, ids)
            head.propose_only(ids.to(self.device), small)

    def _warms_up(self, device: Device) -> bool:
        """Return whether all kernels are compiled before the first request."""
        return not device.is_host and compiles_at_first_use(self.kernels)

    def _make_forward(
        self,
        setup: ModelSetup,
        model: Decoder,
        pool: KVPool,
        device: Device,
        cache: CacheSetup,
        *,
        chooses: bool = True,
        keeps_states: bool = False,
        compiles: bool = True,
    ) -> Forward:
        """Return the forward pass of the model, with CUDA graphs if they can be captured.

        Graphs sample tokens if `chooses` is true. With `keeps_states`, they keep the states that a draft head reads
        (or, if the model is a draft head, its own states). The forward pass is compiled if `compiles` is true and the
        plan says so.

        With several ranks, all graphs are captured during this call. Their captures contain collectives, so all ranks
        must capture the same sizes in the same order, without steps in between.
        """
        graphs, info = self._graphs, self.mesh.rank_info
        forward: Forward = model
        if self._warms_up(device):
            warm_up(
                model,
                pool,
                device,
                self._alone.rank_info if setup.whole else info,
                max_tokens=max(1, self._setup.step_tokens),
                max_sampled=cache.num_sequences + self._max_step_drafts(cache),
                context_length=setup.plan.context_length,
                is_embedding=setup.plan.is_embedding,
            )
        if self._two_batches is not None:
            return TwoBatchForward(model, self.mesh, device, self._two_batches)
        if graphs.compile_max_rows and compiles:
            forward = CompiledForward(model, pool, graphs.compile_max_rows)
            forward.compile(device)
        if not graphs.sizes:
            if not device.is_host:
                logger.info("No CUDA graphs are captured: %s.", graphs.reasons.get("sizes", ""))
            return forward
        reads, prompts = batch_reads(model), None
        states = _states_of(model) if keeps_states else None
        if graphs.prompt_sizes:
            prompts = PromptGraphs(model, pool, device, prompts_of(graphs), reads=reads, states=states)
        else:
            logger.info("No CUDA graphs of prompts are captured: %s.", graphs.reasons.get("prompt_sizes", ""))
        captured = CudaGraphRunner(
            forward,
            pool,
            device,
            within(graphs, cache.num_sequences + self._max_step_drafts(cache)),
            max_pages=min(pool.num_pages, -(-setup.plan.context_length // pool.page_size)),
            reads=reads,
            prompts=prompts,
            # With several ranks, graphs end at the hidden states, because only rank 0 samples.
            choice=Choice(
                model.logits,
                self.kernels.choose,
                greedy_only=not self._sampling_backend.captured,
                limits=self._sampling_backend.limits,
            )
            if info.world_size == 1 and chooses
            else None,
            states=states,
            takes_branches=self._setup.takes_branches and chooses,
            takes_drafts=self._setup.max_drafts > 0,
            collect_garbage=graphs.collect_garbage,
            profile=graphs.profile,
        )
        if info.world_size == 1:
            return captured
        option, num_decode, num_graphs = "--disable-cuda-graph", captured.num_waiting, captured.request_all()
        try:
            with progress_bar(num_graphs if info.rank == 0 else None, "Capturing CUDA graphs", unit="graph") as bar:
                for number, _ in enumerate(captured.capture_requested(), 1):
                    if number == num_decode:  # graphs of prompts follow
                        option = "--disable-piecewise-cuda-graph"
                    if bar is not None:
                        bar.update()
        except Exception as error:  # drivers and kernels raise many types of errors
            raise EngineFailure(
                f"Rank {info.rank} could not capture its CUDA graphs: {error}. Disable them with {option}."
            ) from error
        return captured


def _own_head(draft: _LoadedModel | None) -> DraftHead | None:
    """Return the draft head without the layers of its target, or None if there is no draft head."""
    return draft.decoder.without_target() if draft is not None and isinstance(draft.decoder, DraftHead) else None


def _states_of(model: Decoder) -> Callable[[Tensor], Tensor]:
    """Return the function that maps hidden states to the states for a draft head (or to a draft head's own states)."""
    if isinstance(model, DraftHead):
        return lambda hidden: model.states
    return lambda hidden: states_for_draft_head(hidden, model.tapped, len(hidden))


def _forward_with_states(model: Decoder, head: DraftHead) -> Forward:
    """Return the forward pass of a draft head or its target, with the states that the head reads, to measure memory."""
    states_of = _states_of(model)

    def forward(batch: ForwardBatch) -> Tensor:
        if model is head:
            states = torch.zeros(
                batch.num_tokens, head.target_state_size, dtype=head.dtype, device=batch.token_ids.device
            )
            return model(replace(batch, states=states))
        hidden = model(batch)
        head.project(states_of(hidden))
        return hidden

    return forward


def _relaxed(plan: Plan) -> RelaxedAcceptance | None:
    """Return the thresholds for accepting draft tokens of sampled rows, or None if only sampled tokens are accepted."""
    thresholds = RelaxedAcceptance(plan.draft.accept_single, plan.draft.accept_divisor)
    return thresholds if min(thresholds) < 1 else None


def _dump(plan: Plan, model: Decoder) -> TensorDump | None:
    kernels = plan.kernels
    return None if kernels.dump_folder is None else TensorDump(kernels.dump_folder, kernels.dump_layers, model)


def _select(plan: KernelPlan, lifeline: Lifeline | None, *, fall_back: bool) -> tuple[Kernels, bool]:
    """Return the chosen kernels, or the fallback if `fall_back` is set or the C++ kernels cannot be compiled.

    The second value says whether the C++ kernels cannot be compiled.
    """
    if fall_back:
        return select(plan.fallback, plan.settings), False
    cpp = {**plan.settings.get("with_cpp", {}), "lifeline": lifeline}
    try:
        return select(plan.choices, {**plan.settings, "with_cpp": cpp}), False
    except BuildError as error:
        if plan.fallback is None:
            raise
        logger.warning("The kernels in C++ cannot be used; slower kernels of torch are used instead: %s", error)
        return select(plan.fallback, plan.settings), True
