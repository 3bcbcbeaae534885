"""Several replicas of the model in one engine: who gets which request, and what becomes of those of a dead one."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import anyio

from runtime.actors.detokenizer import DetokenizerActor
from runtime.actors.live_requests import LiveRequest, LiveRequests
from runtime.actors.scheduler import SchedulerActor
from runtime.errors import EngineFailure
from runtime.scheduler.apply import final_delta

if TYPE_CHECKING:
    from runtime.actors.replica import Replica
    from runtime.metrics.series import EngineMetrics

logger = logging.getLogger("penstock.core")

MAX_RESTARTS = 3  # in a row; a replica that fails so often is given up
RESTART_RETRY_S = 10  # when to ask again while no replica is alive
RESTART_DELAY_S = 1.0  # before the second attempt, doubled with every further one

# Longest-prefix placement gives way when its choice has this many more requests than the least busy replica,
# beyond twice as many: a popular prefix is then computed a second time elsewhere, and shared there as well.
PREFIX_SLACK = 8


class ReplicaLoad(NamedTuple):
    """What is known of one replica when a request arrives."""

    num_requests: int  # that it has and that have not ended
    num_tokens: int  # of these, prompt and output so far
    num_cached: int  # tokens of the new prompt that it has in its cache


# The replicas that can take it -> index of the one that does.
BalancePolicy = Callable[[Sequence[ReplicaLoad]], int]


class Router:
    """One scheduler actor for each replica, all on one loop.

    A replica that fails is closed and started again: requests of which nothing was sent yet go to the others, the
    rest fail with the reason. Once it is back it gets its share of those that wait. The engine fails when the last
    replica is given up.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        start_replica: Callable[[int], Awaitable[Replica]],
        balance_method: str,
        requests: LiveRequests,
        detokenizer: DetokenizerActor,
        metrics: EngineMetrics | None = None,
    ) -> None:
        self._start_replica = start_replica
        self._policy = balance_policy(balance_method)
        self._requests = requests
        self._detokenizer = detokenizer
        self._metrics = metrics
        self._max_queued = replicas[0].plan.scheduler.max_queued
        self._num_given_up = 0
        # By the replica's index; None while it is started again, and once it is given up.
        self._schedulers: list[SchedulerActor | None] = [
            self._actor(index, replica) for index, replica in enumerate(replicas)
        ]

    @property
    def alive(self) -> list[SchedulerActor]:
        return [scheduler for scheduler in self._schedulers if scheduler is not None]

    @property
    def room(self) -> int:
        """How many more choices the queues take. Requests wait here while no replica is alive."""
        if alive := self.alive:
            return sum(scheduler.room for scheduler in alive)
        return self._max_queued - sum(len(live.sequences) for live in self._requests)

    @property
    def least_urgency(self) -> float:
        """As of a scheduler, over all."""
        return min((scheduler.least_urgency for scheduler in self.alive), default=math.inf)

    @property
    def wait_s(self) -> float:
        """How long a request that comes now is expected to wait; as of a scheduler."""
        return min((scheduler.wait_s for scheduler in self.alive), default=0.0)

    @property
    def retry_after_s(self) -> int:
        """The hint for those who are refused."""
        return min((scheduler.retry_after_s for scheduler in self.alive), default=RESTART_RETRY_S)

    def admit(self, live: LiveRequest) -> None:
        """Give a request to a replica; to the first that is alive again, if none is."""
        alive = self.alive
        if alive:
            index = self._policy(self._loads(alive, live)) if len(alive) > 1 else 0
            alive[index].admit(live)

    async def run(self) -> None:
        """Until cancelled. Raises `EngineFailure` when no replica is left, or an actor's mistake."""
        async with anyio.create_task_group() as replicas:
            for index in range(len(self._schedulers)):
                replicas.start_soon(self._run_replica, index)

    async def _run_replica(self, index: int) -> None:
        """Run a replica, over and over: each time it fails it is started again, until it is given up."""
        while scheduler := self._schedulers[index]:
            try:
                await scheduler.run()
            except EngineFailure as error:
                logger.error("Replica %d failed: %s", index, error.message)
                self._schedulers[index] = None
                self._move_requests(scheduler, error)
                await self._close(index, scheduler)
                if not await self._restart(index):
                    self._num_given_up += 1
                if self._num_given_up == len(self._schedulers):
                    raise

    async def _close(self, index: int, scheduler: SchedulerActor) -> None:
        try:
            await scheduler.close()
        except Exception:  # the replica's border: what is left of it must not end the healthy ones
            logger.exception("Replica %d could not be closed.", index)

    async def _restart(self, index: int) -> bool:
        """Start a replica again; False when every attempt failed."""
        for attempt in range(MAX_RESTARTS):
            if attempt:
                await anyio.sleep(RESTART_DELAY_S * 2 ** (attempt - 1))
            try:
                replica = await self._start_replica(index)
            except Exception:  # the replica's border: a device without memory must not end the healthy ones
                logger.exception("Replica %d could not be started again.", index)
                continue
            self._schedulers[index] = fresh = self._actor(index, replica)
            logger.warning("Replica %d is alive again.", index)
            for live in self._requests:
                if live.sequences and live.scheduler is None:
                    self.admit(live)
            self._share_waiting(fresh)
            return True
        logger.critical("Replica %d is given up.", index)
        return False

    def _share_waiting(self, fresh: SchedulerActor) -> None:
        """Move requests that wait elsewhere, the latest first, to a replica that has come back: to each its share."""
        waiting: dict[object, list[LiveRequest]] = {scheduler: [] for scheduler in self.alive}
        for live in self._requests:
            if live.scheduler in waiting and live.waits and live.aborting is None:
                waiting[live.scheduler].append(live)
        share = sum(map(len, waiting.values())) // len(waiting)

        def take(live: LiveRequest) -> None:
            if fresh in self._schedulers:
                fresh.admit(live)
            else:
                self.admit(live)

        for scheduler in self.alive:
            for live in waiting[scheduler][share:]:
                if scheduler is not fresh:
                    scheduler.give_back(live, take)

    def _move_requests(self, dead: SchedulerActor, error: EngineFailure) -> None:
        """Nothing more comes from this replica: give its requests to others, or fail them."""
        for live in self._requests:
            if live.scheduler is not dead:
                continue
            live.scheduler = None
            if live.aborting is not None:
                finish = live.aborting
                self._detokenizer.inbox.put([final_delta(sequence, finish) for sequence in live.sequences])
            elif live.begun:
                self._requests.fail(live.request.id, type(error)(error.message))
            else:
                live.sequences = [sequence.restarted() for sequence in live.sequences]
                self.admit(live)

    def _loads(self, alive: Sequence[SchedulerActor], new: LiveRequest) -> list[ReplicaLoad]:
        counts: dict[object, list[int]] = {scheduler: [0, 0] for scheduler in alive}
        for live in self._requests:
            if live.scheduler in counts:
                count = counts[live.scheduler]
                count[0] += 1
                count[1] += sum(s.num_tokens for s in live.sequences if s.finish is None)
        return [
            ReplicaLoad(*counts[actor], num_cached=actor.scheduler.num_cached(new.sequences[0]))
            for actor in alive
        ]

    def _actor(self, index: int, replica: Replica) -> SchedulerActor:
        return SchedulerActor.of(
            replica, self._requests, self._detokenizer, index=index, metrics=self._metrics
        )


def balance_policy(method: str) -> BalancePolicy:
    """The function for a `--load-balance-method`. Raises KeyError for a name that does not exist."""
    return {
        "round_robin": _RoundRobin,
        "shortest_queue": lambda: shortest_queue,
        "minimum_tokens": lambda: minimum_tokens,
        "longest_prefix": lambda: longest_prefix,
    }[method]()


class _RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._turns = count()

    def __call__(self, replicas: Sequence[ReplicaLoad]) -> int:
        return next(self._turns) % len(replicas)


def shortest_queue(replicas: Sequence[ReplicaLoad]) -> int:
    """Who has fewest requests, and of those fewest tokens."""
    return min(range(len(replicas)), key=lambda i: (replicas[i].num_requests, replicas[i].num_tokens))


def minimum_tokens(replicas: Sequence[ReplicaLoad]) -> int:
    """Who has fewest tokens in its requests, and of those fewest requests."""
    return min(range(len(replicas)), key=lambda i: (replicas[i].num_tokens, replicas[i].num_requests))


def longest_prefix(replicas: Sequence[ReplicaLoad]) -> int:
    """Who has most of the prompt in its cache, unless it is much busier than others; else fewest tokens."""
    best = max(
        range(len(replicas)),
        key=lambda i: (replicas[i].num_cached, -replicas[i].num_tokens, -replicas[i].num_requests),
    )
    idlest = min(replica.num_requests for replica in replicas)
    if replicas[best].num_cached and replicas[best].num_requests <= 2 * idlest + PREFIX_SLACK:
        return best
    return minimum_tokens(replicas)
