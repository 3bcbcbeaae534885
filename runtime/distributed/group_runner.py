"""The distributed runner: all ranks compute the batches that rank 0 launches."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from runtime.batch import (
    AdapterPlacement,
    Batch,
    Branches,
    Drafts,
    Draws,
    Ints,
    MediaSpan,
    PageCopy,
    PromptLogprobs,
    Sampling,
    StepOutput,
    StepShare,
)
from runtime.distributed.link import Frame, encode
from runtime.distributed.verb_call import REFUSALS, VerbCall, encode_call, take_answer
from runtime.distributed.worker_group import WorkerGroup
from runtime.errors import EngineClosed, WorkerFailed
from runtime.request import LogprobParams
from runtime.sampling_params import ROW_ARRAYS
from runtime.speculative.model_drafts import DRAFT

if TYPE_CHECKING:
    from runtime.mesh.mesh import Mesh
    from runtime.worker.model_runner import ModelRunner

FIND_FAILED_RANK_S = 1.0  # time in seconds to find out which rank failed, after a failed step
FINISH_S = 5.0  # time in seconds for the steps in flight to finish, when the engine closes

# Names of the array fields of a batch. A field that is None is not sent.
_ARRAYS = (
    "starts",
    "counts",
    "sequence_indices",
    "token_ids",
    "page_table",
    "embedding_rows",
    "position_offsets",
    "mutual_spans",
)
NO_ARRAYS: Mapping[str, Ints] = MappingProxyType({})
_NO_LOGPROBS = LogprobParams()
_NO_FLOATS = np.zeros(0, np.float32)
_NO_FLAGS = np.zeros(0, np.bool_)


class GroupRunner:
    """Runs batches on a worker group. Owns the group and the runner of rank 0.

    A failed step ends the whole group, because the other ranks wait for the failed one in the middle of the step. The
    step's future then raises `WorkerFailed`, which names the failed rank.
    """

    def __init__(self, runner: ModelRunner, group: WorkerGroup, mesh: Mesh) -> None:
        self.mesh = mesh
        self.seconds_sending = 0.0  # seconds that sending the last batch took
        self._runner = runner
        self._group = group
        self._loop = asyncio.get_running_loop()
        # Number of a call -> the call; only calls that some ranks have not answered.
        self._calls: dict[int, VerbCall] = {}
        self._call_numbers = count(1)
        info = mesh.rank_info
        # The other ranks of the first pipeline stage, which rank 0 tells when a step ends. Empty without pipeline
        # parallelism.
        self._first_stage = group.workers[: info.stage_size - 1] if info.pp_size > 1 else []

    @property
    def kernels_description(self) -> str:
        """Description of rank 0's kernels."""
        return self._runner.kernels_description

    def launch(self, batch: Batch) -> asyncio.Future[StepOutput]:
        """Enqueue the batch on every rank, and return immediately.

        The caller must shield the future from cancellation.
        """
        began = time.perf_counter()
        self._group.send_frame(encode_batch(batch))
        self.seconds_sending = time.perf_counter() - began
        step: asyncio.Future[StepOutput] = self._loop.create_future()
        step.add_done_callback(_retrieve)
        self._runner.launch(batch).add_done_callback(partial(self._settle, step))
        return step

    def launch_together(self, batches: Sequence[Batch | None]) -> asyncio.Future[list[StepOutput | None]]:
        """Enqueue a common step with one batch per attention group; the batch of an idle group is None."""
        began = time.perf_counter()
        shares = [StepShare.of(batch) for batch in batches]
        frames = [encode_share(batch, shares) for batch in batches]
        for worker in self._group.workers:
            worker.send(frames[worker.rank // self.mesh.rank_info.tp_size])
        self.seconds_sending = time.perf_counter() - began
        step: asyncio.Future[list[StepOutput | None]] = self._loop.create_future()
        step.add_done_callback(_retrieve)
        self._runner.launch_together(batches).add_done_callback(partial(self._settle, step))
        return step

    def finish_oldest(self) -> None:
        """With pipeline parallelism, enqueue the end of the oldest unfinished step on every rank of the first stage."""
        if self._first_stage and self._runner.num_unfinished:
            frame = encode({"end": True})
            for worker in self._first_stage:
                worker.send(frame)
        self._runner.finish_oldest()

    def call(self, verb: str, payload: Mapping[str, Any], ranks: range | None = None) -> asyncio.Future[list[Any]]:
        """Run a verb on every rank, or only on `ranks` (see `Runner.call`).

        Answers are received only while `watch` runs.
        """
        while self._first_stage and self._runner.num_unfinished:
            self.finish_oldest()  # a verb must not run in the middle of a step
        number, future = next(self._call_numbers), self._loop.create_future()
        ranks, frame = ranks or range(1 + len(self._group.workers)), encode_call(number, verb, payload)
        for worker in self._group.workers:
            if worker.rank in ranks:
                worker.send(frame)
        future.add_done_callback(_retrieve)
        call = self._calls[number] = VerbCall(len(ranks), future, ranks.start)
        future.add_done_callback(lambda _: self._calls.pop(number, None))
        if 0 in ranks:
            self._runner.call(verb, payload).add_done_callback(partial(self._take_local_answer, call))
        return future

    async def watch(self) -> None:
        """Wait until a worker fails, and raise `WorkerFailed`. Never returns."""
        try:
            await self._group.watch(self._take_answer)
        except WorkerFailed as failure:
            self.mesh.abort()  # ends a wait of rank 0's thread for the failed worker
            self._fail_calls(failure)
            raise

    def close(self) -> None:
        """Finish launched steps if possible, and end the workers. Blocks."""
        timer = threading.Timer(FINISH_S, self._kill)
        timer.daemon = True
        timer.start()
        self._runner.close()
        timer.cancel()
        timer.join()
        with suppress(RuntimeError):  # raised if the event loop is closed
            self._loop.call_soon_threadsafe(self._group.close_links)
            self._loop.call_soon_threadsafe(self._fail_calls, EngineClosed("The engine is closed."))
        self._group.reap()
        self.mesh.close()

    def _kill(self) -> None:
        self._group.kill()
        self.mesh.abort()

    def _settle(self, step: asyncio.Future[Any], local: asyncio.Future[Any]) -> None:
        """Set a step's future when rank 0 has finished the step. If it failed, find the failed rank first."""
        if step.done():
            return
        error = local.exception()
        if error is None:
            step.set_result(local.result())
            return

        def fail(failure: WorkerFailed) -> None:
            if not step.done():
                step.set_exception(failure)

        self._find_failed_rank(error, "in a step", fail)

    def _take_local_answer(self, call: VerbCall, local: asyncio.Future[list[Any]]) -> None:
        error = local.exception()
        if error is None:
            [value] = local.result()
            call.answer(0, value)
        elif isinstance(error, REFUSALS):
            call.refuse(0, error)
        else:
            self._find_failed_rank(error, "between two steps", call.fail)

    def _find_failed_rank(self, error: BaseException, when: str, fail: Callable[[WorkerFailed], None]) -> None:
        """Call `fail` with the failure of the rank that failed first, or of rank 0 if none is found.

        `watch` raises this failure too.
        """
        rank_0 = WorkerFailed(f"Rank 0 (this process) failed {when}.")
        rank_0.__cause__ = error
        failure = self._group.failure
        failure.add_done_callback(lambda known: fail(known.result()))
        self._loop.call_later(FIND_FAILED_RANK_S, lambda: failure.done() or failure.set_result(rank_0))

    def _take_answer(self, rank: int, frame: Frame) -> None:
        call = self._calls.get(frame.body.get("call", 0))
        if call is not None:
            take_answer(call, rank, frame)

    def _fail_calls(self, error: Exception) -> None:
        for call in [*self._calls.values()]:
            call.fail(error)


def encode_share(batch: Batch | None, shares: Sequence[StepShare]) -> bytes:
    """Encode the batch of one attention group (or None), and the shares of all groups, for a common step."""
    counts = [[*share] for share in shares]
    if batch is None:
        return encode({"shares": counts})
    return encode_batch(batch, _draft_sampling(batch), shares=counts, read_by_drafter=batch.read_by_drafter)


def decode_share(frame: Frame) -> tuple[Batch | None, list[StepShare]]:
    """Decode the batch of one attention group (or None), and the shares of all groups."""
    shares = [StepShare(*share) for share in frame.body["shares"]]
    if "batch" not in frame.body:
        return None, shares
    batch = replace(decode_batch(frame), read_by_drafter=frame.body["read_by_drafter"])
    return _with_draft_sampling(batch, frame.arrays), shares


def _draft_sampling(batch: Batch) -> dict[str, NDArray[Any]]:
    """Return the arrays with which a group's drafter samples as the target does; {} if it proposes nothing.

    Values are reinterpreted as int32, bit for bit.
    """
    sampling = batch.sampling
    if sampling is None or batch.drafts is None or DRAFT not in batch.token_ids:
        return {}
    found: dict[str, NDArray[Any]] = {
        "draft.greedy": sampling.greedy.astype(np.int32),
        "draft.uniform": sampling.uniform,
    }
    found |= {f"draft.param.{name}": values for name, values in sampling.params.items()}
    if sampling.draws is not None:
        found |= {f"draft.{name}": values for name, values in sampling.draws._asdict().items()}
    return {name: np.ascontiguousarray(values).view(np.int32) for name, values in found.items()}


def _with_draft_sampling(batch: Batch, arrays: Mapping[str, Ints]) -> Batch:
    """Return a decoded batch with the arrays of `_draft_sampling`, if there are any."""
    if batch.sampling is None or "draft.greedy" not in arrays:
        return batch
    draws = None
    if "draft.seeds" in arrays:
        draws = Draws(arrays["draft.seeds"].view(np.uint64), arrays["draft.output_positions"].view(np.int64))
    prefix = "draft.param."
    sampling = replace(
        batch.sampling,
        greedy=arrays["draft.greedy"].astype(np.bool_),
        uniform=arrays["draft.uniform"].view(np.float32),
        params={
            name: values.view(ROW_ARRAYS[name].dtype)
            for key, values in arrays.items()
            if (name := key.removeprefix(prefix)) != key
        },
        draws=draws,
    )
    return replace(batch, sampling=sampling)


def encode_batch(batch: Batch, more_arrays: Mapping[str, Ints] = NO_ARRAYS, **more: Any) -> bytes:
    """Encode a batch for other ranks, with further int32 arrays and `more` JSON values.

    Sequences, statistics and sampling parameters are not sent.
    """
    prompt_logprobs = batch.prompt_logprobs
    arrays = dict(more_arrays) | {name: array for name in _ARRAYS if (array := getattr(batch, name)) is not None}
    arrays |= {f"row.{name}": values for name, values in batch.row_values.items()}
    for kind, values in batch.kinds.items():
        arrays |= {f"{kind}.{name}": array for name, array in values.items()}
    if batch.sampling is not None:
        arrays |= {"positions": batch.sampling.positions, "row_of": batch.sampling.row_of}
    if batch.drafts is not None:
        arrays |= {"drafts.rows": batch.drafts.rows, "drafts.counts": batch.drafts.counts}
        if batch.drafts.branches is not None:
            arrays |= {f"branches.{name}": array for name, array in batch.drafts.branches._asdict().items()}
    if batch.unknown_starts is not None:
        arrays["unknown_starts"] = batch.unknown_starts.astype(np.int32)
    if prompt_logprobs:
        requests = [(each.row, each.offset, len(each.targets)) for each in prompt_logprobs]
        arrays["prompt_logprobs"] = np.array(requests, np.int32)
    if batch.media:
        arrays["media"] = np.array([(span.offset, len(span.vectors)) for span in batch.media], np.int32)
        arrays["vectors"] = np.concatenate([span.vectors for span in batch.media]).view(np.int32)
    for index, copy in enumerate(batch.copies):
        arrays |= {f"copy{index}.source": copy.source_pages, f"copy{index}.target": copy.target_pages}
    body = {
        "batch": batch.number,
        "kinds": {kind: [*values] for kind, values in batch.kinds.items()},
        "row_values": [*batch.row_values],
        "copies": [(copy.source, copy.target) for copy in batch.copies],
        "adapters": [[*each] for each in batch.adapters],
        **more,
    }
    return encode(body, arrays)


def decode_batch(frame: Frame) -> Batch:
    """Decode a batch on a worker.

    The batch has no sequences. Its `sampling` has only positions, and the targets of prompt log-probabilities are 0.
    """
    arrays = frame.arrays
    sampling = None
    if "positions" in arrays:
        sampling = Sampling(arrays["positions"], arrays["row_of"], greedy=_NO_FLAGS, uniform=_NO_FLOATS)
    fields: dict[str, Any] = {name: arrays[name] for name in _ARRAYS if name in arrays}
    return Batch(
        number=frame.body["batch"],
        sequences=(),
        sampling=sampling,
        drafts=_decode_drafts(arrays) if "drafts.rows" in arrays else None,
        unknown_starts=arrays["unknown_starts"].astype(np.bool_) if "unknown_starts" in arrays else None,
        prompt_logprobs=tuple(
            PromptLogprobs(row, offset, np.zeros(count, np.int32), _NO_LOGPROBS)
            for row, offset, count in arrays["prompt_logprobs"].tolist()
        )
        if "prompt_logprobs" in arrays
        else (),
        row_values={name: arrays[f"row.{name}"] for name in frame.body["row_values"]},
        media=_decode_media(arrays["media"], arrays["vectors"]) if "media" in arrays else (),
        kinds={kind: {name: arrays[f"{kind}.{name}"] for name in names} for kind, names in frame.body["kinds"].items()},
        copies=tuple(
            PageCopy(source, target, arrays[f"copy{index}.source"], arrays[f"copy{index}.target"])
            for index, (source, target) in enumerate(frame.body["copies"])
        ),
        adapters=tuple(AdapterPlacement(*each) for each in frame.body["adapters"]),
        **fields,
    )


def _decode_drafts(arrays: Mapping[str, Ints]) -> Drafts:
    branches = None
    if "branches.rows" in arrays:
        branches = Branches(*(arrays[f"branches.{name}"] for name in Branches._fields))
    return Drafts(arrays["drafts.rows"], arrays["drafts.counts"], branches)


def _decode_media(spans: Ints, vectors: Ints) -> tuple[MediaSpan, ...]:
    """Decode media spans from [N, 2] offsets and lengths, and their vectors, which were sent as int32, bit for bit."""
    parts = np.split(vectors.view(np.float32), np.cumsum(spans[:-1, 1]))
    return tuple(MediaSpan(offset, part) for (offset, _), part in zip(spans.tolist(), parts, strict=True))


def _retrieve(step: asyncio.Future[Any]) -> None:
    """Mark a future's exception as retrieved, so that asyncio does not log it if no task waits for the future."""
    if not step.cancelled():
        step.exception()
