"""Runs batches where a model is spread over ranks: what rank 0 launches, every rank computes."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from runtime.batch import Batch, PromptLogprobs, Sampling, StepOutput
from runtime.distributed.link import Frame, encode
from runtime.distributed.worker_group import WorkerGroup
from runtime.errors import WorkerFailed
from runtime.profile import ProfileOptions
from runtime.request import LogprobParams

if TYPE_CHECKING:
    from runtime.distributed.mesh import Mesh
    from runtime.worker.model_runner import ModelRunner

FIND_FAILED_RANK_S = 1.0  # to learn which rank is gone, when a step failed
FINISH_S = 5.0  # for steps in flight, when the engine ends

_NO_LOGPROBS = LogprobParams()
_NO_FLOATS = np.zeros(0, np.float32)
_NO_FLAGS = np.zeros(0, np.bool_)


class GroupRunner:
    """Leads a worker group. Any failed step is the end of the whole group, since the other ranks wait in the middle
    of it: its future raises `WorkerFailed` naming the rank. Owns the group and the runner of rank 0.
    """

    def __init__(self, runner: ModelRunner, group: WorkerGroup, mesh: Mesh) -> None:
        self.mesh = mesh
        self.seconds_sending = 0.0  # what the last batch took
        self._runner = runner
        self._group = group
        self._loop = asyncio.get_running_loop()
        info = mesh.rank_info
        # Of a pipeline, those of the first stage: they have to know when a step ends.
        self._end_with_us = group.workers[: info.tp_size - 1] if info.pp_size > 1 else []

    @property
    def kernels_description(self) -> str:
        """Of rank 0."""
        return self._runner.kernels_description

    def launch(self, batch: Batch) -> asyncio.Future[StepOutput]:
        """Enqueue the batch on every rank; returns at once. Shield the future."""
        began = time.perf_counter()
        self._group.send_frame(encode_batch(batch))
        self.seconds_sending = time.perf_counter() - began
        step: asyncio.Future[StepOutput] = self._loop.create_future()
        step.add_done_callback(_retrieve)
        self._runner.launch(batch).add_done_callback(partial(self._settle, step))
        return step

    def finish_oldest(self) -> None:
        """In a pipeline: enqueue the end of the oldest step on every rank of the first stage."""
        if self._end_with_us:
            frame = encode({"end": True})
            for worker in self._end_with_us:
                worker.send(frame)
        self._runner.finish_oldest()

    async def start_profile(self, options: ProfileOptions) -> None:
        """Of rank 0."""
        await self._runner.start_profile(options)

    async def stop_profile(self) -> Path | None:
        """Of rank 0."""
        return await self._runner.stop_profile()

    async def watch(self) -> None:
        """Never returns; raises `WorkerFailed` when a worker failed or is gone."""
        try:
            await self._group.watch()
        except WorkerFailed:
            self.mesh.abort()  # our own thread may wait for the worker
            raise

    def close(self) -> None:
        """Finish what was launched, as far as that is possible, and end the workers. Blocks."""
        too_late = threading.Timer(FINISH_S, self._kill)
        too_late.daemon = True
        too_late.start()
        self._runner.close()
        too_late.cancel()
        too_late.join()
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._group.close_links)
        self._group.reap()
        self.mesh.close()

    def _kill(self) -> None:
        self._group.kill()
        self.mesh.abort()

    def _settle(self, step: asyncio.Future[StepOutput], own: asyncio.Future[StepOutput]) -> None:
        """Rank 0's part of a step is over. If it failed, find the failed rank, of which `watch` learns."""
        if step.done():
            return
        error = own.exception()
        if error is None:
            step.set_result(own.result())
            return

        def fail(failure: WorkerFailed) -> None:
            if not step.done():
                step.set_exception(failure)

        ours = WorkerFailed("Rank 0 (this process) failed in a step.")
        ours.__cause__ = error
        self._group.failure.add_done_callback(lambda known: fail(known.result()))
        self._loop.call_later(FIND_FAILED_RANK_S, fail, ours)


def encode_batch(batch: Batch) -> bytes:
    """What the other ranks need of a batch: everything but how tokens are chosen, and by whom."""
    wanted = batch.prompt_logprobs
    arrays = {
        "starts": batch.starts,
        "counts": batch.counts,
        "sequence_indices": batch.sequence_indices,
        "token_ids": batch.token_ids,
        "page_table": batch.page_table,
    }
    arrays |= {f"row.{name}": values for name, values in batch.row_values.items()}
    for kind, own in batch.kinds.items():
        arrays |= {f"{kind}.{name}": array for name, array in own.items()}
    if batch.sampling is not None:
        arrays["rows"] = batch.sampling.rows
    if batch.embedding_rows is not None:
        arrays["embedding_rows"] = batch.embedding_rows
    if wanted:
        arrays["wanted"] = np.array([(w.row, w.offset, len(w.targets)) for w in wanted], np.int32)
    kinds = {kind: [*own] for kind, own in batch.kinds.items()}
    return encode({"batch": batch.number, "kinds": kinds, "row_values": [*batch.row_values]}, arrays)


def decode_batch(frame: Frame) -> Batch:
    """The batch as a worker needs it: no sequences, of `sampling` the rows alone, targets that are zeros."""
    arrays = frame.arrays
    rows = arrays.get("rows")
    return Batch(
        number=frame.body["batch"],
        sequences=(),
        starts=arrays["starts"],
        counts=arrays["counts"],
        sequence_indices=arrays["sequence_indices"],
        token_ids=arrays["token_ids"],
        page_table=arrays["page_table"],
        sampling=None if rows is None else Sampling(rows, greedy=_NO_FLAGS, uniform=_NO_FLOATS),
        prompt_logprobs=tuple(
            PromptLogprobs(row, offset, np.zeros(count, np.int32), _NO_LOGPROBS)
            for row, offset, count in arrays["wanted"].tolist()
        )
        if "wanted" in arrays
        else (),
        embedding_rows=arrays.get("embedding_rows"),
        row_values={name: arrays[f"row.{name}"] for name in frame.body["row_values"]},
        kinds={
            kind: {name: arrays[f"{kind}.{name}"] for name in names}
            for kind, names in frame.body["kinds"].items()
        },
    )


def _retrieve(step: asyncio.Future[StepOutput]) -> None:
    """Mark an exception as seen: whoever waited may be gone."""
    if not step.cancelled():
        step.exception()
