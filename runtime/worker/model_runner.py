"""Runs batches on one rank. Each batch is enqueued on the device thread, and a future gets its result."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import anyio
import numpy as np
import torch
from torch import Tensor

from ops.kv import native as native_kv
from ops.sampling import NO_LIMIT
from ops.sampling.native import to_device
from runtime.batch import SECOND_START, Batch, StepOutput
from runtime.errors import OutOfMemory
from runtime.kv_cache.pools import KVPool
from runtime.layers.batch_reads import batch_reads
from runtime.layers.lm_head import NOT_ADAPTED
from runtime.loading.weight_update import LoadedWeights
from runtime.mesh.axis import Axis
from runtime.mesh.mesh import Mesh
from runtime.mesh.rank_info import RankInfo
from runtime.modeling.decoder import Decoder, states_for_draft_head
from runtime.speculative.model_drafts import DRAFT
from runtime.worker.adapters import Adapters
from runtime.worker.branches import copies_in_kinds, copies_of_first_pages, is_trunk, trunks, with_branch_ids
from runtime.worker.cpu_graph import CpuGraph
from runtime.worker.cuda_graph import CudaGraphRunner
from runtime.worker.device import Device, DeviceThread, Read, retrieve
from runtime.worker.device_drafter import DeviceDrafter, with_token_ids
from runtime.worker.drafts import Verified, accept_limits, verify, with_exact_starts, with_proposals
from runtime.worker.expert_moves import RankExperts
from runtime.worker.graph_capture import BackgroundCapture
from runtime.worker.host_drafter import HostDrafter
from runtime.worker.logprobs import CHUNK, prompt_indices
from runtime.worker.non_finite import NonFiniteSearch
from runtime.worker.page_copies import CopyPages, PageCopier
from runtime.worker.page_io import PageIO
from runtime.worker.rank_state import RankState
from runtime.worker.sampler import Sampled, Sampler, chooses_greedily, chooses_plainly, sampling_arrays
from runtime.worker.step_inputs import NO_ARRAYS, Forward, SampleInputs, Staging, StepInputs, prepare, samples_on_host
from runtime.worker.step_outputs import copy_out
from runtime.worker.step_timer import StepTimer
from runtime.worker.tensor_dump import TensorDump
from runtime.worker.verbs import HOST_VERBS, run_verb

logger = logging.getLogger("penstock.core")


class CommonSteps(Protocol):
    """Rank 0's part of common steps (data-parallel attention). A step computes one batch of each attention group."""

    def run(self, batches: Sequence[Batch | None]) -> Read[list[StepOutput | None]]:
        """Enqueue a step with one batch of each group."""
        ...


class ModelRunner:
    """Runs the steps of rank 0 on a device thread. Must be used on the event loop on which it was created.

    `launch` may be called while earlier steps run. The last sampled token of each sequence stays on the device, so a
    batch may contain a token whose id the host does not know yet. All other ranks must compute their part of every
    batch in the same order.
    """

    def __init__(
        self, executor: StepExecutor, *, kernels_description: str = "", common: CommonSteps | None = None
    ) -> None:
        self.kernels_description = kernels_description
        self._common = common
        self._executor = executor
        self._device = executor.device
        loop, device = asyncio.get_running_loop(), executor.device
        self._thread = DeviceThread(loop, separate_reads=not device.is_host, device=device.torch_device)
        self._pipelined = executor.pipelined
        # With pipeline parallelism: steps that have begun but not ended.
        self._unfinished: deque[asyncio.Future[StepOutput]] = deque()
        self._capture = None
        graphs = executor.graph_runners
        if graphs:
            self._capture = BackgroundCapture(
                self._thread,
                partial(_capture_next, graphs),
                lambda: any(each.is_waiting() for each in graphs),
                num_missed=lambda: sum(each.num_missed() for each in graphs),
            )

    def launch(self, batch: Batch) -> asyncio.Future[StepOutput]:
        """Enqueue the batch and return a future immediately.

        Shield the future: if it is cancelled, the step still runs. The future raises the exception of the forward pass.
        This is `OutOfMemory` if the device has too little memory for the step.
        """
        if self._pipelined:
            return self._begin(batch)
        step = self._thread.submit(lambda: self._executor.run(batch))
        if self._capture is not None:
            self._capture.note_step(step)
        return step

    def launch_together(self, batches: Sequence[Batch | None]) -> asyncio.Future[list[StepOutput | None]]:
        """Enqueue a common step with one batch of each attention group; the batch of an idle group is None."""
        common = self._common
        if common is None:
            raise RuntimeError("This model has no attention groups.")
        return self._thread.submit(lambda: common.run(batches))

    def finish_oldest(self) -> None:
        """With pipeline parallelism, enqueue the end of the oldest step, which waits for the other stages.

        One thread begins and ends all steps. Further batches can begin before this call, so that the stages overlap.
        Without pipeline parallelism, this method does nothing.
        """
        if self._unfinished:
            self._thread.submit(self._executor.end, self._unfinished.popleft())

    @property
    def pool(self) -> KVPool:
        """The executor's KV cache."""
        return self._executor.pool

    def replace_executor(self, executor: StepExecutor, kernels_description: str) -> asyncio.Future[bool]:
        """Make another executor with the same weights and KV pool run all further steps.

        No step may be in flight. The caller should empty the KV cache, because the old executor has filled it. If the
        weights have changed since they were loaded, the result is False and the old executor stays.
        """

        def replace() -> Read[bool]:
            old = self._executor
            if not old.rank.has_initial_weights:
                executor.close()
                return lambda: False
            executor.rank.profiler = old.rank.profiler
            executor.rank.groups, old.rank.groups = old.rank.groups, {}
            self._executor, self.kernels_description = executor, kernels_description
            old.close()
            return lambda: True

        return self._thread.submit(replace)

    async def watch(self) -> None:
        """Wait forever. A runner without worker processes reports failures only through its steps."""
        await anyio.sleep_forever()

    def close(self) -> None:
        """Finish launched steps, and release the weights and the cache. Blocks."""
        if self._capture is not None:
            self._capture.close()
        self._thread.close()
        self._executor.close()
        del self._executor

    @property
    def capturing(self) -> bool:
        """Whether graphs remain to be captured; steps will become faster when they are."""
        return self._capture is not None and self._capture.is_pending

    def time_steps(self) -> StepTimer:
        """Start to measure the times of all further steps. A second call starts a new timer."""
        timer = StepTimer(None if self._device.is_host else self._device.forward)
        self._thread.around = timer.around
        return timer

    @property
    def num_unfinished(self) -> int:
        """Number of steps that have begun but not ended (pipeline parallelism)."""
        return len(self._unfinished)

    def call(self, verb: str, payload: Mapping[str, Any]) -> asyncio.Future[list[Any]]:
        """Run a verb on the device thread (see `Runner.call`).

        With pipeline parallelism, the steps that have begun end first. Verbs that use only host memory may run at once.
        """
        pages = self._executor.rank.pages
        if verb in HOST_VERBS and pages is not None and pages.is_unordered:
            return asyncio.ensure_future(_at_once(self._executor.rank, verb, payload))
        while self._unfinished:
            self.finish_oldest()

        def run() -> Read[Any]:
            answer = run_verb(self._executor.rank, verb, payload)
            return lambda: answer

        answers = asyncio.ensure_future(_answers(self._thread.submit(run)))
        answers.add_done_callback(retrieve)
        return answers

    def _begin(self, batch: Batch) -> asyncio.Future[StepOutput]:
        step = self._thread.new_future()
        self._unfinished.append(step)
        self._thread.submit(lambda: self._executor.begin(batch)).add_done_callback(partial(_fail_with, step))
        return step


def _capture_next(runners: Sequence[CudaGraphRunner]) -> bool:
    """Capture one graph of the model that lacked graphs in most steps. Return whether more graphs remain."""
    waiting = [runner for runner in runners if runner.is_waiting()]
    if waiting:
        max(waiting, key=lambda runner: runner.num_missed()).capture_next()
    return any(runner.is_waiting() for runner in waiting)


async def _at_once(rank: RankState, verb: str, payload: Mapping[str, Any]) -> list[Any]:
    return await _answer_of(run_verb(rank, verb, payload))


async def _answers(done: asyncio.Future[Any]) -> list[Any]:
    return await _answer_of(await asyncio.shield(done))


async def _answer_of(answer: Any) -> list[Any]:
    """Return the answer of a verb as a list of one element.

    If the answer is a `concurrent.futures.Future`, wait for it. Steps continue meanwhile.
    """
    if isinstance(answer, Future):
        answer = await asyncio.shield(asyncio.wrap_future(answer))
    return [answer]


def _fail_with(step: asyncio.Future[StepOutput], begun: asyncio.Future[None]) -> None:
    error = begun.exception()
    if error is not None and not step.done():
        step.set_exception(error)


NOTHING = torch.empty(0)


class _Begun(NamedTuple):
    """A step that has begun but not ended."""

    batch: Batch
    samples: SampleInputs
    hidden: Tensor  # [T, E], or [N, E] from the CPU graph; with pipeline parallelism, set by `_received`
    requested: Tensor = NOTHING  # with pipeline parallelism: `StepInputs.requested`
    chosen: Sampled | None = None  # tokens that a graph sampled, or None
    vectors: Tensor | None = None  # embedding vectors that the CPU graph pooled, or None
    in_graph: bool = False  # whether the CPU graph computed the step
    proposed: Batch | None = None  # with pipeline parallelism: the draft model's batch
    experts: Tensor | None = None  # chosen experts of all tokens of `Batch.expert_rows`, int16 [n, L, k]
    inputs: StepInputs | None = None  # on a GPU: the inputs of the model, which a draft head needs
    states: Tensor | None = None  # with pipeline parallelism: the inputs of tapped layers, [T, 3E]


class StepExecutor:
    """Computes one rank's part of every step. Has the rank's shards of the model and of the KV cache.

    Must be called on the thread that enqueues. The functions that `run` and `end` return may be called on another
    thread.

    Rank 0 has the sampler, and calls `run` or, with pipeline parallelism, `begin` and later `end`. The other ranks of
    its stage call `begin` and `follow`. `follow` ends a step with rank 0's tokens, without sampling. Ranks of later
    stages call `relay`. All these methods raise `OutOfMemory` if the device has too little memory for the step; later
    steps may succeed.
    """

    def __init__(
        self,
        model: Decoder,
        pool: KVPool,
        forward: Forward,
        *,
        num_sequences: int,
        device: Device,
        sampler: Sampler | None = None,
        mesh: Mesh | None = None,
        cpu_graph: CpuGraph | None = None,
        cuda_graphs: CudaGraphRunner | None = None,
        nan_detection: bool = False,
        copy_pages: CopyPages = native_kv.copy_pages,
        weights: LoadedWeights | None = None,
        adapters: Adapters | None = None,
        draft_model: HostDrafter | None = None,
        device_drafter: DeviceDrafter | None = None,
        experts: RankExperts | None = None,
        head_layers: Sequence[int] | None = None,
        dump: TensorDump | None = None,
    ) -> None:
        """Create the executor of a rank.

        `forward` computes hidden states, and `cpu_graph` computes whole steps in one call; both are used only without
        pipeline parallelism. If `cuda_graphs` is not None, it is the same object as `forward`, and may also sample
        tokens. `draft_model` (on a CPU) or `device_drafter` (on a GPU) proposes tokens; its pool has the same pages as
        `pool`. `head_layers` is set if there is a draft head, and equal on all ranks: the layers whose inputs the head
        reads, or () if it reads the final hidden states. The last stage of a pipeline sends these for all tokens.
        """
        self.device = device
        rank = mesh.rank_info.rank if mesh is not None else 0
        self.rank = RankState(device, sampler is not None, rank, pool, weights, adapters, experts=experts)
        self.cuda_graphs = cuda_graphs
        self.mesh = mesh if mesh is not None and mesh.rank_info.world_size > 1 else None
        self.pipelined = mesh is not None and mesh.rank_info.pp_size > 1
        self.last_tokens = torch.zeros(num_sequences, dtype=torch.int64, device=device.torch_device)
        # By sequence index: how many tokens of the sequence were computed when its last step with draft tokens had
        # ended. Accepted draft tokens count. The next batch may be built before the host knows this number
        # (`unknown_starts`).
        self.lengths = torch.zeros(num_sequences, dtype=torch.int32, device=device.torch_device)
        self._model = model
        self._pool = pool
        self._forward = forward
        self._sampler = sampler
        self._cpu_graph = cpu_graph
        self._draft_model = draft_model
        self._drafter = device_drafter
        self._head_layers = tuple(head_layers) if head_layers is not None and self.pipelined else None
        self._dump = dump
        self._staging = Staging(device)
        pools = [pool, *(drafter.pool for drafter in (draft_model, device_drafter) if drafter is not None)]
        blocks = [each.host_blocks for each in pools if each.host_blocks is not None]
        if blocks:
            rank_info = RankInfo(rank=0, tp_size=1, pp_size=1) if mesh is None else mesh.rank_info
            self.rank.pages = PageIO(blocks, device, rank_info)
        self._copier = PageCopier(pools, copy_pages, device, self._staging)
        self.rank.copier = self._copier
        # Copies pages of the drafter's own pool, for branches.
        self._draft_copier = None
        if device_drafter is not None:
            self._draft_copier = PageCopier([device_drafter.pool], copy_pages, device, self._staging)
        self._begun: deque[_Begun] = deque()
        self._reads = batch_reads(model)
        self._verified: Verified | None = None  # the verified draft tokens of the last step
        self._search = NonFiniteSearch(model) if nan_detection and self.mesh is None else None

    @property
    def pool(self) -> KVPool:
        """The KV cache."""
        return self._pool

    @property
    def graph_runners(self) -> list[CudaGraphRunner]:
        """The CUDA graphs of the model and of the drafter."""
        drafting = self._drafter.graphs if self._drafter is not None else None
        return [graphs for graphs in (self.cuda_graphs, drafting) if graphs is not None]

    # --- rank 0 ---

    def run(self, batch: Batch) -> Read[StepOutput]:
        """Enqueue a whole step. Return a function that reads its output."""
        with self.profiled(batch), self.enqueueing():
            self._check(batch)
            self._move(batch)
            batch = self._with_starts(batch)
            batch, proposed = self._propose(batch)
            search, graph = self._search, self._cpu_graph
            before = self.last_tokens.clone() if search is not None else None
            if graph is not None and graph.takes(batch) and not self._by_operations(batch):
                begun = self._begin_in_cpu_graph(graph, batch)
            else:
                begun = self._begin(batch)
            read = self._end(begun)
            self._observe(begun, proposed)
            if search is None or before is None:
                return read
            output = read()
            if output.failed:
                inputs = self._prepare(batch, before)
                search.log_origin(inputs.forward)
            return lambda: output

    def _observe(self, begun: _Begun, proposed: Batch) -> None:
        """Give a draft head the hidden states of a step, and tell the draft model which branches were accepted."""
        batch, states = begun.batch, None
        if not batch.read_by_drafter:
            return
        if self._drafter is not None and begun.inputs is not None:
            states = self._states(begun, None) if self._drafter.reads_states else None
            self._drafter.observe(batch, begun.inputs, states, None if batch.drafts is None else self._verified)
            return
        if self._draft_model is not None and self._draft_model.reads_states:
            states = self._states(begun, self._cpu_graph)
            trunk = torch.from_numpy(np.flatnonzero(np.repeat(is_trunk(batch), batch.counts)))
            self._draft_model.observe(proposed, states if len(trunk) == len(states) else states[trunk])
        self._tell_taken(batch, states)

    def _tell_taken(self, batch: Batch, states: Tensor | None) -> None:
        """Tell the draft model which branches were accepted. `states` [T, ...] are the target's states."""
        drafts, taken = batch.drafts, None if self._verified is None else self._verified.taken
        if self._draft_model is None or taken is None or drafts is None or drafts.branches is None:
            return
        firsts, size = batch.counts.cumsum() - batch.counts, self._pool.page_size
        for number in taken[taken >= 0].tolist():
            row = int(drafts.branches.rows[number])
            index, position, first = int(batch.sequence_indices[row]), int(batch.starts[row]), int(firsts[row])
            own = slice(first, first + int(batch.counts[row]))
            of_branch = None if states is None else states[own]
            self._draft_model.take(index, position, batch.token_ids[own], of_branch, position // size * size)

    def _states(self, begun: _Begun, graph: CpuGraph | None) -> Tensor:
        """Return the states [T, 3E] or [T, E] of a step's tokens that a draft head reads."""
        count = len(begun.batch.token_ids)
        if begun.in_graph and graph is not None:
            return graph.states_of_all(count)
        graphs = None if self._by_operations(begun.batch) else self.cuda_graphs
        if graphs is not None and graphs.states is not None:
            return graphs.states[:count]
        if begun.states is not None:
            return begun.states
        return states_for_draft_head(begun.hidden, self._model.tapped, count)

    def end(self) -> Read[StepOutput]:
        """Enqueue the rest of the oldest step that `begin` started.

        The rest is sampling, prompt log-probabilities, pooling and the copy to the host.
        """
        with self.profiled(self._begun[0].batch), self.enqueueing():
            begun = self._received(self._begun.popleft())
            read = self._end(begun)
            if begun.proposed is not None:
                self._observe(begun, begun.proposed)
            return read

    # --- every rank of the first stage ---

    def begin(self, batch: Batch) -> Read[None]:
        """Enqueue the layers of this pipeline stage for a step."""
        with self.enqueueing():
            self._check(batch)
            self._move(batch)
            batch, proposed = self._propose(self._with_starts(batch))
            self._begun.append(self._begin(batch)._replace(proposed=proposed))
        return lambda: None

    # --- common steps of attention groups ---

    def propose(self, batch: Batch) -> tuple[Batch, Batch]:
        """Begin a batch of a common step: copy its pages, and propose draft tokens on the first rank of the group.

        Return the batch with exact starts and draft tokens, and the draft model's batch (see `with_proposals`).
        """
        self._check(batch)
        self._move(batch)
        return self._propose(self._with_starts(batch))

    def forward(self, batch: Batch, group_tokens: tuple[int, ...]) -> tuple[StepInputs, Tensor]:
        """Compute the hidden states [T, E] of a batch in a common step. `batch` is the first result of `propose`.

        Return the inputs and the states. On a GPU, this method also proposes the draft tokens; their ids stay there.
        """
        inputs = self._prepare(batch, self.last_tokens)
        if batch.number >= 0:  # not the batch of an idle group
            inputs = self._with_proposals(batch, inputs)
        hidden = self._forward(replace(inputs.forward, group_tokens=group_tokens))
        self._note_experts(batch, num_tokens=sum(group_tokens))
        return inputs, hidden

    def observe(
        self, batch: Batch, proposed: Batch, inputs: StepInputs, hidden: Tensor, verified: Verified | None
    ) -> None:
        """End a batch of a common step: give the group's drafter the states, and the verified draft tokens.

        `batch` and `proposed` are the results of `propose`, and `inputs` and `hidden` those of `forward`.
        """
        self._verified = verified
        self._observe(_Begun(batch, inputs.samples, hidden, inputs=inputs), proposed)

    def _propose(self, batch: Batch) -> tuple[Batch, Batch]:
        """Return the batch with the draft model's ids, and the draft model's batch (see `with_proposals`).

        The rank with the draft model proposes draft tokens, and sends them to the ranks that share its embedding.
        """
        if not self.device.is_host:  # on a GPU, `_with_proposals` adds the draft tokens
            return batch, batch
        is_drafted = batch.drafts is not None and DRAFT in batch.token_ids
        proposed = whole = batch
        if self._draft_model is not None and batch.read_by_drafter:
            proposed = self._draft_model.propose(trunks(batch), self.last_tokens)
            if proposed is not batch:
                whole = with_branch_ids(batch, proposed, self._draft_model.alternatives)
        if self.mesh is not None and is_drafted:
            ids = torch.from_numpy(np.ascontiguousarray(whole.token_ids)).clone()
            ids = self.mesh.axis("tp").broadcast(ids)
            whole = replace(whole, token_ids=ids.numpy())
        return (batch if whole is batch else with_proposals(batch, whole)), proposed if self._draft_model else whole

    # --- ranks other than 0 ---

    def follow(self) -> None:
        """Take part in the end of the oldest step that has begun, on a rank other than 0."""
        with self.enqueueing():
            begun = self._begun.popleft()
            if self.pipelined:
                begun = self._received(begun)
            batch, hidden = begun.batch, begun.hidden
            if batch.sampling is not None:
                sampled = hidden[begun.samples.index]
                self._model.logits(sampled, self._adapted(batch, begun.samples.index))
                self._keep(begun.samples, torch.empty(len(sampled), dtype=torch.int64, device=sampled.device))
            if batch.prompt_logprobs:
                indices = to_device(torch.from_numpy(prompt_indices(batch.prompt_logprobs)), hidden.device)
                for part in indices.split(CHUNK):
                    self._model.logits(hidden[part], self._adapted(batch, part))

    def relay(self, batch: Batch) -> None:
        """Compute the layers of a later pipeline stage, and send the result to the next stage.

        The last stage sends its result to the first one.
        """
        stages = self._stages
        with self.enqueueing():
            self._move(batch)
            inputs = self._prepare(batch, self.last_tokens)
            forward = replace(inputs.forward, adapted=self._adapted(batch))
            x, residual = self._model.blocks(stages.recv(self._empty_hidden(batch), stages.previous), None, forward)
            self._note_experts(batch)
            if stages.next:  # this is not the last stage
                stages.send(x if residual is None else x + residual, stages.next)
            elif self._head_layers == ():
                stages.send(self._model.finish(x, residual), stages.next)
            elif len(inputs.requested):
                stages.send(self._model.finish(x, residual)[inputs.requested], stages.next)
            if self._head_layers:
                self._send_tapped(stages.recv(self._empty_tapped(batch), stages.previous))

    def close(self) -> None:
        """Close the CPU graph, draft model, adapters and process groups. Called after the last step."""
        if self._cpu_graph is not None:
            self._cpu_graph.close()
        if self._draft_model is not None:
            self._draft_model.close()
        if self.rank.adapters is not None:
            self.rank.adapters.close()
        if self.rank.pages is not None:
            self.rank.pages.detach()
        for group in self.rank.groups.values():
            group.close()
        if self.rank.experts is not None and self.rank.experts.recorder is not None:
            self.rank.experts.recorder.close()

    # --- parts of a step ---

    def _move(self, batch: Batch) -> None:
        """Enqueue the batch's page copies, and place its adapters."""
        copies = [*batch.copies, *copies_in_kinds(batch, self._pool.page_size)]
        if copies:
            self._copier.enqueue(copies)
        for placement in batch.adapters:
            if self.rank.adapters is None:
                raise RuntimeError("This executor has no adapters.")
            self.rank.adapters.place(placement)

    def profiled(self, batch: Batch) -> AbstractContextManager[None]:
        """Return the profiler's context for a step, or an empty context if no profile is running."""
        profiler, graph = self.rank.profiler, self._cpu_graph
        is_running = profiler is not None and profiler.running
        if graph is not None:
            graph.profiled = is_running
        return profiler.step(batch) if profiler is not None and is_running else nullcontext()

    def _check(self, batch: Batch) -> None:
        """Raise ValueError if the batch has values that no layer of the model reads.

        `SECOND_START` is always allowed, because some models do not distinguish the two texts of a pair. With pipeline
        parallelism, positions on three axes are allowed too, because a later stage may read them.
        """
        reads = self._reads
        unread = [name for name in batch.row_values if name not in reads.row_values and name != SECOND_START]
        if batch.position_offsets is not None and not reads.position_axes and not self.pipelined:
            unread.append("positions of three axes")
        if batch.media and not reads.media_size:
            unread.append("vectors in place of ids")
        if unread:
            raise ValueError(f"No layer of this model reads {', '.join(unread)}.")

    def _by_operations(self, batch: Batch) -> bool:
        """Return whether an adapter of the batch has changes that captured graphs do not compute."""
        return self.rank.adapters is not None and self.rank.adapters.by_operations(batch)

    def _adapted(self, batch: Batch, positions: Tensor | slice | None = None) -> Mapping[int, Tensor]:
        """Return `ForwardBatch.adapted` for all tokens of a batch, or for the tokens at `positions` [n]."""
        if not self._by_operations(batch) or self.rank.adapters is None:
            return NOT_ADAPTED
        return self.rank.adapters.tokens_of_slots(batch, positions)

    def _prepare(self, batch: Batch, last_tokens: Tensor, more: Mapping[str, Any] = NO_ARRAYS) -> StepInputs:
        # A later pipeline stage has no embedding, but its layers may add the parts of media vectors after the
        # embedding.
        size = self._reads.media_size or self._model.hidden_size
        return prepare(
            batch, self._pool, self._staging, last_tokens, more, lengths=self.lengths, media_size=size
        )  # fmt: skip

    def _with_starts(self, batch: Batch) -> Batch:
        """On a CPU, where all earlier steps are done, return the batch with exact starts.

        On a GPU, return it unchanged.
        """
        return with_exact_starts(batch, self.lengths) if self.device.is_host else batch

    def _begin(self, batch: Batch) -> _Begun:
        more = self._sampler.arrays(batch) if self._sampler is not None else NO_ARRAYS
        inputs = self._with_proposals(batch, self._prepare(batch, self.last_tokens, more))
        forward, compute = inputs.forward, self._forward
        if self._by_operations(batch):
            forward, compute = replace(forward, adapted=self._adapted(batch)), self._model
        if not self.pipelined:
            chosen = self._chosen_by_graph(batch, inputs)
            hidden = compute(forward) if chosen is None else NOTHING
            experts = self._note_experts(batch)
            return _Begun(batch, inputs.samples, hidden, chosen=chosen, experts=experts, inputs=inputs)
        x, residual = self._model.blocks(self._model.embed(forward), None, forward)
        self._note_experts(batch)
        stages = self._stages
        stages.send(x if residual is None else x + residual, stages.next)
        if self._head_layers:
            self._send_tapped(self._empty_tapped(batch))
        return _Begun(batch, inputs.samples, NOTHING, inputs.requested, inputs=inputs)

    def _with_proposals(self, batch: Batch, inputs: StepInputs) -> StepInputs:
        """On a GPU, return the inputs with draft tokens. Only the device knows their ids.

        The rank with the drafter proposes draft tokens, and sends them to the ranks that share its embedding.
        """
        if self._drafter is not None and batch.read_by_drafter:
            inputs = self._drafter.propose(batch, inputs, self.lengths)
            copies = copies_of_first_pages(batch, self._pool.page_size)
            if copies and self._draft_copier is not None:
                self._draft_copier.enqueue(copies)
        if self.device.is_host or self.mesh is None or batch.drafts is None or DRAFT not in batch.token_ids:
            return inputs
        ids = self.mesh.axis("tp").broadcast(inputs.forward.token_ids)
        return inputs if self._drafter is not None else with_token_ids(inputs, ids)

    def _begin_in_cpu_graph(self, graph: CpuGraph, batch: Batch) -> _Begun:
        """Compute a step by one call of the CPU graph, which also samples if all rows are greedy."""
        sampling = batch.sampling
        is_plain = batch.embedding_rows is None and sampling is not None and chooses_greedily(sampling)
        is_chosen = is_plain and graph.chooses
        samples = samples_on_host(batch, are_stored=is_chosen)
        if is_chosen:
            chosen = Sampled(*graph.choose(batch, self.last_tokens))
            experts = self._note_experts(batch, graph)
            return _Begun(batch, samples, NOTHING, chosen=chosen, in_graph=True, experts=experts)
        hidden, vectors = graph.states(batch, self.last_tokens)
        experts = self._note_experts(batch, graph)
        return _Begun(batch, samples, hidden, vectors=vectors, in_graph=True, experts=experts)

    def _note_experts(
        self, batch: Batch, graph: CpuGraph | None = None, num_tokens: int | None = None
    ) -> Tensor | None:
        """Record which experts an enqueued step chose, if a recorder is on.

        `num_tokens` is the number of the step's tokens; in a common step, it includes all attention groups. None means
        the batch's tokens. Returns a copy of the experts chosen for the tokens of `batch.expert_rows`, int16 [n, L, k],
        or None if there are no such rows or no recorder.
        """
        experts = self.rank.experts
        if experts is None or experts.recorder is None:
            return None
        captured = None if graph is None else graph.chosen_experts
        experts.recorder.note(batch, len(batch.token_ids) if num_tokens is None else num_tokens, captured)
        if not batch.expert_rows:
            return None
        return experts.recorder.chosen(_tokens_of(batch, batch.expert_rows), len(batch.token_ids), captured)

    def _chosen_by_graph(self, batch: Batch, inputs: StepInputs) -> Sampled | None:
        """Compute and sample all rows of a step with a CUDA graph, or return None if no graph can."""
        graphs, sampling = self.cuda_graphs, batch.sampling
        if graphs is None or sampling is None or len(sampling.positions) < len(batch.token_ids):
            return None
        if self._by_operations(batch) or batch.hidden_rows or "relaxed_rows" in inputs.samples.more.host:
            return None
        if batch.prompt_logprobs or not chooses_plainly(sampling):
            return None
        arrays, greedy = sampling_arrays(inputs.samples.more.on_device), bool(sampling.greedy.all())
        limits = sampling.params.keys() & NO_LIMIT.keys()
        chosen = graphs.choose(inputs.forward, arrays, greedy=greedy, limits=limits)
        return None if chosen is None else Sampled(*chosen)

    def _end(self, begun: _Begun) -> Read[StepOutput]:
        """Sample tokens, score prompts, compute vectors, and start the copy to the host."""
        if self._sampler is None:
            raise RuntimeError("Only rank 0 samples tokens.")
        batch, samples, sampled, vectors = begun.batch, begun.samples, begun.chosen, begun.vectors
        hidden, prompts = begun.hidden, None
        if batch.sampling is not None and sampled is None:
            logits = self._model.logits(hidden[samples.index], self._adapted(batch, samples.index))
            self._write_dump(batch, logits)
            sampled = self._sampler.sample(logits, batch, samples.more)
        else:
            self._write_dump(batch, None)
        if sampled is not None:
            limits = accept_limits(batch, sampled.host_data.without_token)
            self._verified = self._keep(samples, sampled.ids, limits)
            if self._verified is not None:
                sampled = replace(sampled, verified=self._verified)
                self._sampler.count(sampled)
        if batch.prompt_logprobs:
            prompts = self._sampler.score_prompts(
                self._hidden_of_all(begun, hidden),
                lambda part, index: self._model.logits(part, self._adapted(batch, index)),
                batch.prompt_logprobs,
                samples.more,
            )
        if batch.embedding_rows is not None and vectors is None:
            vectors = self._model.pooler(hidden, batch.counts, batch.embedding_rows)
        states = self._hidden_of_rows(batch, self._hidden_of_all(begun, hidden)) if batch.hidden_rows else None
        return copy_out(self.device, batch, sampled, prompts, vectors, states, begun.experts)

    def _write_dump(self, batch: Batch, logits: Tensor | None) -> None:
        if self._dump is not None:
            self._dump.write(batch, logits)

    def _hidden_of_rows(self, batch: Batch, hidden: Tensor) -> Tensor:
        """Return the hidden states of all tokens of the rows in `batch.hidden_rows`, as a float32 copy [n, E].

        `hidden` [T, E] has the states of all tokens of the batch.
        """
        return hidden[to_device(_tokens_of(batch, batch.hidden_rows), hidden.device)].float()

    def _hidden_of_all(self, begun: _Begun, final: Tensor) -> Tensor:
        """Return the hidden states [T, E] of all tokens. The next step may overwrite them.

        After a step in the CPU graph, `final` has only the sampled positions.
        """
        graph = self._cpu_graph
        return graph.hidden_of_all(len(begun.batch.token_ids)) if begun.in_graph and graph is not None else final

    def _received(self, begun: _Begun) -> _Begun:
        """Return a step of a pipeline with the hidden states that its last stage sends.

        Only the requested positions have valid hidden states, unless a draft head reads the final hidden states.
        """
        hidden, states, stages = self._empty_hidden(begun.batch), None, self._stages
        if self._head_layers == ():
            stages.recv(hidden, stages.previous)
        elif len(begun.requested):
            sent = hidden.new_empty(len(begun.requested), hidden.shape[1])
            hidden[begun.requested] = stages.recv(sent, stages.previous)
        if self._head_layers:
            states = stages.recv(self._empty_tapped(begun.batch), stages.previous)
        return begun._replace(hidden=hidden, states=states)

    def _send_tapped(self, states: Tensor) -> None:
        """Write the inputs of this stage's tapped layers into `states` [T, 3E], and send it to the next stage."""
        parts = states.split(self._model.hidden_size, dim=1)
        for tapped, part in zip(self._model.tapped, parts, strict=True):
            if tapped is not None:
                part.copy_(tapped.values(len(states)))
        self._stages.send(states, self._stages.next)

    @property
    def _stages(self) -> Axis:
        """The stages of the pipeline."""
        if self.mesh is None:
            raise RuntimeError("This rank is not in a pipeline.")
        return self.mesh.axis("pp")

    def _keep(self, samples: SampleInputs, ids: Tensor, limits: np.ndarray | None = None) -> Verified | None:
        """Verify draft tokens, and store last tokens (see `SampleInputs.keep`). Every rank with the embedding calls it.

        Only rank 0 knows the `limits`. The other ranks do not need them: a row with a limit has a constraint, and the
        next row of such a sequence contains its last token and its exact start. With pipeline parallelism nothing is
        stored, because a sequence is in only one step at a time, so the next batch contains its last token.
        """
        if self.pipelined:
            return None if samples.drafts is None else verify(ids, samples.drafts, limits)
        if self.mesh is not None:
            ids = self.mesh.axis("tp").broadcast(ids)
        return samples.keep(ids, self.last_tokens, self.lengths, limits)

    def _empty_tapped(self, batch: Batch) -> Tensor:
        return self._empty_hidden(batch, len(self._head_layers or ()))

    def _empty_hidden(self, batch: Batch, count: int = 1) -> Tensor:
        shape = (len(batch.token_ids), count * self._model.hidden_size)
        return torch.zeros(shape, dtype=self._model.dtype, device=self.device.torch_device)

    @contextmanager
    def enqueueing(self) -> Iterator[None]:
        """Enqueue the work of the `with` block on the forward stream. Raises `OutOfMemory` if memory is short."""
        try:
            with torch.inference_mode(), self.device.forward():
                yield
        except (torch.OutOfMemoryError, MemoryError) as error:
            traceback.clear_frames(error.__traceback__)  # frees the tensors of the step, which the frames keep alive
            self.device.release_unused()
            raise OutOfMemory("The device ran out of memory in a step.") from error


def _tokens_of(batch: Batch, rows: Sequence[int]) -> Tensor:
    """Return the indices of all tokens of these rows in the batch, int64 [n]."""
    ends = batch.counts.cumsum()
    return torch.from_numpy(np.concatenate([np.arange(ends[row] - batch.counts[row], ends[row]) for row in rows]))
