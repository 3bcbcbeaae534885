"""The runner of replicas that compute their steps together (data-parallel attention). Does not import torch.

Each replica is an attention group of one model. It has its own scheduler actor, which launches batches as if the
replica were alone. A common step computes at most one batch of each replica. A replica without a batch is idle in this
step.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import anyio

from runtime.batch import Batch, StepOutput

# Number of event-loop turns to wait for further replicas to launch, before a step begins without them. A replica needs
# about four turns from the result of a step to its next launch.
TURNS = 6


class JointRunner(Protocol):
    """Computes common steps of all replicas. Can run verbs (see `runtime.worker.verbs`) on some of the ranks."""

    @property
    def kernels_description(self) -> str: ...

    def launch_together(self, batches: Sequence[Batch | None]) -> asyncio.Future[list[StepOutput | None]]:
        """Enqueue a step with one batch per replica, or None for an idle replica."""
        ...

    def call(self, verb: str, payload: Mapping[str, Any], ranks: range | None = None) -> asyncio.Future[list[Any]]:
        """Run a verb (see `Runner.call`) on these ranks."""
        ...

    async def watch(self) -> None: ...

    def close(self) -> None: ...


class _Launched(NamedTuple):
    """A batch that a replica has launched, and that is in no step yet."""

    batch: Batch
    result: asyncio.Future[StepOutput]


class CommonSteps:
    """Combines the batches of several replicas into common steps.

    Must be used on the event loop of the replicas' actors. A step begins as soon as every busy replica has launched a
    batch. If no step is in flight, it begins after a few turns of the event loop at the latest, with the batches
    launched so far. Busy replicas therefore compute their steps together, and do not wait for an idle one.
    """

    def __init__(self, runner: JointRunner, num_replicas: int, ranks_each: int, max_in_flight: int) -> None:
        """Create the combiner.

        `max_in_flight` is 2 if a batch may be enqueued before the tokens of the last one are known, otherwise 1.
        """
        self.runner = runner
        self.replicas = [ReplicaRunner(self, index, ranks_each) for index in range(num_replicas)]
        self.num_steps = 0
        self._waiting: list[deque[_Launched]] = [deque() for _ in range(num_replicas)]
        self._num_flying = [0] * num_replicas  # by replica: number of steps in flight with a batch of the replica
        self._num_in_flight = 0
        self._max_in_flight = max_in_flight
        self._turn: asyncio.Handle | None = None  # set while a step waits some turns for further replicas to launch
        self._is_closed = False
        self._closing = threading.Lock()

    def launch(self, index: int, batch: Batch) -> asyncio.Future[StepOutput]:
        """Add a replica's batch to the next step that has no batch of this replica. Return the batch's result."""
        result: asyncio.Future[StepOutput] = asyncio.get_running_loop().create_future()
        result.add_done_callback(_retrieve)
        self._waiting[index].append(_Launched(batch, result))
        self._consider()
        return result

    def flush(self, index: int) -> None:
        """Enqueue all batches that this replica has launched."""
        while self._waiting[index]:
            self._begin()

    def close(self) -> None:
        """Close the runner, if it is not closed yet. Blocks. May be called from several threads."""
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                self.runner.close()

    def _consider(self) -> None:
        """Begin a step if every busy replica has launched a batch.

        If no step is in flight, begin one after at most `TURNS` turns of the event loop.
        """
        while any(self._waiting) and self._num_in_flight < self._max_in_flight:
            if not all(bool(waiting) or not flying for waiting, flying in zip(self._waiting, self._num_flying)):
                break
            if not self._num_in_flight and not all(self._waiting):
                break  # an idle replica may launch a batch soon
            self._begin()
        if any(self._waiting) and not self._num_in_flight and self._turn is None:
            self._wait(TURNS)

    def _wait(self, turns: int) -> None:
        """Begin a step after some turns of the event loop, unless it begins earlier."""
        if turns:
            self._turn = asyncio.get_running_loop().call_soon(self._wait, turns - 1)
        else:
            self._begin()

    def _begin(self) -> None:
        """Enqueue a step with the oldest batch of each replica that has one."""
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        launched = [waiting.popleft() if waiting else None for waiting in self._waiting]
        self._num_in_flight += 1
        self.num_steps += 1
        for index, each in enumerate(launched):
            self._num_flying[index] += each is not None
        step = self.runner.launch_together([None if each is None else each.batch for each in launched])
        step.add_done_callback(lambda done: self._settle(launched, done))

    def _settle(self, launched: Sequence[_Launched | None], step: asyncio.Future[list[StepOutput | None]]) -> None:
        """Give each replica the result of its batch, or the exception of the step."""
        self._num_in_flight -= 1
        error = step.exception()
        outputs = [None] * len(launched) if error is not None else step.result()
        for index, (each, output) in enumerate(zip(launched, outputs, strict=True)):
            if each is None:
                continue
            self._num_flying[index] -= 1
            if each.result.done():
                continue
            if error is not None:
                each.result.set_exception(error)
            elif output is not None:
                each.result.set_result(output)
        self._consider()


class ReplicaRunner:
    """The runner of one replica (see `Runner`). Its ranks are those of the replica's attention group."""

    def __init__(self, steps: CommonSteps, index: int, num_ranks: int) -> None:
        self._steps = steps
        self._index = index
        self._ranks = range(index * num_ranks, (index + 1) * num_ranks)

    @property
    def kernels_description(self) -> str:
        """One line with the implementation and arithmetic of each operation."""
        return self._steps.runner.kernels_description

    def launch(self, batch: Batch) -> asyncio.Future[StepOutput]:
        """Enqueue the batch for a common step, and return immediately."""
        return self._steps.launch(self._index, batch)

    def finish_oldest(self) -> None:
        """Do nothing: common steps do not use pipeline parallelism."""

    def call(self, verb: str, payload: Mapping[str, Any]) -> asyncio.Future[list[Any]]:
        """Run a verb (see `Runner.call`) on the ranks of this replica, after the steps launched so far."""
        self._steps.flush(self._index)
        return self._steps.runner.call(verb, payload, self._ranks)

    async def watch(self) -> None:
        """Wait forever. On the first replica, raise `WorkerFailed` when a worker process has ended."""
        if self._index == 0:
            await self._steps.runner.watch()
        await anyio.sleep_forever()

    def close(self) -> None:
        """Finish launched steps and release everything, for all replicas. Blocks."""
        self._steps.close()


def _retrieve(result: asyncio.Future[StepOutput]) -> None:
    """Mark a future's exception as retrieved, so that asyncio does not log it if no task waits for the future."""
    if not result.cancelled():
        result.exception()
