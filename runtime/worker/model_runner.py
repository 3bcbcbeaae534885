"""Runs batches on one rank: each is enqueued on the device thread, and a future holds what came of it."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import anyio
import numpy as np
import torch
from torch import Tensor

from ops.sampling.native import to_device
from runtime.batch import Batch, StepOutput
from runtime.distributed.mesh import Mesh
from runtime.errors import InvalidRequest, OutOfMemory
from runtime.kv_cache.pools import KVPool
from runtime.models.decoder import Decoder
from runtime.profile import ProfileOptions
from runtime.worker.cpu_graph import NO_ROWS, CpuGraph
from runtime.worker.cuda_graph import CudaGraphRunner
from runtime.worker.device import Device, DeviceThread, Read
from runtime.worker.graph_capture import BackgroundCapture
from runtime.worker.logprobs import CHUNK, prompt_indices
from runtime.worker.non_finite import NonFiniteSearch
from runtime.worker.sampler import Sampled, Sampler, chooses_greedily, chooses_plainly, sampling_arrays
from runtime.worker.step_inputs import NO_ARRAYS, Forward, Staging, StepInputs, prepare
from runtime.worker.step_outputs import copy_out
from runtime.worker.step_profiler import StepProfiler
from runtime.worker.step_timer import StepTimer

logger = logging.getLogger("penstock.core")


class ModelRunner:
    """Runs the steps of rank 0 on a device thread. Belongs to the loop it was made on.

    `launch` may be called while earlier steps run: each sequence's last sampled token stays on the device, so a
    batch can name a token that nobody has seen yet. Where the model is spread over ranks, the others must do their
    part of every batch in the same order.
    """

    def __init__(self, executor: StepExecutor, *, kernels_description: str = "") -> None:
        self.kernels_description = kernels_description
        self._executor = executor
        self._device = executor.device
        loop = asyncio.get_running_loop()
        self._thread = DeviceThread(loop, separate_reads=not executor.device.is_host)
        self._pipelined = executor.pipelined
        self._unfinished: deque[asyncio.Future[StepOutput]] = deque()  # in a pipeline, steps that only began
        self._capture = None
        graphs = executor.cuda_graphs
        if graphs is not None:
            self._capture = BackgroundCapture(self._thread, graphs.capture_next, graphs.is_waiting)

    def launch(self, batch: Batch) -> asyncio.Future[StepOutput]:
        """Enqueue the batch; returns at once. Shield the future: a cancelled one does not cancel the step.

        It raises what the forward raised, `OutOfMemory` where the device had too little memory for this step.
        """
        if self._pipelined:
            return self._begin(batch)
        step = self._thread.submit(lambda: self._executor.run(batch))
        if self._capture is not None:
            self._capture.note_step(step)
        return step

    def finish_oldest(self) -> None:
        """In a pipeline: enqueue the end of the oldest step, which waits for the other stages.

        It runs on the thread that also begins steps, so until now the beginnings of further batches could go before
        it, and the stages overlap. Elsewhere a step is enqueued whole, and this does nothing.
        """
        if self._unfinished:
            self._thread.submit(self._executor.end, self._unfinished.popleft())

    async def watch(self) -> None:
        """Never returns: a runner without other processes fails step by step only."""
        await anyio.sleep_forever()

    def close(self) -> None:
        """Finish what was launched and let go of the weights and the cache. Blocks."""
        if self._capture is not None:
            self._capture.close()
        self._thread.close()
        self._executor.close()
        del self._executor

    @property
    def capturing(self) -> bool:
        """Whether graphs are still to be captured, with which later steps will be faster."""
        return self._capture is not None and self._capture.is_pending

    def time_steps(self) -> StepTimer:
        """Time every further step; a second call starts anew."""
        timer = StepTimer(None if self._device.is_host else self._device.forward)
        self._thread.around = timer.around
        return timer

    async def start_profile(self, options: ProfileOptions) -> None:
        """Profile the next steps of this rank. Raises `InvalidRequest` while that is being done."""
        await self._thread.submit(lambda: self._executor.start_profile(options))

    async def stop_profile(self) -> Path | None:
        """End the profile, or the last one that ended by itself -> where it was written; None: there is none."""
        written = await self._thread.submit(lambda: self._executor.stop_profile())
        return None if written is None else await asyncio.wrap_future(written)

    def _begin(self, batch: Batch) -> asyncio.Future[StepOutput]:
        step = self._thread.new_future()
        self._unfinished.append(step)
        self._thread.submit(lambda: self._executor.begin(batch)).add_done_callback(partial(_fail_with, step))
        return step


def _fail_with(step: asyncio.Future[StepOutput], begun: asyncio.Future[None]) -> None:
    error = begun.exception()
    if error is not None and not step.done():
        step.set_exception(error)


class _Begun(NamedTuple):
    """A step whose tokens are still to be chosen."""

    batch: Batch
    inputs: StepInputs
    hidden: Tensor | None  # None: later stages compute it, or a graph went on to tokens
    chosen: Sampled | None = None  # by that graph


class StepExecutor:
    """One rank's part of every step: its share of the model over its share of the cache.

    Belongs to the thread that enqueues; what `run` and `end` return may be called on another one.

    Rank 0 has the sampler: it calls `run` or, in a pipeline, `begin` and later `end`. The other ranks of its stage
    call `begin` and `follow`, which ends a step without choosing tokens, so that no two ranks can disagree. Ranks of
    later stages call `relay`. All of them raise `OutOfMemory` where the device has too little for the step; the next
    one may succeed.
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
    ) -> None:
        """`forward` computes the hidden states of a model that does not lie in stages, a `cpu_graph` whole steps in
        one call. `cuda_graphs`, which are `forward` then, may also choose tokens.
        """
        self.device = device
        self.cuda_graphs = cuda_graphs
        self.mesh = mesh if mesh is not None and mesh.rank_info.world_size > 1 else None
        self.pipelined = mesh is not None and mesh.rank_info.pp_size > 1
        self.last_tokens = torch.zeros(num_sequences, dtype=torch.int64, device=device.torch_device)
        self._model = model
        self._pool = pool
        self._forward = forward
        self._sampler = sampler
        self._cpu_graph = cpu_graph
        self._staging = Staging(device)
        self._begun: deque[_Begun] = deque()
        self._said: set[str] = set()  # what it was logged of that it is not captured
        self._profiler: StepProfiler | None = None
        self._search = NonFiniteSearch(model) if nan_detection and self.mesh is None else None

    # --- rank 0 ---

    def start_profile(self, options: ProfileOptions) -> Read[None]:
        """Take a profile of the next steps. Raises `InvalidRequest` while one is being taken."""
        if self._profiler is not None and self._profiler.running:
            raise InvalidRequest("A profile is being taken already; stop that one first.")
        self._profiler = StepProfiler(options, on_cuda=not self.device.is_host)
        self._profiler.start()
        return lambda: None

    def stop_profile(self) -> Read[Future[Path] | None]:
        """End the profile -> the path of its trace, once that is written; None where none was begun."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None and profiler.running:
            profiler.stop()
        return lambda: None if profiler is None else profiler.written

    def run(self, batch: Batch) -> Read[StepOutput]:
        """Enqueue a whole step."""
        with self._profiled(batch), self._enqueueing():
            if batch.row_values:
                self._say_once(batch.row_values)
            search, graph = self._search, self._cpu_graph
            before = self.last_tokens.clone() if search is not None else None
            if graph is not None and graph.takes(batch):
                read = self._run_cpu_graph(graph, batch)
            else:
                read = self._end(self._begin(batch))
            if search is None or before is None:
                return read
            output = read()
            if output.failed:
                search.log_origin(prepare(batch, self._pool, self._staging, before).forward)
            return lambda: output

    def _say_once(self, names: Iterable[str]) -> None:
        """Log that steps with these values of rows are not captured, and so are slower."""
        new = set(names) - self._said
        if new and (self._cpu_graph is not None or self.cuda_graphs is not None):
            logger.info("Steps with %s are computed operation by operation.", ", ".join(sorted(new)))
        self._said |= new

    def end(self) -> Read[StepOutput]:
        """Enqueue the end of the oldest step that only began."""
        with self._profiled(self._begun[0].batch), self._enqueueing():
            return self._end(self._begun.popleft())

    # --- every rank of the first stage ---

    def begin(self, batch: Batch) -> Read[None]:
        """Enqueue this stage's layers of a step."""
        with self._enqueueing():
            self._begun.append(self._begin(batch))
        return lambda: None

    # --- ranks that rank 0 leads ---

    def follow(self) -> None:
        """Take part in the end of the oldest step that only began."""
        with self._enqueueing():
            batch, inputs, *_ = begun = self._begun.popleft()
            hidden = self._final_hidden(begun)
            if batch.sampling is not None:
                self._model.logits(hidden[inputs.last_index])
                self._keep(inputs, torch.empty_like(inputs.sample_sequence_indices))
            if batch.prompt_logprobs:
                indices = self._to_device(prompt_indices(batch.prompt_logprobs))
                for part in indices.split(CHUNK):
                    self._model.logits(hidden[part])

    def relay(self, batch: Batch) -> None:
        """A later stage's step: through its layers, and on, or back what the first stage wants."""
        mesh = self.mesh
        if mesh is None:
            raise RuntimeError("There is no stage before this one.")
        with self._enqueueing():
            inputs = prepare(batch, self._pool, self._staging, self.last_tokens)
            x, residual = self._model.blocks(mesh.recv(self._empty_hidden(inputs)), None, inputs.forward)
            if not mesh.rank_info.is_last_stage:
                mesh.send(x if residual is None else x + residual)
                return
            indices = self._wanted(batch, inputs)
            if len(indices):
                mesh.send(self._model.finish(x, residual)[indices])

    def close(self) -> None:
        """Nothing is computed any more: end the threads of the CPU graph."""
        if self._cpu_graph is not None:
            self._cpu_graph.close()

    # --- the parts of a step ---

    def _profiled(self, batch: Batch) -> AbstractContextManager[None]:
        """Around a step, where a profile is being taken."""
        profiler, graph = self._profiler, self._cpu_graph
        is_taken = profiler is not None and profiler.running
        if graph is not None:
            graph.profiled = is_taken
        return profiler.step(batch) if profiler is not None and is_taken else nullcontext()

    def _begin(self, batch: Batch) -> _Begun:
        more = self._sampler.arrays(batch) if self._sampler is not None else NO_ARRAYS
        inputs = prepare(batch, self._pool, self._staging, self.last_tokens, more)
        forward = inputs.forward
        if self.mesh is None or not self.pipelined:
            chosen = self._chosen_by_graph(batch, inputs)
            return _Begun(batch, inputs, None if chosen is not None else self._forward(forward), chosen)
        x, residual = self._model.blocks(self._model.embed(forward), None, forward)
        self.mesh.send(x if residual is None else x + residual)
        return _Begun(batch, inputs, None)

    @property
    def _graphs_choose(self) -> bool:
        """Whether graphs may choose tokens by themselves: nobody wants to see the logits of every step."""
        return self._sampler is None or not self._sampler.must_see_logits

    def _chosen_by_graph(self, batch: Batch, inputs: StepInputs) -> Sampled | None:
        """The tokens of a step whose rows all sample, and want nothing that was not captured; None: it is another."""
        graphs, sampling = self.cuda_graphs, batch.sampling
        if graphs is None or sampling is None or len(sampling.rows) < len(batch.counts):
            return None
        if batch.prompt_logprobs or not chooses_plainly(sampling) or not self._graphs_choose:
            return None
        arrays, greedy = sampling_arrays(inputs.more.there), bool(sampling.greedy.all())
        found = graphs.choose(inputs.forward, arrays, greedy=greedy)
        return None if found is None else Sampled(*found)

    def _end(self, begun: _Begun) -> Read[StepOutput]:
        """Choose tokens, score what is to be scored, and bring it to the host."""
        if self._sampler is None:
            raise RuntimeError("Only rank 0 chooses tokens.")
        batch, inputs, _, chosen = begun
        if chosen is not None:
            self._keep(inputs, chosen.ids)
            return copy_out(self.device, batch, chosen)
        hidden = self._final_hidden(begun)
        sampled = prompts = vectors = None
        if batch.sampling is not None:
            logits = self._model.logits(hidden[inputs.last_index])
            sampled = self._sampler.sample(logits, batch, inputs.more)
            self._keep(inputs, sampled.ids)
        if batch.prompt_logprobs:
            prompts = self._sampler.score_prompts(
                hidden, self._model.logits, batch.prompt_logprobs, inputs.more
            )
        if batch.embedding_rows is not None:
            vectors = self._vectors(hidden, batch, batch.embedding_rows)
        return copy_out(self.device, batch, sampled, prompts, vectors)

    def _run_cpu_graph(self, graph: CpuGraph, batch: Batch) -> Read[StepOutput]:
        """Compute a step by one native call, and choose its tokens in the same one where that is simple."""
        last_tokens, sampling, vector_rows = self.last_tokens, batch.sampling, batch.embedding_rows
        if vector_rows is not None and sampling is None and self._model.pooler.pooling.needs_all:
            if graph.pools:
                return copy_out(self.device, batch, vectors=graph.vectors(batch, last_tokens, vector_rows))
            hidden = graph.hidden_of_all(batch, last_tokens)
            return copy_out(self.device, batch, vectors=self._vectors(hidden, batch, vector_rows))
        if vector_rows is None and sampling is None:
            graph.run(batch, last_tokens)
            return copy_out(self.device, batch)
        is_plain = vector_rows is None and sampling is not None and chooses_greedily(sampling)
        if is_plain and graph.chooses and self._graphs_choose:
            return copy_out(self.device, batch, Sampled(*graph.choose(batch, last_tokens)))
        rows = sampling.rows if sampling is not None else NO_ROWS
        num_samples = len(rows)
        if vector_rows is not None:
            rows = np.concatenate([rows, vector_rows])
        hidden = graph.hidden(batch, last_tokens, rows)
        sampled = None
        if sampling is not None and self._sampler is not None:
            sampled = self._sampler.sample(self._model.logits(hidden[:num_samples]), batch)
            last_tokens[torch.from_numpy(batch.sequence_indices[sampling.rows])] = sampled.ids
        vectors = self._model.pooler.finish(hidden[num_samples:]) if vector_rows is not None else None
        return copy_out(self.device, batch, sampled, vectors=vectors)

    def _vectors(self, hidden: Tensor, batch: Batch, rows: np.ndarray) -> Tensor:
        """hidden [T, E] of the batch's tokens -> the vectors of these rows, float32 [M, D]."""
        counts = batch.counts.astype(np.int64)
        return self._model.pooler(hidden, np.cumsum(counts)[rows], counts[rows])

    def _final_hidden(self, begun: _Begun) -> Tensor:
        """[T, E], the final norm applied; from a pipeline, only where logits or vectors are wanted."""
        batch, inputs, hidden, _ = begun
        if hidden is not None:
            return hidden
        indices = self._wanted(batch, inputs)
        hidden = self._empty_hidden(inputs)
        if self.mesh is not None and len(indices):
            hidden[indices] = self.mesh.recv(hidden.new_empty(len(indices), hidden.shape[1]))
        return hidden

    def _keep(self, inputs: StepInputs, ids: Tensor) -> None:
        """Remember the sampled ids [R] as their sequences' last tokens, on every rank that embeds tokens.

        Not in a pipeline, whose batches hold no sequence that is in flight: all their tokens are known.
        """
        if self.pipelined:
            return
        if self.mesh is not None:
            ids = self.mesh.broadcast(ids)
        self.last_tokens[inputs.sample_sequence_indices] = ids

    def _wanted(self, batch: Batch, inputs: StepInputs) -> Tensor:
        """Indices into the flat batch whose final hidden states the first stage wants, int64."""
        wanted = [inputs.last_index, inputs.embedding_index]
        if batch.prompt_logprobs:
            wanted.append(self._to_device(prompt_indices(batch.prompt_logprobs)))
        return torch.cat(wanted)

    def _empty_hidden(self, inputs: StepInputs) -> Tensor:
        shape = (inputs.forward.num_tokens, self._model.hidden_size)
        return torch.zeros(shape, dtype=self._model.dtype, device=self.device.torch_device)

    def _to_device(self, indices: np.ndarray) -> Tensor:
        return to_device(torch.from_numpy(indices), self.device.torch_device)

    @contextmanager
    def _enqueueing(self) -> Iterator[None]:
        try:
            with torch.inference_mode(), self.device.forward():
                yield
        except (torch.OutOfMemoryError, MemoryError) as error:
            traceback.clear_frames(error.__traceback__)  # they hold what the step had computed so far
            self.device.release_unused()
            raise OutOfMemory("The device ran out of memory in a step.") from error
